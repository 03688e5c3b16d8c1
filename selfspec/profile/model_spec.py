"""Profile entry of a separate draft model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from selfspec.profile.draft_spec import (
    Candidates,
    CheckedProposers,
    DraftConfidence,
    DraftController,
    DraftSpec,
    Step,
    kinds_of,
    register_spec,
)
from selfspec.types.controller import ControllerSpec


class ModelSpec(DraftSpec):
    """Drafting by a smaller model (2211.17192, 2302.01318), which may have another tokenizer (2502.05202).

    `bits`: the draft model's quantisation; None: none. `step`: the cost of a draft step in plain decoding steps.
    """

    kind: Literal["model"] = "model"
    model: Annotated[
        str,
        Field(
            min_length=1,
            description="Draft model: a folder (absolute, or relative to the profile), a file, or a hub id.",
        ),
    ]
    dtype: str = Field("auto", description="Dtype of the draft model's weights, as for --dtype.")
    device: str = Field("auto", description="Device; the target model's by default.")
    bits: Literal["int8", "int4"] | None = Field(None, description="Quantisation of its weights; none by default.")
    step: Step = Field(0.3, description="Time of one draft step, in plain decoding steps.")
    confidence: DraftConfidence = None
    controller: DraftController = ControllerSpec(name="rate")
    candidates: Candidates = 1
    proposers: CheckedProposers = None

    @property
    def summary(self) -> str:
        """Short description: the draft model, and the proposers of lookup tokens."""
        few = f" in {self.bits}" if self.bits else ""
        return f"drafts by the model {self.model}{few}" + (
            f"; proposers: {kinds_of(self.proposers)}" if self.proposers else ""
        )

    @property
    def may_name_files(self) -> bool:
        """True, since the draft model's folder may lie beside the profile."""
        return True

    @property
    def step_share(self) -> float | None:
        """Cost of a step of the draft model, in plain decoding steps."""
        return self.step


register_spec(ModelSpec)
