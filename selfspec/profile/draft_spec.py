"""Draft specs of profiles: one validated data class for each kind of draft, in a registry.

`selfspec.drafters.registry` builds drafters from specs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from selfspec.basics.checked_model import Count, Data, NonNegative, Share
from selfspec.basics.errors import SelfspecError, check_registered, short
from selfspec.types.acceptance import Confidence
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath, SkipSet, as_path
from selfspec.types.identity import Identity
from selfspec.types.methods import WIDEST_DRAFT


class Skip(Data):
    """A set of attention and MLP sub-layers in a profile, such as the sub-layers that drafting skips."""

    attention: list[Count] = Field([], description="Layers whose attention is listed, counted from 0.")
    mlp: list[Count] = Field([], description="Layers whose MLP is listed, counted from 0.")

    @classmethod
    def from_skip_set(cls, skip: SkipSet) -> Self:
        """Convert a skip set to its form in a profile."""
        return cls(attention=list(skip.attention), mlp=list(skip.mlp))

    def skip_set(self) -> SkipSet:
        """Convert to a `SkipSet`. Raises `SelfspecError` for a repeated index."""
        return SkipSet(tuple(self.attention), tuple(self.mlp))


class DraftSpec(Data):
    """Base class of draft specs, one for each kind of draft.

    A kind is a subclass with `kind: Literal["its-name"] = "its-name"` and a field for each of its profile keys. Unknown
    keys and wrong types raise errors, and instances are frozen.
    """

    kind: str

    @property
    def drafts(self) -> bool:
        """Whether any token is ever drafted."""
        return True

    @property
    def summary(self) -> str:
        """Short description for messages."""
        return f"drafts by {self.kind}"

    @property
    def step_share(self) -> float | None:
        """Cost of a drafted token in plain decoding steps; None if the spec does not state it."""
        return None

    @property
    def checks_lookup(self) -> bool:
        """Whether draft steps check lookup tokens, and so run over several tokens."""
        return False

    @property
    def leaf_specs(self) -> Sequence[DraftSpec]:
        """The specs inside this spec that contain no further specs; by default this spec itself."""
        return (self,)

    @property
    def may_name_files(self) -> bool:
        """Whether the spec can name files beside the profile that are not listed in the profile's `parts`."""
        return False

    def check(self, model: Identity) -> None:
        """Raise `SelfspecError` if the spec does not fit a model of that identity."""


class PlainSpec(DraftSpec):
    """Plain decoding, without drafts."""

    kind: Literal["plain"] = "plain"

    @property
    def drafts(self) -> bool:
        """False: plain decoding drafts no token."""
        return False

    @property
    def summary(self) -> str:
        """Short description of plain decoding."""
        return "drafts nothing"


class ProposerSpec(Data):
    """A proposer of lookup tokens.

    `lookup`: prompt (n-gram) lookup in the text itself; `store`: lookup in a retrieval store; `answers`: lookup in
    earlier answers, which are kept in a file.
    """

    kind: Literal["lookup", "store", "answers"] = "lookup"
    path: str | None = Field(None, description="File of the retrieval store, or of the answers.")

    @model_validator(mode="after")
    def _path_of_a_file(self) -> Self:
        if (self.kind == "lookup") == bool(self.path):
            want = "takes no path" if self.kind == "lookup" else "expected the path of its file"
            raise SelfspecError(f"proposer '{self.kind}': {want}")
        return self


def proposers_of(spec: DraftSpec) -> Sequence[ProposerSpec]:
    """Return the proposers of a draft spec, without those of the specs inside it; empty for a kind that has none."""
    return getattr(spec, "proposers", None) or ()


Proposers = Annotated[list[ProposerSpec], Field(min_length=1)]
CheckedProposers = Annotated[
    Proposers | None, Field(description="Proposers whose tokens one draft step checks together; none by default.")
]
DraftConfidence = Annotated[
    Confidence | None,
    Field(description="How the confidence in a drafted token is computed; its probability by default."),
]
DraftController = Annotated[ControllerSpec, Field(description="Controller, which decides when drafting stops.")]
Candidates = Annotated[int, Field(ge=1, le=WIDEST_DRAFT, description="Maximum number of candidates for each position.")]


