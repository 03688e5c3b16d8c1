"""What may be skipped: the variables of a search, and skip sets as points of it. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from selfspec.basics.errors import SelfspecError
from selfspec.facts.skip import SkipSet

GRANULARITIES = ("sublayer", "layer")


@dataclass(frozen=True)
class Space:
    """One binary variable for each sub-layer that may be skipped, or for each layer, in the order they are run.

    `keep`: layers that are never skipped; `granularity`: one of `GRANULARITIES`. Raises `SelfspecError` for a layer
    that does not exist, or when nothing is left to skip.
    """

    layers: int
    keep: tuple[int, ...] = ()
    granularity: str = "sublayer"

    def __post_init__(self) -> None:
        wrong = next((layer for layer in self.keep if not 0 <= layer < self.layers), None)
        if wrong is not None:
            raise SelfspecError(
                f"keep: layer {wrong} does not exist; the model has {self.layers} layers, 0 to {self.layers - 1}"
            )
        if len(set(self.keep)) == self.layers:
            raise SelfspecError("keep: every layer is kept, so that nothing can be skipped")

    @cached_property
    def variables(self) -> tuple[SkipSet, ...]:
        """What each variable skips when it is set."""
        free = [layer for layer in range(self.layers) if layer not in self.keep]
        if self.granularity == "layer":
            return tuple(SkipSet((layer,), (layer,)) for layer in free)
        return tuple(part for layer in free for part in (SkipSet((layer,), ()), SkipSet((), (layer,))))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The variables' names, such as `attention 3`, `mlp 3` and `layer 3`."""
        kinds = {(True, True): "layer", (True, False): "attention", (False, True): "mlp"}
        return tuple(f"{kinds[bool(p.attention), bool(p.mlp)]} {(p.attention or p.mlp)[0]}" for p in self.variables)

    def __len__(self) -> int:
        return len(self.variables)

    def skip(self, bits: Sequence[bool | int]) -> SkipSet:
        """The skip set of a point, one bit for each variable."""
        parts = [part for part, bit in zip(self.variables, bits, strict=True) if bit]
        return SkipSet(tuple(i for p in parts for i in p.attention), tuple(i for p in parts for i in p.mlp))

    def choose(self, numbers: Collection[int]) -> SkipSet:
        """The skip set of the variables with these numbers."""
        return self.skip([i in numbers for i in range(len(self))])

    def bits(self, skip: SkipSet) -> tuple[bool, ...]:
        """The nearest point to a skip set: a variable is set when all of it is skipped."""
        attention, mlp = set(skip.attention), set(skip.mlp)
        return tuple(attention.issuperset(part.attention) and mlp.issuperset(part.mlp) for part in self.variables)

    def nearest(self, skip: SkipSet) -> SkipSet:
        """The skip set of the nearest point."""
        return self.skip(self.bits(skip))


def parse_keep(text: str) -> tuple[int, ...]:
    """Layers such as `0,15`. Raises `SelfspecError` for anything else."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts):
        raise SelfspecError(f"keep '{text}': want layer numbers such as 0,15")
    return tuple(sorted({int(part) for part in parts}))
