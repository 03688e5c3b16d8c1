"""Profile entries of more kinds of drafts: heads, draft models, merged trees, adaptive paths, and free drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from selfspec.basics.checked_model import NonNegative
from selfspec.basics.errors import SelfspecError
from selfspec.profile.draft_spec import (
    Candidates,
    CheckedProposers,
    DraftConfidence,
    DraftController,
    DraftSpec,
    PartName,
    Proposers,
    kinds_of,
    parse_draft,
    register_spec,
)
from selfspec.types.controller import ControllerSpec
from selfspec.types.identity import Identity
from selfspec.types.methods import WIDEST_DRAFT


class _ChosenSpec(DraftSpec):
    step: NonNegative = Field(0.6, description="Initial time of one draft step, in plain decoding steps.")
    confidence: DraftConfidence = None
    controller: DraftController = ControllerSpec(name="rate")
    candidates: Candidates = 1
    proposers: CheckedProposers = None

    @property
    def step_share(self) -> float | None:
        """The stated cost of a draft step, in plain decoding steps."""
        return self.step

    @property
    def checks_lookup(self) -> bool:
        """Whether there are proposers, whose tokens one draft step checks together."""
        return bool(self.proposers)

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


class _FreeSpec(DraftSpec):
    @property
    def step_share(self) -> float | None:
        """Zero: drafting takes no model steps."""
        return 0.0


class InputSpec(_FreeSpec):
    """Input-guided decoding (2205.10350): drafts the prompt's next tokens, for an answer that repeats the prompt."""

    kind: Literal["input"] = "input"
    controller: DraftController = ControllerSpec(name="rate")

    @property
    def summary(self) -> str:
        """Short description of the draft."""
        return "drafts the rest of the prompt"


class JacobiSpec(_FreeSpec):
    """Parallel (Jacobi) decoding: every pass refines a block of the answer (2305.10427).

    `method`: `jacobi` uses one block for all remaining tokens; `gauss-seidel` uses blocks of `block` tokens; `hybrid`
    uses such blocks for the first `parallel` tokens, then plain decoding. `start`: the initial token of an unknown
    position: `padding`, a fixed token; `prompt`, the prompt's token at the same offset; `before`, the token one block
    earlier.
    """

    kind: Literal["jacobi"] = "jacobi"
    method: Literal["jacobi", "gauss-seidel", "hybrid"] = Field("gauss-seidel", description="How blocks are decoded.")
    block: Annotated[int, Field(ge=2, le=WIDEST_DRAFT)] = Field(8, description="Tokens in a block.")
    parallel: Annotated[int, Field(ge=1)] = Field(64, description="Tokens that `hybrid` decodes in blocks.")
    start: Literal["padding", "prompt", "before"] = Field("before", description="Initial guess for unknown positions.")

    @property
    def summary(self) -> str:
        """Short description: the method, and the block size."""
        size = "" if self.method == "jacobi" else f", blocks of {self.block}"
        return f"decodes in parallel by {self.method}{size}"


class LookaheadSpec(_FreeSpec):
    """Lookahead decoding (2402.02057): one pass generates n-grams by Jacobi iteration and verifies n-grams."""

    kind: Literal["lookahead"] = "lookahead"
    window: Annotated[int, Field(ge=1, le=WIDEST_DRAFT)] = Field(7, description="Window size W of lookahead decoding.")
    ngram: Annotated[int, Field(ge=2, le=WIDEST_DRAFT)] = Field(4, description="N-gram size N.")
    guesses: Annotated[int, Field(ge=1, le=WIDEST_DRAFT)] = Field(
        7, description="Maximum number G of n-grams verified together."
    )

    @model_validator(mode="after")
    def _held_by_a_verification(self) -> Self:
        if (rows := self.window * (self.ngram - 1)) > WIDEST_DRAFT:
            raise SelfspecError(
                f"window x (ngram - 1): {rows}; expected at most {WIDEST_DRAFT}, the tokens of a verification pass"
            )
        return self

    @property
    def summary(self) -> str:
        """Short description: the window and n-gram sizes."""
        return f"lookahead decoding: window {self.window}, n-grams of {self.ngram} tokens"


class HeadSpec(DraftSpec):
    """Drafting by a draft head that reads the model's hidden states (EAGLE, Medusa and others).

    `part`: the head's name among the profile's parts. `step`: the cost of a head step in plain decoding steps.
    """

    kind: Literal["head"] = "head"
    part: PartName = Field("eagle", description="Name of the head among the profile's parts.")
    step: NonNegative = Field(0.05, description="Time of one step of the head, in plain decoding steps.")
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


class ModelSpec(_ChosenSpec):
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
    step: NonNegative = Field(0.3, description="Time of one draft step, in plain decoding steps.")

    @property
    def summary(self) -> str:
        """Short description: the draft model, and the proposers of lookup tokens."""
        few = f" in {self.bits}" if self.bits else ""
        return f"drafts by the model {self.model}{few}{self._lookup_summary}"

    @property
    def may_name_files(self) -> bool:
        """True, since the draft model's folder may lie beside the profile."""
        return True


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
    def checks_lookup(self) -> bool:
        """Whether draft steps of any drafter check lookup tokens."""
        return any(drafter.checks_lookup for drafter in self.drafters)

    @property
    def may_name_files(self) -> bool:
        """Whether any drafter names files that may lie beside the profile."""
        return any(drafter.may_name_files for drafter in self.drafters)

    def check(self, model: Identity) -> None:
        """Raise `SelfspecError` if a drafter does not fit a model of that identity."""
        for drafter in self.drafters:
            drafter.check(model)


_KINDS: tuple[type[DraftSpec], ...] = (
    SwiftSpec,
    ClaspSpec,
    InputSpec,
    JacobiSpec,
    LookaheadSpec,
    HeadSpec,
    ModelSpec,
    MergedSpec,
)
for _kind in _KINDS:
    register_spec(_kind)
