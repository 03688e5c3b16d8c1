"""Profile entry of several drafters merged into one token tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from selfspec.profile.draft_spec import DraftSpec, parse_draft, register_spec
from selfspec.types.identity import Identity

Drafts = Annotated[SerializeAsAny[DraftSpec], BeforeValidator(parse_draft)]


class MergedSpec(DraftSpec):
    """Merged drafting: one token tree of several drafters' proposals is verified (SpecInfer, 2305.09781).

    `drafters`: drafts of other kinds; each leaves fewer nodes for the next.
    """

    kind: Literal["merged"] = "merged"
    drafters: Annotated[list[Drafts], Field(min_length=2, description="Drafts to merge, in order.")]

    @property
    def single(self) -> Sequence[DraftSpec]:
        """The merged drafts, nested merges flattened."""
        return [single for of in self.drafters for single in of.single]

    @property
    def drafts(self) -> bool:
        """Whether any drafter ever drafts a token."""
        return any(of.drafts for of in self.drafters)

    @property
    def said(self) -> str:
        """Short descriptions of all drafters."""
        return "one tree of several: " + "; ".join(of.said for of in self.drafters)

    @property
    def step_share(self) -> float | None:
        """Highest step cost of the drafters; None if any does not state its cost."""
        shares = [of.step_share for of in self.drafters]
        return None if None in shares else max(share for share in shares if share is not None)

    @property
    def beside(self) -> bool:
        """Whether any drafter names files that may lie beside the profile."""
        return any(of.beside for of in self.drafters)

    def check(self, model: Identity) -> None:
        """Raise `SelfspecError` if a drafter does not fit a model of that identity."""
        for of in self.drafters:
            of.check(model)


register_spec(MergedSpec)
