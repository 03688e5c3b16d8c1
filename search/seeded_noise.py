"""The noise of verification rule `match`, equal to the noise that the texts were sampled with."""

from __future__ import annotations

from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.speculation.sampling import tied_noise


class SeededNoise:
    """The sampling noise of one text, a function of the text's seed and the position; kept in memory once drawn."""

    def __init__(self, seed: int | None) -> None:
        if seed is None:
            raise SelfspecError("rule 'match': a text without a seed; expected texts that were sampled with a seed")
        self._seed = seed
        self._cache: dict[int, Tensor] = {}

    def noise(self, position: int, like: Tensor) -> Tensor:
        """Return the noise `[V]` of an absolute position, for a vocabulary as in `like` `[.., V]`."""
        if position not in self._cache:
            self._cache[position] = tied_noise(self._seed, position, like)
        return self._cache[position]
