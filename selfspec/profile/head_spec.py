"""Profile entry of a draft head."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from selfspec.profile.draft_spec import DraftSpec, PartName, Proposers, Step, kinds_of, register_spec
from selfspec.types.confidence import Confidence
from selfspec.types.controller import ControllerSpec
from selfspec.types.limits import WIDEST_DRAFT


class HeadSpec(DraftSpec):
    """Drafting by a draft head that reads the model's hidden states (EAGLE, Medusa and others).

    `part`: its name among the profile's parts. `step`: the cost of one of its steps in plain decoding steps.
    """

    kind: Literal["head"] = "head"
    part: PartName = Field("eagle", description="The head's name among the profile's parts.")
    step: Step = Field(0.05, description="What a step of the head takes, in plain decoding steps.")
    confidence: Confidence | None = Field(
        None, description="What says how likely a drafted token is right; its probability when left out."
    )
    controller: ControllerSpec = Field(ControllerSpec(name="rate"), description="What ends drafts.")
    candidates: Annotated[int, Field(ge=1, le=WIDEST_DRAFT)] = Field(1, description="For each place at most.")
    proposers: Proposers | None = Field(
        None, description="What guesses, in place of a draft where that promises more; nothing when left out."
    )

    @property
    def said(self) -> str:
        """Short description: the head, and the proposers of lookup tokens."""
        return f"drafts by the trained head {self.part}" + (
            f"; guesses by {kinds_of(self.proposers)}" if self.proposers else ""
        )

    @property
    def step_share(self) -> float | None:
        """Cost of a step of the head, in plain decoding steps."""
        return self.step


register_spec(HeadSpec)
