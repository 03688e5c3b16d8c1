"""Profile entries of draft paths that are chosen during decoding: SWIFT and CLaSp."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from selfspec.basics.errors import SelfspecError
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
from selfspec.types.identity import Identity
from selfspec.types.limits import WIDEST_DRAFT


class _ChosenSpec(DraftSpec):
    step: Step = Field(0.6, description="Initial time of one draft step, in plain decoding steps.")
    confidence: DraftConfidence = None
    controller: DraftController = ControllerSpec(name="rate")
    candidates: Candidates = 1
    proposers: CheckedProposers = None

    @property
    def step_share(self) -> float | None:
        """The stated cost of a draft step, in plain decoding steps."""
        return self.step

    @property
    def _lookup_summary(self) -> str:
        return f"; proposers: {kinds_of(self.proposers)}" if self.proposers else ""


class SwiftSpec(_ChosenSpec):
    """Search for the skip set during decoding (SWIFT, 2410.06916).

    Every `every` rounds a trial compares another skip set with the best so far, over the text's last `window` tokens.
    The search ends after `patience` consecutive trials without a better set.
    """

    kind: Literal["swift"] = "swift"
    window: Annotated[int, Field(ge=1, le=WIDEST_DRAFT)] = Field(
        32, description="Tokens on which skip sets are compared."
    )
    every: Annotated[int, Field(ge=1)] = Field(8, description="Rounds between trials.")
    patience: Annotated[int, Field(ge=0)] = Field(
        40, description="Trials without improvement after which the search ends."
    )

    @property
    def summary(self) -> str:
        """Short description of the search."""
        return f"searches for the skip set while decoding (SWIFT){self._lookup_summary}"


class ClaspSpec(_ChosenSpec):
    """CLaSp (2505.24196): dynamic programming chooses `skip_layers` skipped layers every `every` rounds."""

    kind: Literal["clasp"] = "clasp"
    skip_layers: Annotated[int, Field(ge=1, lt=WIDEST_DRAFT)] | None = Field(
        None, description="Number of skipped layers; half of the model's layers by default."
    )
    every: Annotated[int, Field(ge=1)] = Field(16, description="Rounds between choices of the skip set.")

    @property
    def summary(self) -> str:
        """Short description: the number of skipped layers."""
        layers = "half of the layers" if self.skip_layers is None else f"{self.skip_layers} layers"
        return f"skips {layers}, chosen again while decoding (CLaSp){self._lookup_summary}"

    def check(self, model: Identity) -> None:
        """Raise `SelfspecError` for more skipped layers than the model has."""
        if self.skip_layers is not None and self.skip_layers > model.layers:
            raise SelfspecError(f"draft.skip_layers: {self.skip_layers}; expected at most the model's {model.layers}")


for _kind in (SwiftSpec, ClaspSpec):
    register_spec(_kind)
