"""The interface of exporters, one for each engine, with its inputs: a profile and the kind of its draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.module_files import PartFile, read_part
from selfspec.draft_modules.registry import HEADS
from selfspec.llm.llm import LLM
from selfspec.profile.draft_spec import LayerSkipSpec, LookupSpec, ProposerSpec
from selfspec.profile.drafter_specs import HeadSpec, ModelSpec
from selfspec.profile.schema import Profile
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath

_LOOKUP = "lookup tokens alone (draft: {kind: lookup})"
_LAYER_SET = "a fixed set of whole layers, found by selfspec search --kv own"
_INSTEAD = {
    "recycle": _LOOKUP,
    "input": _LOOKUP,
    "jacobi": _LOOKUP,
    "lookahead": _LOOKUP,
    "swift": _LAYER_SET,
    "clasp": _LAYER_SET,
    "merged": "one of the merged drafters, in a separate profile",
}
_FAR = 2**16  # tokens; stands for no limit on the draft length


def check_drafts(profile: Profile) -> None:
    """Raise `SelfspecError` for a profile that no engine could have: without drafts, or several ways to draft.

    Also for a path with a trained part, and for the file of a draft head that cannot be read.
    """
    if not profile.drafts:
        raise SelfspecError("the profile drafts nothing, so there is nothing to export")
    if profile.also:
        raise SelfspecError("the profile holds several ways to draft; engines have one: export one of the profiles")
    spec = profile.draft
    if isinstance(spec, HeadSpec):
        read_part(profile.part_path(spec.part))
    if isinstance(spec, LayerSkipSpec) and spec.trained is not None:
        raise SelfspecError(
            f"the profile's path has a trained part ({spec.trained}), which no other engine can run; "
            "expected the profile without it, from which the part was trained"
        )


def with_fixed_length(profile: Profile, tokens: int) -> Profile:
    """Return the profile with drafts as other engines make them: always `tokens` tokens, in a sequence.

    Candidates, additional lookup tokens, retrieval stores, earlier answers, confidences and draft vocabularies are
    removed.
    """
    spec = profile.draft
    update: dict[str, object] = {"candidates": 1, "proposers": None, "confidence": None, "vocabulary": None}
    if isinstance(spec, LookupSpec):
        proposers = [proposer for proposer in spec.proposers if proposer.kind not in ("store", "answers")]
        update = {"proposers": proposers or [ProposerSpec()]}
    known = type(spec).model_fields
    bare = profile.model_copy(
        update={"draft": spec.model_copy(update={name: value for name, value in update.items() if name in known})}
    )
    return bare.with_controller(ControllerSpec(name="fixed", options={"k": tokens}))


@dataclass(frozen=True, slots=True)
class ExportJob:
    """The input of an export: the target, its profile, and the output folder.

    `type_name`: the type of the target's weights in GGUF files, such as `q8_0`; None: the model's dtype.
    """

    llm: LLM
    profile: Profile
    out: Path
    type_name: str | None = None


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The result of writing an export: `commands` as pairs (description, command to run), and notes on their use."""

    commands: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The drafts that an engine can run for an export, and how to write and rehearse them.

    `drafted`: a description of the drafts. `write(folder, tokens)`: writes the engine's files, for drafts of `tokens`
    tokens. The rehearsal, a test run of the drafts, drafts with `draft()`, a model with the weights as the engine will
    store them. If `draft` is None, it drafts with the target along `path`; if `path` is None too, with the profile's
    drafter.
    `most`: the longest draft, in tokens. `limitations`: features of the profile that the engine lacks, one line each.
    `itself`: whether the engine runs selfspec, which drafts exactly as the profile says.
    """

    drafted: str
    write: Callable[[Path, int], ExportResult]
    path: DraftPath | None = None
    draft: Callable[[], Any] | None = None
    most: int = 2**16
    limitations: tuple[str, ...] = ()
    itself: bool = False


class Exporter(ABC):
    """Base of the exporters, one for each engine: a program or library other than selfspec that runs models.

    `name`: the name of the engine. `read`: the sources of the engine's file formats, with versions. `tried`: how the
    exports were tested. All three are texts for the README.

    A subclass has a method for each kind of drafts, which returns the plan of exporting a job to its engine. Each
    raises `SelfspecError`, whose message names an alternative, if the engine cannot run the drafts.
    """

    name: ClassVar[str]
    read: ClassVar[str]
    tried: ClassVar[str]

    def plan_export(self, job: ExportJob) -> ExportPlan:
        """Return the plan of exporting `job` to this exporter's engine: which drafts, and how to write them.

        The plan's drafts are those that the engine can run for `job.profile`. Raises `SelfspecError`, whose message
        names an alternative, if the engine cannot run this kind of drafts.
        """
        match job.profile.draft:
            case LookupSpec(proposers=proposers):
                return self.plan_lookup(job, answers=any(proposer.kind == "answers" for proposer in proposers))
            case ModelSpec() as spec:
                return self.plan_model(job, spec)
            case HeadSpec(part=name):
                part = read_part(job.profile.part_path(name))
                if part.kind not in HEADS:
                    return self.plan_other(job, part.kind, _LOOKUP)
                return self.plan_head(job, part, int(part.settings.get("net", part.settings).get("places", _FAR)))
            case LayerSkipSpec() as spec:  # the draft model has logits over the whole vocabulary
                return self.plan_layers(job, spec.model_copy(update={"vocabulary": None}).path)
            case spec:
                return self.plan_other(job, spec.kind, _INSTEAD.get(spec.kind, _LOOKUP))

    @abstractmethod
    def plan_lookup(self, job: ExportJob, *, answers: bool) -> ExportPlan:
        """Return the plan for drafts by n-gram lookup, with `answers` in earlier answers, too."""

    @abstractmethod
    def plan_layers(self, job: ExportJob, path: DraftPath) -> ExportPlan:
        """Return the plan for drafts by the target's sub-layers along a path."""

    @abstractmethod
    def plan_model(self, job: ExportJob, spec: ModelSpec) -> ExportPlan:
        """Return the plan for drafts by a separate model."""

    @abstractmethod
    def plan_head(self, job: ExportJob, part: PartFile, places: int) -> ExportPlan:
        """Return the plan for drafts of at most `places` tokens by a trained head."""

    def plan_other(self, job: ExportJob, kind: str, instead: str) -> ExportPlan:
        """Return the plan for drafts that only selfspec makes, where it can run in the engine."""
        raise self.refused(f"drafts of kind '{kind}'", instead)

    def refused(self, drafts: str, instead: str) -> SelfspecError:
        """Return the error for drafts that the engine cannot run; `instead`: an alternative that it can run."""
        return SelfspecError(f"{self.name} cannot run {drafts}; it could run instead: {instead}")
