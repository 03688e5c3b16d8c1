"""Is it lossless? Finds where greedy outputs first differ, and tells a near-tie from a bug.

Passes of different widths use different kernels, and below float64 they may round a near-tie differently. A first
difference is a near-tie when plain decoding's two best logits lie no further apart than `TOLERANCE` times the
largest difference between the two widths' logits on that very prefix; anything else is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.runtime import Runtime

TOLERANCE = 4.0
_WIDTHS = (2, 3, 4, 5, 6, 7, 8, 13)  # passes that a verification could have been


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference: after how many new tokens, which tokens, and how near the two were.

    `gap`: plain decoding's best logit less its logit of the other output's token; `noise`: the largest logit
    difference between a pass of one row and wider passes (or the other implementation) on the same prefix. One output
    ending before the other has no gap.
    """

    index: int
    plain: int | None
    other: int | None
    gap: float | None
    noise: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.gap is not None and self.gap <= TOLERANCE * self.noise

    def __str__(self) -> str:
        """One line for people."""
        if self.gap is None:
            return f"one output ends after {self.index} tokens, a BUG, please report it"
        what = "a near-tie" if self.near_tie else "a BUG, please report it"
        return (
            f"first difference after {self.index} tokens, {what} "
            f"(the logits are {self.gap:.2g} apart, rounding moves them by {self.noise:.2g})"
        )


def first_difference(
    runtime: Runtime,
    prompt: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    *,
    reference: Tensor | None = None,
) -> Difference | None:
    """Where `other` first differs from `plain` (new token ids), or None when they are the same.

    `reference`: another implementation's logits `[V]` on the common prefix, when `other` came from one. The runtime
    must not be busy.
    """
    if list(plain) == list(other):
        return None
    index = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other)))
    if index >= min(len(plain), len(other)):
        ends = (plain[index] if index < len(plain) else None, other[index] if index < len(other) else None)
        return Difference(index, *ends, gap=None, noise=0.0)
    prefix = [*prompt, *plain[:index]]
    narrow = _logits(runtime, prefix, 1)
    others = [_logits(runtime, prefix, width) for width in _WIDTHS if width <= len(prefix)]
    others += [reference.to(narrow)] if reference is not None else []
    noise = max((float((narrow - wide).abs().max()) for wide in others), default=0.0)
    return Difference(index, plain[index], other[index], float(narrow.max() - narrow[other[index]]), noise)


def _logits(runtime: Runtime, prefix: Sequence[int], width: int) -> Tensor:
    """The logits `[V]` after `prefix` when its last `width` tokens go through one pass, in at least float32."""
    tokens = torch.tensor([list(prefix)], device=runtime.device)
    before = len(prefix) - width
    with runtime.session(len(prefix)):
        if before:
            runtime.forward(tokens[:, :before], 0, logits=None)
        step = runtime.forward(tokens[:, before:], before, logits="last")
    assert step.logits is not None
    logits = step.logits[0, -1]
    return logits if logits.dtype == torch.float64 else logits.float()
