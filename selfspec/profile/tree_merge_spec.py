"""Several drafters merged into one token tree, as a profile describes them. Knows nothing of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from selfspec.profile.draft_spec import DraftSpec, parse_draft, register_spec
from selfspec.types.identity import Identity

Drafts = Annotated[SerializeAsAny[DraftSpec], BeforeValidator(parse_draft)]


class MergedSpec(DraftSpec):
    """Several drafters propose, and one tree of all that they propose is verified (SpecInfer, 2305.09781).

    `drafters`: drafts of other kinds; what the first propose leaves less room for the others.
    """

    kind: Literal["merged"] = "merged"
    drafters: Annotated[list[Drafts], Field(min_length=2, description="Drafts of other kinds, in their order.")]

    @property
    def single(self) -> Sequence[DraftSpec]:
        """The drafts that are merged."""
        return [single for of in self.drafters for single in of.single]

    @property
    def drafts(self) -> bool:
        """Whether any does."""
        return any(of.drafts for of in self.drafters)

    @property
    def said(self) -> str:
        """What each says."""
        return "one tree of several: " + "; ".join(of.said for of in self.drafters)

    @property
    def step_share(self) -> float | None:
        """Of the dearest, where all say it."""
        shares = [of.step_share for of in self.drafters]
        return None if None in shares else max(share for share in shares if share is not None)

    @property
    def beside(self) -> bool:
        """Whether any does."""
        return any(of.beside for of in self.drafters)

    def check(self, model: Identity) -> None:
        """Raise `SelfspecError` where one does not fit a model of that identity."""
        for of in self.drafters:
            of.check(model)


register_spec(MergedSpec)
