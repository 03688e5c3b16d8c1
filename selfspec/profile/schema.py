"""Schema of profiles: the draft method of a model, the search that found it, and its measurements.

A profile is a YAML file. Only `read_profile` reads it; unknown keys, wrong types and out-of-range values raise errors
with the key's path. A published skip set without measurements is a valid profile. `profile_schema` gives the JSON
schema for editors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, SerializeAsAny, model_validator

from selfspec.basics.checked_model import Count, Data, Positive, Rate, Seconds, Share
from selfspec.basics.errors import SelfspecError, short
from selfspec.profile import drafter_specs as drafter_specs  # imported to register the kinds
from selfspec.profile.draft_spec import (
    DraftSpec,
    LayerSkipSpec,
    LookupSpec,
    PlainSpec,
    ProposerSpec,
    parse_draft,
    proposers_of,
)
from selfspec.profile.module_files_spec import ModuleFile, bring_parts, check_parts
from selfspec.types.acceptance import AcceptanceCurve, PayoffModel, estimate_payoff
from selfspec.types.controller import ControllerSpec
from selfspec.types.costs import WIDER, CostModel
from selfspec.types.draft_path import DraftPath, SkipSet
from selfspec.types.identity import BitsRead, Identity, bits_read


class Published(Data):
    """Source of a published skip set. Published measurements are not part of the profile."""

    paper: str | None = Field(None, description="Paper, such as arXiv:2309.08168.")
    repository: str | None = Field(None, description="GitHub repository, as owner/name.")
    commit: str | None = Field(None, description="Commit from which the file was read.")
    file: str | None = Field(None, description="File that holds the skip set.")
    key: str | None = Field(None, description="Key of the skip set in that file.")
    calibration: str | None = Field(None, description="Name of the dataset that it was searched on.")


class Calibration(Data):
    """Calibration text of a search: its source, its size, and a hash of the token ids.

    `column` and `template`: how rows became prompts, if specified. `chat`: each prompt was a user's message in the
    model's chat template. `drawn_from`: the number of distinct prompts in the source.
    """

    source: str = Field(description="'builtin', 'built-in chat prompts', or the name of a file, folder or preset.")
    column: str | None = Field(None, description="Column that holds the prompts.")
    template: str | None = Field(None, description="Template that makes a prompt of each row.")
    chat: bool = Field(
        False, description="Whether the model's chat template was applied, with each prompt as a user message."
    )
    drawn_from: Positive | None = Field(None, description="Number of distinct prompts.")
    prompts: Positive
    tokens: Positive
    sha256: str = Field(description="SHA-256 of the token ids.")


class SearchRecord(Data):
    """Record of the search that found the draft. `kv`: whether drafts read the target's KV cache (shared) or their own.

    `minutes`: the time limit; None: no limit. `seconds`: the duration, from loading the model to saving the profile.
    """

    strategy: str
    objective: str
    trials: Count
    seed: int
    seconds: Seconds
    max_new_tokens: Positive
    temperature: Rate = 0.0
    kv: Annotated[str, Field(pattern="^(shared|own)$")] = "shared"
    minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    interrupted: bool = False
    extra_bytes: Count | None = Field(
        None, description="Bytes of quantised draft weights, in addition to the model's own."
    )


class Prediction(Data):
    """The speed that the search predicted for its own prompts, prefill included.

    `draft_cost`: the time of a draft step divided by the time of a plain step.
    """

    speedup: Rate
    tokens_per_second: Rate
    acceptance_rate: Share
    tokens_per_round: Rate
    draft_cost: Rate


class Measurement(Data):
    """Speed measured in interleaved runs with plain decoding.

    `interval`: 95% bootstrap confidence interval of the median `speedup`.
    """

    machine: str
    device: str
    dtype: str
    threads: Positive
    prompts: Positive
    held_out: bool
    max_new_tokens: Positive
    rounds: Positive
    temperature: Rate
    top_k: Positive | None = None
    top_p: Rate | None = None
    plain_tokens_per_second: Rate
    tokens_per_second: Rate
    speedup: Rate
    interval: Annotated[list[Rate], Field(min_length=2, max_length=2)]
    acceptance_rate: Share
    tokens_per_round: Rate


class Profile(Data):
    """The draft method of one model, with its search record, costs and measurements.

    `draft`: the draft spec; plain decoding when left out. `parts`: trained weights in files beside the profile, by
    name. `acceptance`: the acceptance curve of drafted tokens. `published`: the source of a published skip set. `also`:
    alternative profiles of the same model; each sequence uses this profile or an alternative.
    """

    version: Literal[2] = Field(2, description="Version of the profile format.")
    model: Identity
    draft: Annotated[SerializeAsAny[DraftSpec], BeforeValidator(parse_draft)] = PlainSpec()
    parts: dict[str, ModuleFile] = Field({}, description="Files of trained modules beside this file, by name.")
    published: Published | None = None
    calibration: Calibration | None = None
    search: SearchRecord | None = None
    costs: CostModel | None = None
    acceptance: AcceptanceCurve | None = None
    predicted: Prediction | None = None
    measured: list[Measurement] = Field([], description="Speeds measured against plain decoding; empty if none were.")
    versions: dict[str, str] = Field({}, description="Versions of the packages that the profile was made with.")
    note: str | None = Field(None, description="Free text.")
    also: list[Profile] = Field([], description="Alternative profiles; each sequence is routed to one.")

    _folder: Path | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _draft_fits(self) -> Self:
        self.draft.check(self.model)
        for number, other in enumerate(self.also):
            if other.also or other.parts:
                raise SelfspecError(f"also.{number}: expected a profile without parts and without alternatives")
            if difference := self.model.mismatch(other.model):
                raise SelfspecError(f"also.{number}: is of another model: {difference}")
        return self

    @property
    def alternatives(self) -> list[Self]:
        """One profile for each draft method: this profile without its alternatives, then each alternative."""
        return [self.model_copy(update={"also": []}), *self.also] if self.also else [self]  # type: ignore[list-item]

    @property
    def leaf_specs(self) -> list[DraftSpec]:
        """The specs of all alternatives that contain no further specs."""
        return [leaf for alternative in self.alternatives for leaf in alternative.draft.leaf_specs]

    @property
    def drafts(self) -> bool:
        """Whether any draft method ever drafts a token."""
        return self.draft.drafts or any(other.drafts for other in self.also)

    @property
    def layer_skip(self) -> LayerSkipSpec:
        """The layer-skip spec of the draft; for other kinds of draft, a spec that skips and quantises nothing."""
        return next((spec for spec in self.draft.leaf_specs if isinstance(spec, LayerSkipSpec)), LayerSkipSpec())

    @property
    def path(self) -> DraftPath:
        """The draft path; for other kinds of draft, the full model."""
        return self.layer_skip.path

    @property
    def path_only(self) -> Self:
        """The profile with its draft path alone: without proposers, a draft head below the path, and alternatives."""
        alone = self.layer_skip.model_copy(update={"proposers": None, "spared": None, "below": None})
        draft = alone if isinstance(self.draft, LayerSkipSpec) else self.draft
        return self.model_copy(update={"draft": draft, "measured": [], "predicted": None, "also": []})

    def with_other_draft(self, draft: DraftSpec) -> Profile:
        """Return a profile of the same model that drafts otherwise, of which nothing but the costs is known.

        The note is kept unless it is a search's, since it may say that the costs are assumed.
        """
        note = self.note if self.search is None else None
        other = Profile(model=self.model, draft=draft, costs=self.costs, note=note)
        return other if self._folder is None else other.with_folder(self._folder)

    def with_proposers(self, *, store: str | Path | None = None, answers: str | Path | None = None) -> Self:
        """Return the profile with proposers for a retrieval store, and for earlier answers, added.

        A plain profile becomes a lookup draft, with prompt lookup too. Raises `SelfspecError` for a kind of draft that
        takes no proposers.
        """
        files: dict[Literal["store", "answers"], str | Path | None] = {"store": store, "answers": answers}
        if answers is not None:
            files["answers"] = Path(answers).absolute()  # a relative path in a profile is one from the profile's folder
        more = [ProposerSpec(kind=kind, path=str(path)) for kind, path in files.items() if path is not None]
        if not more:
            return self
        also = [other.with_proposers(store=store, answers=answers) for other in self.also]
        if not self.draft.drafts:
            draft = LookupSpec(proposers=[ProposerSpec(), *more])
            return self.model_copy(update={"draft": draft, "acceptance": None, "also": also})
        if "proposers" not in type(self.draft).model_fields:
            raise SelfspecError(f"a draft of kind '{self.draft.kind}' takes no proposers; leave the {more[0].kind} out")
        existing = [proposer for proposer in proposers_of(self.draft) if proposer not in more]
        return self.model_copy(
            update={"draft": self.draft.model_copy(update={"proposers": [*existing, *more]}), "also": also}
        )

    @property
    def bits_read(self) -> BitsRead | None:
        """Bits per weight that a draft step reads; None if the profile lacks the model's sizes.

        Unquantised weights count with the measured dtype, or with 32 bits without a measurement.
        """
        return bits_read(self.path, self.model, dtype=self.measured[0].dtype if self.measured else None)

    @property
    def skip_set(self) -> SkipSet:
        """The skip set of the draft path."""
        return self.layer_skip.skip.skip_set()

    @property
    def draft_share(self) -> float:
        """The share of the vocabulary that can be drafted."""
        return self.path.share(self.model.vocabulary)

    @property
    def payoff(self) -> PayoffModel:
        """The payoff model of this profile for rate-optimal controllers; estimated if the profile has no costs."""
        layers = self.model.layers
        if self.costs is None:
            payoff = estimate_payoff(self.path, layers, self.acceptance)
        else:
            curve, spared = self.acceptance or AcceptanceCurve(), self.layer_skip.spared or 0.0
            payoff = PayoffModel.from_costs(
                self.costs, self.path, layers, curve, vocabulary=self.draft_share, spared=spared
            )
        if (step := self.draft.step_share) is not None:
            wider = tuple(step * share for share in (1.0, *WIDER)) if self.draft.checks_lookup else ()
            keys = payoff.per_key._replace(draft=step * payoff.per_key.plain)
            return replace(payoff, draft=step, wider=wider, per_key=keys)
        below = self.layer_skip.below
        return payoff if below is None else replace(payoff, head=below.step * (payoff.wider or (payoff.draft,))[0])

    def with_controller(self, controller: ControllerSpec) -> Self:
        """Return the profile with another controller. Raises `SelfspecError` for a kind of draft without controller."""
        if "controller" not in type(self.draft).model_fields:
            raise SelfspecError(f"a draft of kind '{self.draft.kind}' has no controller to replace; leave it out")
        draft = self.draft.model_copy(update={"controller": controller})
        return self.model_copy(
            update={"draft": draft, "also": [other.with_controller(controller) for other in self.also]}
        )

    def with_alternatives(self, others: Sequence[Profile]) -> Self:
        """Return the profile with the draft methods of `others` as further alternatives.

        Raises `SelfspecError` if the profiles are of different models, or if one of `others` has parts.
        """
        data = {"also": [*self.also, *(alternative for other in others for alternative in other.alternatives)]}
        return type(self).model_validate({**dict(self), **data})

    @property
    def folder(self) -> Path | None:
        """The folder of the profile's file; None if it was not read from a file, or refers to no other files."""
        return self._folder

    def part_path(self, name: str) -> Path:
        """Return the path of a part's file. Raises `SelfspecError` for an unknown part, and without a `folder`."""
        if name not in self.parts:
            raise SelfspecError(f"the profile has no part {short(name)}; it has: {', '.join(self.parts) or 'none'}")
        if self._folder is None:
            raise SelfspecError(f"part {short(name)}: the profile was not read from a file, beside which parts lie")
        return self._folder / self.parts[name].file

    @property
    def answers_paths(self) -> list[str]:
        """The paths of all files of earlier answers, as the profile names them."""
        named = [proposer for leaf in self.leaf_specs for proposer in proposers_of(leaf) if proposer.kind == "answers"]
        return [proposer.path for proposer in named if proposer.path is not None]

    def local_proposers(self, spec: DraftSpec) -> list[ProposerSpec]:
        """Return the proposers of `spec`; relative paths of earlier answers begin at the profile's folder, if any."""
        return [
            proposer.model_copy(update={"path": str(self._folder / proposer.path)})
            if proposer.kind == "answers" and proposer.path is not None and self._folder is not None
            else proposer
            for proposer in proposers_of(spec)
        ]

    def with_folder(self, folder: Path) -> Self:
        """Return the profile whose part files and earlier answers are looked up in `folder`.

        Raises `SelfspecError` if a part is missing, or is not the one that the profile was written with, and if a file
        of answers is a link out of the folder, since new answers would be written there.
        """
        check_parts(self.parts, folder)
        for path in self.answers_paths:
            if not (folder / path).resolve().is_relative_to(folder.resolve()):
                raise SelfspecError(f"answers: {folder / path} is a link out of the profile's folder; expected a file")
        named = any(leaf.may_name_files for leaf in self.leaf_specs)
        if not self.parts and not named and not self.answers_paths:
            return self
        profile = self.model_copy(update={"also": [other.with_folder(folder) for other in self.also]})
        profile._folder = folder
        return profile

    @property
    def slower(self) -> bool:
        """Whether plain decoding was at least as fast in any of the profile's measurements."""
        return any(m.speedup <= 1 for m in self.measured)


def bring_path(profile: Profile, folder: Path, *, trained: bool = True) -> dict[str, ModuleFile]:
    """Copy the files that a profile's draft path names to `folder`, where it lacks them; return these parts by name.

    They are those of its int4 weights and, if `trained`, of its trained modules. Raises `SelfspecError` if a file
    cannot be copied.
    """
    draft = profile.layer_skip
    names = [name for name in (draft.int4_weights, draft.trained if trained else None) if name is not None]
    brought = {name: profile.parts[name] for name in names}
    if brought and profile.folder is not None:
        return bring_parts(brought, profile.folder, folder)
    return brought
