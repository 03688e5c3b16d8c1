"""What is replayed: texts that the target wrote, and the residual streams at their positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TargetText:
    """A prompt and the target's own continuation of it: the first `prompt` of `tokens` were given.

    `room`: tokens that the continuation was allowed; it is shorter where the text ended by itself. `seed`: what it was
    sampled with.
    """

    tokens: tuple[int, ...]
    prompt: int
    room: int
    seed: int | None = None

    @property
    def new(self) -> int:
        """Tokens of the continuation."""
        return len(self.tokens) - self.prompt


@dataclass(frozen=True, slots=True)
class Streams:
    """The whole model's residual streams `[B, n, D]` at some positions of the texts, and a way to run sub-layers there.

    `entering[l]` enters layer l (the last leaves the model), `between[l]` is between its attention and its MLP.
    `branch(layer, part, x)` is what a sub-layer adds to another stream `x` at these positions. Attention reads the keys
    made from `x`, and the target's keys of all tokens before, if the positions do not begin with the text.
    """

    real: Tensor  # [B, n]: not padding
    entering: list[Tensor]
    between: list[Tensor]
    branch: Callable[[int, Literal["attention", "mlp"], Tensor], Tensor]