class LookupSpec(DraftSpec):
    """Drafting by lookup alone, without a draft model (prompt lookup, REST)."""

    kind: Literal["lookup"] = "lookup"
    proposers: Proposers = Field(
        [ProposerSpec()], description="Proposers; the proposal with the highest expected gain is drafted."
    )
    controller: DraftController = ControllerSpec(name="rate")

    @property
    def summary(self) -> str:
        """Short description: the proposers."""
        return f"lookup alone; proposers: {kinds_of(self.proposers)}"

    @property
    def step_share(self) -> float | None:
        """Zero: drafting takes no model steps."""
        return 0.0


def kinds_of(proposers: Sequence[ProposerSpec]) -> str:
    """Return the proposers' kinds as a comma-separated list."""
    return ", ".join(proposer.kind for proposer in proposers)


class RecycleSpec(DraftSpec):
    """Token recycling: drafts the tokens that the model's last logits after a token ranked highest."""

    kind: Literal["recycle"] = "recycle"
    candidates: Candidates = 4
    controller: DraftController = ControllerSpec(name="rate")

    @property
    def step_share(self) -> float | None:
        """Zero: drafting takes no model steps."""
        return 0.0


PartName = Annotated[str, Field(min_length=1)]


class Below(Data):
    """A draft head whose lookup tokens the passes of a draft path check. `step`: cost of a head step in draft steps."""

    part: PartName = Field("eagle", description="Name of the head among the profile's parts.")
    step: NonNegative = Field(0.1, description="Time of one step of the head, in draft steps.")


class LayerSkipSpec(DraftSpec):
    """Self-speculative drafting with skipped attention and MLP sub-layers (Draft & Verify, 2309.08168).

    Other sub-layers, and the language-model head, may run in int8 or int4. `confidence`: the estimate that a drafted
    token is right; the token's probability when left out. `candidates`: the most tokens proposed at one position,
    including the drafted token. `vocabulary`: the only tokens that can be drafted. `proposers`: proposers of lookup
    tokens, which a draft step checks together with the token that it must read; `spared`: the share of a draft step
    that lookup tokens save for each drafted token.
    """

    kind: Literal["layer-skip"] = "layer-skip"
    skip: Annotated[Skip, Field(description="Sub-layers that are skipped while drafting.")] = Skip()
    int8: Skip | None = Field(None, description="Sub-layers that run with int8 weights while drafting.")
    int4: Skip | None = Field(None, description="Sub-layers that run with int4 weights while drafting.")
    head: Literal["int8", "int4"] | None = Field(
        None, description="Mode of the language-model head while drafting; full by default."
    )
    confidence: DraftConfidence = None
    controller: ControllerSpec = ControllerSpec(name="adaptive")
    candidates: Annotated[int, Field(ge=1, le=WIDEST_DRAFT)] = Field(
        1, description="Maximum number of candidates for each position, including the drafted token."
    )
    vocabulary: Annotated[list[Count], Field(min_length=1)] | None = Field(
        None, description="Draft vocabulary: the only tokens that are drafted; all by default."
    )
    proposers: CheckedProposers = None
    spared: Share | None = Field(
        None, description="Share of a draft step that proposers save for each drafted token; 0 by default."
    )
    below: Below | None = Field(None, description="Draft head that proposes lookup tokens; none by default.")
    trained: PartName | None = Field(
        None,
        description="Bridges or adapters of the draft path, by name among the profile's parts; none by default.",
    )
    int4_weights: PartName | None = Field(
        None,
        description="Weights of the sub-layers in int4, by name among the profile's parts; by default the model's "
        "weights are rounded to nearest.",
    )

    @classmethod
    def from_path(
        cls,
        path: DraftPath | SkipSet,
        controller: ControllerSpec | None = None,
        *,
        candidates: int = 1,
        confidence: Confidence | None = None,
        proposers: Sequence[ProposerSpec] = (),
        spared: float = 0.0,
    ) -> Self:
        """Build the spec of a draft path or a skip set; `controller` None: the adaptive threshold."""
        path = as_path(path)
        return cls(
            skip=Skip.from_skip_set(path.skip),
            int8=Skip.from_skip_set(path.int8) if len(path.int8) else None,
            int4=Skip.from_skip_set(path.int4) if len(path.int4) else None,
            head=None if path.head == "full" else path.head,
            confidence=confidence,
            controller=controller or ControllerSpec(name="adaptive"),
            candidates=candidates,
            vocabulary=None if path.vocabulary is None else list(path.vocabulary),
            proposers=list(proposers) or None,
            spared=spared or None,
        )

    @property
    def path(self) -> DraftPath:
        """The draft path. Raises `SelfspecError` if the modes or the vocabulary are invalid."""
        vocabulary = None if self.vocabulary is None else tuple(self.vocabulary)
        skip, int8, int4 = self.skip.skip_set(), self._set("int8"), self._set("int4")
        return DraftPath(skip, vocabulary, int8, int4, self.head or "full")

    def _set(self, name: str) -> SkipSet:
        sublayers: Skip | None = getattr(self, name)
        try:
            return SkipSet() if sublayers is None else sublayers.skip_set()
        except SelfspecError as error:
            raise SelfspecError(str(error).replace("skip.", f"{name}.", 1)) from None

    @property
    def drafts(self) -> bool:
        """Whether a draft step along the path costs less than a plain step; drafting at full cost is pointless."""
        return self.path.cheaper

    @property
    def summary(self) -> str:
        """Short description: the skipped and quantised sub-layers, the proposers and trained parts."""
        additions = f"; proposers: {kinds_of(self.proposers)}" if self.proposers else ""
        additions += f"; lookup tokens of the trained head {self.below.part}" if self.below else ""
        additions += f"; with the trained part {self.trained}" if self.trained else ""
        additions += f"; int4 weights of the part {self.int4_weights}" if self.int4_weights else ""
        return f"{self.path.summary}{additions}" if self.drafts else "drafts nothing"

    def check(self, model: Identity) -> None:
        """Raise `SelfspecError` for a layer or token that is repeated, or that the model does not have."""
        tokens = self.vocabulary or []
        if len(set(tokens)) < len(tokens):
            raise SelfspecError("the draft's vocabulary: a token is named twice; name each once")
        if model.vocabulary is not None and max(tokens, default=0) >= model.vocabulary:
            raise SelfspecError(
                f"the draft's vocabulary: token {max(tokens)} is not among the model's {model.vocabulary}, "
                f"so 0 to {model.vocabulary - 1} can be drafted"
            )
        self.path.check(model.layers)


