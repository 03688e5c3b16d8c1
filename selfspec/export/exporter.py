"""The interface of exporters, one for each engine, with its inputs: a profile and the kind of its draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.module_files import PartFile, read_part
from selfspec.draft_modules.registry import HEADS
from selfspec.llm.llm import LLM
from selfspec.profile.draft_spec import LayerSkipSpec, LookupSpec, ProposerSpec
from selfspec.profile.drafter_specs import HeadSpec, ModelSpec
from selfspec.profile.schema import Profile
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath


@dataclass(frozen=True, slots=True)
class LookupDraft:
    """Drafts by n-gram lookup in prompt and output; `answers`: whether also in earlier answers."""

    answers: bool


@dataclass(frozen=True, slots=True)
class Sublayers:
    """Drafts by the target's sub-layers along a draft path, with logits over the whole vocabulary."""

    path: DraftPath


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Drafts by a separate model, the draft model that `spec` names."""

    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """Drafts by a trained draft head, stored in `part`; `places`: the longest draft, in tokens."""

    part: PartFile
    places: int


@dataclass(frozen=True, slots=True)
class UnsupportedDraft:
    """Drafts that no other engine can run; `kind`: their kind in profiles; `instead`: a similar kind, for messages."""

    kind: str
    instead: str


Drafts = LookupDraft | Sublayers | DraftModel | TrainedHead | UnsupportedDraft
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


def drafts_of(profile: Profile) -> Drafts:
    """Return the kind of drafts that a profile describes.

    Raises `SelfspecError` if the profile drafts nothing, has several draft methods, or has a path with a trained part.
    """
    if not profile.drafts:
        raise SelfspecError("the profile drafts nothing, so there is nothing to export")
    if profile.also:
        raise SelfspecError("the profile holds several ways to draft; engines have one: export one of the profiles")
    spec = profile.draft
    if isinstance(spec, LookupSpec):
        return LookupDraft(any(proposer.kind == "answers" for proposer in spec.proposers))
    if isinstance(spec, ModelSpec):
        return DraftModel(spec)
    if isinstance(spec, HeadSpec):
        part = read_part(profile.part_path(spec.part))
        places = part.settings.get("net", part.settings).get("places", _FAR)
        return TrainedHead(part, int(places)) if part.kind in HEADS else UnsupportedDraft(part.kind, _LOOKUP)
    if isinstance(spec, LayerSkipSpec):
        if spec.trained is not None:
            raise SelfspecError(
                f"the profile's path has a trained part ({spec.trained}), which no other engine can run; "
                "expected the profile without it, from which the part was trained"
            )
        return Sublayers(spec.model_copy(update={"vocabulary": None}).path)
    return UnsupportedDraft(spec.kind, _INSTEAD.get(spec.kind, _LOOKUP))


def with_fixed_length(profile: Profile, tokens: int) -> Profile:
    """Return the profile with drafts as other engines make them: always `tokens` tokens, in a sequence.

    Candidates, additional lookup tokens, retrieval stores, confidences and draft vocabularies are removed.
    """
    spec = profile.draft
    update: dict[str, object] = {"candidates": 1, "proposers": None, "confidence": None, "vocabulary": None}
    if isinstance(spec, LookupSpec):
        proposers = [proposer for proposer in spec.proposers if proposer.kind != "store"]
        update = {"proposers": proposers or [ProposerSpec()]}
    known = type(spec).model_fields
    bare = profile.model_copy(
        update={"draft": spec.model_copy(update={name: value for name, value in update.items() if name in known})}
    )
    return bare.with_controller(ControllerSpec(name="fixed", options={"k": tokens}))


@dataclass(frozen=True, slots=True)
class ExportJob:
    """The input of an export: the target, its profile, and the output folder.

    `drafts`: the kind of drafts that the profile describes. `type_name`: the type of the target's weights in GGUF
    files, such as `q8_0`; None: the model's dtype.
    """

    llm: LLM
    profile: Profile
    drafts: Drafts
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


class Exporter(Protocol):
    """An exporter for one engine: a program or library other than selfspec that runs models, such as vLLM.

    `name`: the name of the engine. `read`: the sources of the engine's file formats, with versions. `tried`: how the
    exports were tested. All three are texts for the README.
    """

    name: str
    read: str
    tried: str

    def plan_export(self, job: ExportJob) -> ExportPlan:
        """Return the plan of exporting `job` to this exporter's engine: which drafts, and how to write them.

        The plan's drafts are those that the engine can run for `job.profile`. Raises `SelfspecError`, whose message
        names an alternative, if the engine cannot run this kind of drafts.
        """
        ...


def refused(engine: str, drafts: str, instead: str) -> SelfspecError:
    """Return the error for an engine that cannot run `drafts`; `instead`: an alternative that it can run."""
    return SelfspecError(f"{engine} cannot run {drafts}; it could run instead: {instead}")
