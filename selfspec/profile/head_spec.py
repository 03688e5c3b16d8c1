"""Profile entry of a draft head."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from selfspec.profile.draft_spec import (
    Candidates,
    DraftConfidence,
    DraftController,
    DraftSpec,
    PartName,
    Proposers,
    Step,
    kinds_of,
    register_spec,
)
from selfspec.types.controller import ControllerSpec


class HeadSpec(DraftSpec):
    """Drafting by a draft head that reads the model's hidden states (EAGLE, Medusa and others).

    `part`: the head's name among the profile's parts. `step`: the cost of a head step in plain decoding steps.
    """

    kind: Literal["head"] = "head"
    part: PartName = Field("eagle", description="Name of the head among the profile's parts.")
    step: Step = Field(0.05, description="Time of one step of the head, in plain decoding steps.")
    confidence: DraftConfidence = None
    controller: DraftController = ControllerSpec(name="rate")
    candidates: Candidates = 1
    proposers: Proposers | None = Field(
        None, description="Proposers, whose tokens replace a draft where they promise more; none by default."
    )

    @property
    def summary(self) -> str:
        """Short description: the head, and the proposers of lookup tokens."""
        return f"drafts by the trained head {self.part}" + (
            f"; proposers: {kinds_of(self.proposers)}" if self.proposers else ""
        )

    @property
    def step_share(self) -> float | None:
        """Cost of a step of the head, in plain decoding steps."""
        return self.step


register_spec(HeadSpec)
