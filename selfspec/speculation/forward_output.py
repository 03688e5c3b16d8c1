"""The output of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Output of a forward pass: `logits` `[B, n or 1, V]` or None, and `hidden`, hidden states `[B, n, D]` by layer.

    `hidden[l]` is the residual stream that enters layer l; with L layers, `hidden[L]` is the residual stream that
    leaves the last layer, before the final norm. `between[l]` is the residual stream of layer l between its attention
    and its MLP, `[B, n, D]`.
    """

    logits: Tensor | None
    hidden: dict[int, Tensor] = field(default_factory=dict)
    between: dict[int, Tensor] = field(default_factory=dict)

    def last(self) -> ForwardOutput:
        """Return the output for the last token of each batch row, `[B, 1, ..]`."""
        hidden, between = (
            {layer: s[:, -1:] for layer, s in streams.items()} for streams in (self.hidden, self.between)
        )
        return ForwardOutput(None if self.logits is None else self.logits[:, -1:], hidden, between)

    def part(self, row: int, n: int) -> ForwardOutput:
        """Return the output for the first n tokens of batch row `row`, `[1, n, ..]`."""
        index = (slice(row, row + 1), slice(n))
        hidden, between = ({layer: s[index] for layer, s in streams.items()} for streams in (self.hidden, self.between))
        return ForwardOutput(None if self.logits is None else self.logits[index], hidden, between)


def joined(steps: Sequence[ForwardOutput]) -> ForwardOutput:
    """Concatenate the outputs of passes over consecutive tokens; passes without logits add no rows of logits."""
    if len(steps) < 2:
        return steps[0] if steps else ForwardOutput(None)
    logits = [step.logits for step in steps if step.logits is not None]
    hidden = {layer: torch.cat([step.hidden[layer] for step in steps], 1) for layer in steps[0].hidden}
    return ForwardOutput(torch.cat(logits, 1) if logits else None, hidden)
