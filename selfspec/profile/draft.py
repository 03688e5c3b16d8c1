"""What drafts, as a profile describes it: one checked description for each kind, in a registry. Knows nothing of torch.

What a description is made into, a drafter, is known to `selfspec.drafters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field

from selfspec.basics.errors import SelfspecError, short
from selfspec.basics.schema import Count, Data
from selfspec.facts.controller import ControllerSpec
from selfspec.facts.identity import Identity
from selfspec.facts.limits import WIDEST_DRAFT
from selfspec.facts.skip import SkipSet


class Skip(Data):
    """The sub-layers that drafting bypasses."""

    attention: list[Count] = Field([], description="Layers whose attention is bypassed, counted from 0.")
    mlp: list[Count] = Field([], description="Layers whose MLP is bypassed, counted from 0.")

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


class LayerSkipSpec(DraftSpec):
    """The model itself drafts, with some of its attention and MLP sub-layers bypassed (Draft & Verify, 2309.08168).

    `candidates`: all tokens proposed for one place at most, the drafted one counted; 1 drafts a chain. `vocabulary`:
    the only tokens that are drafted.
    """

    kind: Literal["layer-skip"] = "layer-skip"
    skip: Skip = Skip()
    controller: ControllerSpec = ControllerSpec(name="adaptive")
    candidates: Annotated[int, Field(ge=1, le=WIDEST_DRAFT)] = Field(
        1, description="Tokens proposed for each place at most, the drafted one counted."
    )
    vocabulary: Annotated[list[Count], Field(min_length=1)] | None = Field(
        None, description="The only tokens that are drafted; all when left out."
    )

    @classmethod
    def of(
        cls,
        skip: SkipSet,
        controller: ControllerSpec | None = None,
        *,
        candidates: int = 1,
        vocabulary: Sequence[int] | None = None,
    ) -> Self:
        """Of a skip set; without a controller, the adaptive threshold."""
        return cls(
            skip=Skip.of(skip),
            controller=controller or ControllerSpec(name="adaptive"),
            candidates=candidates,
            vocabulary=None if vocabulary is None else list(vocabulary),
        )

    @property
    def drafts(self) -> bool:
        """Whether anything is bypassed: the whole model would draft as slowly as it decodes."""
        return len(self.skip.skip_set()) > 0

    @property
    def said(self) -> str:
        """How many sub-layers are bypassed."""
        return f"{len(self.skip.skip_set())} sub-layers bypassed" if self.drafts else "drafts nothing"

    def check(self, model: Identity) -> None:
        """Raise `SelfspecError` for a layer or a token that the model does not have, or one named twice."""
        self.skip.skip_set().check(model.layers)
        tokens = self.vocabulary or []
        if len(set(tokens)) < len(tokens):
            raise SelfspecError("the draft's vocabulary: a token is named twice; name each once")
        if model.vocabulary is not None and max(tokens, default=0) >= model.vocabulary:
            raise SelfspecError(
                f"the draft's vocabulary: token {max(tokens)} is not among the model's {model.vocabulary}, "
                f"so 0 to {model.vocabulary - 1} can be drafted"
            )


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
        raise SelfspecError(f"kind '{kind}' of drafts is {held.__module__}.{held.__qualname__}; want another name")
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
        raise SelfspecError(f"draft: want a mapping with 'kind' ({known}), got {short(data)}")
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        said = f"{short(kind)} is not known" if "kind" in data else "it is left out"
        raise SelfspecError(f"draft.kind: {said}; known: {known}")
    return _KINDS[kind].model_validate(data)


for _kind in (PlainSpec, LayerSkipSpec):
    register_spec(_kind)
