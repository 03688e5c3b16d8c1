"""Training of bridges and adapters for the draft path of a profile, and the resulting profile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.module_files import PartFile, path_part, read_part, trained_of
from selfspec.drafters.registry import draft_path
from selfspec.llm.llm import LLM
from selfspec.models.quantized_sublayers import Trained
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.module_files_spec import ModuleFile, sha256_of
from selfspec.profile.reading import write_profile
from selfspec.profile.schema import Profile, bring_path
from selfspec.runtime.base import Runtime
from selfspec.training.bridges import agreement, fit_bridges
from selfspec.training.options import Kind, TrainOptions
from selfspec.training.state import Progress, TrainingCallbacks
from selfspec.training.texts import TrainingText
from selfspec.types.draft_path import DraftPath

RANK = 16  # default rank of an adapter


@dataclass(frozen=True, slots=True)
class ProfilePath:
    """A profile with a draft path, the path, and the bridges and updates already trained for the path."""

    profile: Profile
    path: DraftPath
    trained: Trained

    @classmethod
    def from_profile(cls, runtime: Runtime, profile: Profile | None, kind: Kind) -> ProfilePath:
        """Return the draft path of a profile, for training a module of `kind`.

        Raises `SelfspecError` if the profile has no draft path, if one of its files is missing, or for a bridge if the
        path skips no whole layer.
        """
        if profile is None or not isinstance(profile.draft, LayerSkipSpec) or not profile.drafts:
            raise SelfspecError(f"a part of kind '{kind}' belongs to a draft path; expected a profile that has one")
        spec = profile.draft
        path = draft_path(runtime, spec, profile)
        if kind == "bridge" and not path.runs(runtime.layers):
            raise SelfspecError(
                "the profile's path skips no whole layer, and bridges replace skipped layers; expected a path that does"
            )
        had = Trained() if spec.trained is None else trained_of(runtime, read_part(profile.part_path(spec.trained)))
        return cls(profile, path, had)

    def checkpoint_settings(self) -> dict[str, Any]:
        """Return the settings of the path that a checkpoint of its training depends on."""
        path = self.profile.draft.model_dump(mode="json", include={"skip", "int8", "int4", "head", "trained"})
        files = {"int4 weights": self.path.int4_weights, "trained": self.path.trained}  # by their contents
        return {"path": path, **{name: of for name, of in files.items() if of is not None}}

    def with_part(self, file: Path) -> Profile:
        """Return the profile with `file` as the trained module of its path, in place of an earlier file.

        A draft head below the path is kept only if its file is in the same folder; int4 weights are copied there.
        """
        assert isinstance(self.profile.draft, LayerSkipSpec)
        name, below = file.stem, self.profile.draft.below
        if below is not None and self.profile.part_path(below.part).parent.resolve() != file.parent.resolve():
            below = None  # a profile and its part files are in one folder
        other_parts = {} if below is None else {below.part: self.profile.parts[below.part]}
        other_parts |= bring_path(self.profile, file.parent, trained=False)
        return self.profile.model_copy(
            update={
                "draft": self.profile.draft.model_copy(update={"trained": name, "below": below, "spared": None}),
                "parts": {**other_parts, name: ModuleFile(file=file.name, sha256=sha256_of(file))},
                "measured": [],
                "predicted": None,
                "also": [],
            }
        )


def adapter_rank(trained: Trained, rank: int | None) -> int:
    """Return the rank of an adapter: that of the path's own adapter, if it has one, from which training goes on.

    Raises `SelfspecError` for another rank than that.
    """
    known = {len(update.down) for update in trained.updates.values()}
    if known and rank not in (None, *known):
        raise SelfspecError(f"rank {rank}: the path's adapter has rank {min(known)}; expected the same, or none")
    return rank or next(iter(known), RANK)


def bridged(
    llm: LLM,
    own: ProfilePath,
    texts: Sequence[TrainingText],
    held_out_texts: Sequence[TrainingText],
    options: TrainOptions,
    callbacks: TrainingCallbacks,
) -> tuple[PartFile, Progress]:
    """Fit bridges over all layers that the path skips whole, replacing its present bridges; return their part file."""
    begun, runs = time.perf_counter(), own.path.runs(llm.runtime.layers)
    callbacks.stage("fitting", len(runs))
    trained = fit_bridges(
        llm.runtime,
        own.path,
        texts,
        held_out_texts,
        began=Trained(updates=own.trained.updates),
        rank=options.rank,
        on_progress=lambda done: callbacks.step(done, f"{done} of {len(runs)} bridges"),
    )
    settings = {"rank": options.rank}
    return path_part("bridge", settings, trained, llm.runtime), Progress(seconds=time.perf_counter() - begun)


def write_path_profile(
    llm: LLM, file: Path, part: PartFile, own: ProfilePath, held_out_texts: Sequence[TrainingText]
) -> tuple[Path, dict[str, Any]]:
    """Write the profile that uses a part file next to it; return the profile's path and the agreement with the model.

    The agreement is that of the draft path on held-out answers, before and after training. `right`: the share of
    positions with the model's most likely token. `shared`: the overlap of the two distributions; see `agreement`.
    """
    path = replace(own.path, trained=sha256_of(file))
    llm.runtime.register_trained(path.trained or "", trained_of(llm.runtime, part))
    before, after = (agreement(llm.runtime, candidate, held_out_texts) for candidate in (own.path, path))
    write_profile(own.with_part(file), file.with_suffix(".yaml"))
    return file.with_suffix(".yaml"), {"right": [before[0], after[0]], "shared": [before[1], after[1]]}
