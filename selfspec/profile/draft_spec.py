"""What drafts, as a profile describes it: one checked description for each kind, in a registry. Knows nothing of torch.

What a description is made into, a drafter, is known to `selfspec.drafters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from selfspec.basics.checked_model import Count, Data
from selfspec.basics.errors import SelfspecError, short
from selfspec.types.acceptance import Chance
from selfspec.types.confidence import Confidence
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath, as_path
from selfspec.types.identity import Identity
from selfspec.types.limits import WIDEST_DRAFT
from selfspec.types.skip import SkipSet


class Skip(Data):
    """Sub-layers of which one thing is said, such as that drafting bypasses them."""

    attention: list[Count] = Field([], description="The layers, counted from 0, whose attention is meant.")
    mlp: list[Count] = Field([], description="The layers, counted from 0, whose MLP is meant.")

    @classmethod
    def of(cls, skip: SkipSet) -> Self:
        """A skip set as it stands in a file."""
        return cls(attention=list(skip.attention), mlp=list(skip.mlp))

    def skip_set(self) -> SkipSet:
        """As a `SkipSet`. Raises `SelfspecError` for a repeated index."""
        return SkipSet(tuple(self.attention), tuple(self.mlp))


class DraftSpec(Data):
    """What a profile says of one kind of drafter; the base of all kinds.

    A kind is a subclass with `kind: Literal["its-name"] = "its-name"` and a field for each thing that a profile may
    say of it. Unknown keys and wrong types are refused, and what is made cannot be changed.
    """

    kind: str

    @property
    def drafts(self) -> bool:
        """Whether anything is ever drafted."""
        return True

    @property
    def said(self) -> str:
        """What drafts, in a few words."""
        return f"drafts by {self.kind}"

    @property
    def step_share(self) -> float | None:
        """What a drafted token takes, in plain decoding steps, where the description says it itself."""
        return None

    @property
    def single(self) -> Sequence[DraftSpec]:
        """The drafts that it is made of: itself."""
        return (self,)

    @property
    def beside(self) -> bool:
        """Whether it names what may lie beside the profile, and is no part of it."""
        return False

    def check(self, model: Identity) -> None:
        """Raise `SelfspecError` where it does not fit a model of that identity."""


class PlainSpec(DraftSpec):
    """Nothing is drafted: plain decoding."""

    kind: Literal["plain"] = "plain"

    @property
    def drafts(self) -> bool:
        """No."""
        return False

    @property
    def said(self) -> str:
        """That nothing is drafted."""
        return "drafts nothing"


class ProposerSpec(Data):
    """What guesses how a text goes on.

    `lookup`: as it did before; `store`: as texts in a store of texts did; `answers`: as earlier answers did, which are
    kept in a file.
    """

    kind: Literal["lookup", "store", "answers"] = "lookup"
    path: str | None = Field(None, description="The file of the store, or of the answers.")

    @model_validator(mode="after")
    def _path_of_a_file(self) -> Self:
        if (self.kind == "lookup") == bool(self.path):
            want = "takes no path" if self.kind == "lookup" else "expected the path of its file"
            raise SelfspecError(f"proposer '{self.kind}': {want}")
        return self


Proposers = Annotated[list[ProposerSpec], Field(min_length=1)]


class GuessesSpec(DraftSpec):
    """What proposers guess is drafted as it is: no model computes it (prompt lookup, REST)."""

    kind: Literal["guesses"] = "guesses"
    proposers: Proposers = Field([ProposerSpec()], description="What guesses; the guess that promises most is drafted.")
    controller: ControllerSpec = Field(ControllerSpec(name="rate"), description="What ends drafts.")

    @property
    def said(self) -> str:
        """What guesses."""
        return f"drafts guesses by {kinds_of(self.proposers)}"

    @property
    def step_share(self) -> float | None:
        """Nothing."""
        return 0.0


def kinds_of(proposers: Sequence[ProposerSpec]) -> str:
    """The proposers' kinds, in a few words."""
    return ", ".join(of.kind for of in proposers)


class RecycleSpec(DraftSpec):
    """What the model thought likely after a token, the last time, is drafted after it again (token recycling)."""

    kind: Literal["recycle"] = "recycle"
    candidates: Annotated[int, Field(ge=1, le=WIDEST_DRAFT)] = Field(4, description="For each place at most.")
    controller: ControllerSpec = Field(ControllerSpec(name="rate"), description="What ends drafts.")

    @property
    def step_share(self) -> float | None:
        """Nothing."""
        return 0.0


PartName = Annotated[str, Field(min_length=1)]
Step = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Below(Data):
    """A trained head that guesses what a draft step checks. `step`: what a step of it takes, over a draft step."""

    part: PartName = Field("eagle", description="The head's name among the profile's parts.")
    step: Step = Field(0.1, description="What a step of the head takes, over a draft step.")


