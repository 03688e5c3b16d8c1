"""The noise of rule `match`, the same as when the texts were sampled."""

from __future__ import annotations

from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.speculation.sampling import tied_noise


class SeededNoise:
    """The noise of one text, a function of its seed and the position; drawn once for each position, then kept."""

    def __init__(self, seed: int | None) -> None:
        if seed is None:
            raise SelfspecError("rule 'match' is replayed on texts that were sampled with a seed; this one names none")
        self._seed = seed
        self._cache: dict[int, Tensor] = {}

    def noise(self, position: int, like: Tensor) -> Tensor:
        """Return the noise `[V]` of an absolute position, for a vocabulary as in `like` `[.., V]`."""
        if position not in self._cache:
            self._cache[position] = tied_noise(self._seed, position, like)
        return self._cache[position]
