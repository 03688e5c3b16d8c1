"""Profile entries of drafts that take no draft steps: input-guided, Jacobi and lookahead decoding."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from selfspec.basics.errors import SelfspecError
from selfspec.profile.draft_spec import DraftController, DraftSpec, register_spec
from selfspec.types.controller import ControllerSpec
from selfspec.types.limits import WIDEST_DRAFT


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


for _kind in (InputSpec, JacobiSpec, LookaheadSpec):
    register_spec(_kind)