def parse_proposers(text: str, store: str | None = None) -> tuple[ProposerSpec, ...]:
    """Parse `lookup` or `none` into proposers; `store`: file of a retrieval store, whose proposer is added.

    Raises `SelfspecError` for any other text.
    """
    if text.strip() not in ("lookup", "none"):
        raise SelfspecError(f"proposers '{text}': expected lookup or none")
    named = (ProposerSpec(),) if text.strip() == "lookup" else ()
    return named if store is None else (*named, ProposerSpec(kind="store", path=store))


_KINDS: dict[str, type[DraftSpec]] = {}


def register_spec(spec: type[DraftSpec]) -> str:
    """Register a draft spec for profiles; return its kind. A class may be registered again, as in a re-run notebook.

    Raises `SelfspecError` for a class without a kind, or a kind that another class has registered.
    """
    field = spec.model_fields["kind"]
    kind = field.default
    if get_args(field.annotation) != (kind,) or not isinstance(kind, str):
        raise SelfspecError(f'{spec.__name__}: no kind; expected the field kind: Literal["name"] = "name"')
    check_registered(f"draft kind '{kind}'", spec, _KINDS.get(kind))
    _KINDS[kind] = spec
    return kind


def draft_kinds() -> dict[str, type[DraftSpec]]:
    """Return the registered kinds of draft, each with its spec class."""
    return dict(_KINDS)


def parse_draft(data: Any) -> DraftSpec:
    """Parse a profile's `draft` by its `kind`.

    Raises `SelfspecError` if the kind is missing or unknown, and pydantic's `ValidationError` for its other keys.
    """
    if isinstance(data, DraftSpec):
        return data
    known = ", ".join(_KINDS)
    if not isinstance(data, Mapping):
        raise SelfspecError(f"draft: expected a mapping with 'kind' ({known}), got {short(data)}")
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        problem = f"{short(kind)} is not known" if "kind" in data else "it is left out"
        raise SelfspecError(f"draft.kind: {problem}; known: {known}")
    return _KINDS[kind].model_validate(data)


for _kind in (PlainSpec, LayerSkipSpec, LookupSpec, RecycleSpec):
    register_spec(_kind)
