"""What is replayed: texts that the target wrote, and the streams of their places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Text:
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
    """The residual streams `[B, n, D]` of places in the texts, and a way to run one sub-layer on others there.

    `entering[l]` enters layer l (the last leaves the model), `between[l]` is between its attention and its MLP.
    `branch(layer, part, x)` is what a sub-layer adds to `x`: attention reads the target's keys before, and x's own; or
    x's own alone, where the places are all that there are before each.
    """

    real: Tensor  # [B, n]: not padding
    entering: list[Tensor]
    between: list[Tensor]
    branch: Callable[[int, Literal["attention", "mlp"], Tensor], Tensor]