class LayerSkipSpec(DraftSpec):
    """The model itself drafts, some of its attention and MLP sub-layers bypassed (Draft & Verify, 2309.08168).

    Others, and the head, may run with their weights in 8 or 4 bits. `confidence`: what says how likely a drafted token
    is right; its probability when left out. `candidates`: all tokens proposed for one place at most, the drafted one
    counted; 1 drafts a chain. `vocabulary`: the only tokens that are drafted. `proposers`: what guesses the tokens that
    a draft step checks beside its one, and `spared`: the share of a draft step that this spares each drafted token.
    """

    kind: Literal["layer-skip"] = "layer-skip"
    skip: Annotated[Skip, Field(description="The sub-layers that are bypassed while drafting.")] = Skip()
    int8: Skip | None = Field(None, description="The sub-layers that run with their weights in 8 bits while drafting.")
    int4: Skip | None = Field(None, description="The sub-layers that run with their weights in 4 bits while drafting.")
    head: Literal["int8", "int4"] | None = Field(None, description="How the head runs while drafting, if not in full.")
    confidence: Confidence | None = Field(
        None, description="What says how likely a drafted token is right; its probability when left out."
    )
    controller: ControllerSpec = ControllerSpec(name="adaptive")
    candidates: Annotated[int, Field(ge=1, le=WIDEST_DRAFT)] = Field(
        1, description="Tokens proposed for each place at most, the drafted one counted."
    )
    vocabulary: Annotated[list[Count], Field(min_length=1)] | None = Field(
        None, description="The only tokens that are drafted; all when left out."
    )
    proposers: Proposers | None = Field(
        None, description="What guesses tokens that one draft step checks together; nothing when left out."
    )
    spared: Chance | None = Field(
        None, description="The share of a draft step that guesses spare each drafted token; 0 when left out."
    )
    below: Below | None = Field(None, description="A trained head that guesses, too; none when left out.")
    trained: PartName | None = Field(
        None,
        description="What training adds to the path, by its name among the profile's parts; nothing when left out.",
    )

    @classmethod
    def of(
        cls,
        path: DraftPath | SkipSet,
        controller: ControllerSpec | None = None,
        *,
        candidates: int = 1,
        confidence: Confidence | None = None,
        proposers: Sequence[ProposerSpec] = (),
        spared: float = 0.0,
    ) -> Self:
        """Of a draft path or a skip set; without a controller, the adaptive threshold."""
        path = as_path(path)
        return cls(
            skip=Skip.of(path.skip),
            int8=Skip.of(path.int8) if len(path.int8) else None,
            int4=Skip.of(path.int4) if len(path.int4) else None,
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
        """How the model runs while drafting. Raises `SelfspecError` for what is no draft path."""
        vocabulary = None if self.vocabulary is None else tuple(self.vocabulary)
        skip, int8, int4 = self.skip.skip_set(), self._set("int8"), self._set("int4")
        return DraftPath(skip, vocabulary, int8, int4, self.head or "full")

    def _set(self, name: str) -> SkipSet:
        given: Skip | None = getattr(self, name)
        try:
            return SkipSet() if given is None else given.skip_set()
        except SelfspecError as error:
            raise SelfspecError(str(error).replace("skip.", f"{name}.", 1)) from None

    @property
    def drafts(self) -> bool:
        """Whether anything is cheaper than in full: the whole model would draft as slowly as it decodes."""
        return self.path.cheaper

    @property
    def said(self) -> str:
        """How many sub-layers are bypassed, or in few bits."""
        guesses = f"; guesses by {kinds_of(self.proposers)}" if self.proposers else ""
        guesses += f"; the trained head {self.below.part} below" if self.below else ""
        guesses += f"; with the trained part {self.trained}" if self.trained else ""
        return f"{self.path.said}{guesses}" if self.drafts else "drafts nothing"

    def check(self, model: Identity) -> None:
        """Raise `SelfspecError` for a layer or a token that the model does not have, or one named twice."""
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
    """Proposers from `lookup` or `none`, and one of a store where its file is named. Raises `SelfspecError`."""
    if text.strip() not in ("lookup", "none"):
        raise SelfspecError(f"drafters '{text}': expected lookup or none")
    named = (ProposerSpec(),) if text.strip() == "lookup" else ()
    return named if store is None else (*named, ProposerSpec(kind="store", path=store))


_KINDS: dict[str, type[DraftSpec]] = {}


def register_spec(spec: type[DraftSpec]) -> str:
    """Let profiles hold what `spec` describes; gives its kind. The same class may come again, as a notebook's does.

    Raises `SelfspecError` where it does not say its kind, or another class holds that kind.
    """
    field = spec.model_fields["kind"]
    kind = field.default
    if get_args(field.annotation) != (kind,) or not isinstance(kind, str):
        raise SelfspecError(f'{spec.__name__}: its kind is not said; give it kind: Literal["name"] = "name"')
    held = _KINDS.get(kind)
    if held is not None and (held.__module__, held.__qualname__) != (spec.__module__, spec.__qualname__):
        raise SelfspecError(f"kind '{kind}' of drafts is {held.__module__}.{held.__qualname__}; expected another name")
    _KINDS[kind] = spec
    return kind


def draft_kinds() -> dict[str, type[DraftSpec]]:
    """The kinds that a profile can hold, each with the class that describes it."""
    return dict(_KINDS)


def parse_draft(data: Any) -> DraftSpec:
    """What a profile's `draft` says, by its kind. Raises `SelfspecError`, or pydantic's error for a kind's own keys."""
    if isinstance(data, DraftSpec):
        return data
    known = ", ".join(_KINDS)
    if not isinstance(data, Mapping):
        raise SelfspecError(f"draft: expected a mapping with 'kind' ({known}), got {short(data)}")
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        said = f"{short(kind)} is not known" if "kind" in data else "it is left out"
        raise SelfspecError(f"draft.kind: {said}; known: {known}")
    return _KINDS[kind].model_validate(data)


for _kind in (PlainSpec, LayerSkipSpec, GuessesSpec, RecycleSpec):
    register_spec(_kind)
