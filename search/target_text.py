"""The input of a replay: texts that the target generated, and the residual streams at positions of these texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TargetText:
    """A prompt of the first `prompt_length` tokens of `tokens`, and the target's own continuation of it.

    `remaining`: the number of tokens that the continuation was allowed; a text that reached an end token is shorter.
    `seed`: the seed that the continuation was sampled with (None: without a seed).
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
    """The whole model's residual streams `[B, n, D]` at n positions of B texts, and a function to run sub-layers.

    `entering[l]` is the input of layer l (the last is the model's output), `between[l]` is between the layer's
    attention and its MLP. `branch(layer, part, x)` returns the output that a sub-layer adds to any residual stream `x`
    at these positions. Its attention reads keys made from `x`, and the target's keys of all tokens before the first of
    these positions.
    """

    real: Tensor  # [B, n]: not padding
    entering: list[Tensor]
    between: list[Tensor]
    branch: Callable[[int, Literal["attention", "mlp"], Tensor], Tensor]
