"""Profile entry of several drafters merged into one token tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from selfspec.profile.draft_spec import DraftSpec, parse_draft, register_spec
from selfspec.types.identity import Identity

Drafts = Annotated[SerializeAsAny[DraftSpec], BeforeValidator(parse_draft)]


class MergedSpec(DraftSpec):
    """Merged drafting: the proposals of several drafters are verified as one token tree (SpecInfer, 2305.09781).

    `drafters`: the specs of these drafters, in the order of their turns; each leaves fewer tree nodes for the next.
    """

    kind: Literal["merged"] = "merged"
    drafters: Annotated[list[Drafts], Field(min_length=2, description="Drafts to merge, in order.")]

    @property
    def leaf_specs(self) -> Sequence[DraftSpec]:
        """The merged drafts, nested merges flattened."""
        return [single for drafter in self.drafters for single in drafter.leaf_specs]

    @property
    def drafts(self) -> bool:
        """Whether any drafter ever drafts a token."""
        return any(drafter.drafts for drafter in self.drafters)

    @property
    def summary(self) -> str:
        """Short descriptions of all drafters."""
        return "one tree of several: " + "; ".join(drafter.summary for drafter in self.drafters)

    @property
    def step_share(self) -> float | None:
        """Highest step cost of the drafters; None if any drafter's spec does not state its cost."""
        shares = [drafter.step_share for drafter in self.drafters]
        return None if None in shares else max(share for share in shares if share is not None)

    @property
    def may_name_files(self) -> bool:
        """Whether any drafter names files that may lie beside the profile."""
        return any(drafter.may_name_files for drafter in self.drafters)

    def check(self, model: Identity) -> None:
        """Raise `SelfspecError` if a drafter does not fit a model of that identity."""
        for drafter in self.drafters:
            drafter.check(model)


register_spec(MergedSpec)
