"""The noise of rule `match`, the same as when the texts were sampled."""

from __future__ import annotations

from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.speculation.sampling import tied_noise


class Ties:
    """The noise of one text, a function of its seed and the position; drawn once for each position, then kept."""

    def __init__(self, seed: int | None) -> None:
        if seed is None:
            raise SelfspecError("rule 'match' is replayed on texts that were sampled with a seed; this one names none")
        self._seed = seed
        self._kept: dict[int, Tensor] = {}

    def at(self, position: int, like: Tensor) -> Tensor:
        """Return the noise `[V]` of an absolute position, for a vocabulary as in `like` `[.., V]`."""
        if position not in self._kept:
            self._kept[position] = tied_noise(self._seed, position, like)
        return self._kept[position]
