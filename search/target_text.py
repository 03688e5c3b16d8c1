"""The input of a replay: texts that the target wrote, and the residual streams at their positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TargetText:
    """A prompt of the first `prompt_length` tokens of `tokens`, and the target's own continuation of it.

    `remaining`: the tokens that the continuation was allowed; it is shorter where the text ended by itself. `seed`: the
    seed that it was sampled with.
    """

    tokens: tuple[int, ...]
    prompt_length: int
    remaining: int
    seed: int | None = None

    @property
    def num_new_tokens(self) -> int:
        """The number of tokens in the continuation."""
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True, slots=True)
class Streams:
    """The whole model's residual streams `[B, n, D]` at some positions of the texts, and a way to run sub-layers there.

    `entering[l]` is the input of layer l (the last is the model's output), `between[l]` is between the layer's
    attention and its MLP. `branch(layer, part, x)` returns the output that a sub-layer adds to another stream `x` at
    these positions. Attention reads the keys made from `x`, and the target's keys of all earlier tokens, if the
    positions do not begin with the text.
    """

    real: Tensor  # [B, n]: not padding
    entering: list[Tensor]
    between: list[Tensor]
    branch: Callable[[int, Literal["attention", "mlp"], Tensor], Tensor]
