"""Skip sets: the attention and MLP sub-layers that are skipped while drafting. Does not import torch."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from selfspec.basics.errors import SelfspecError


@dataclass(frozen=True, slots=True)
class SkipSet:
    """The sub-layers to skip, by layer index from 0, attention and MLP separately.

    Indices are kept sorted. Raises `SelfspecError` for a negative, repeated or non-integer index.
    """

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for part in ("attention", "mlp"):
            layers = getattr(self, part)
            indices = tuple(layers) if isinstance(layers, Iterable) else (layers,)
            for index in indices:
                if isinstance(index, bool) or not hasattr(index, "__index__") or operator.index(index) < 0:
                    raise SelfspecError(f"skip.{part}: {index!r} is no layer index; expected integers from 0")
            indices = tuple(operator.index(index) for index in indices)
            if len(set(indices)) != len(indices):
                again = next(i for i in indices if indices.count(i) > 1)
                raise SelfspecError(f"skip.{part}: layer {again} is listed twice; list each layer once")
            object.__setattr__(self, part, tuple(sorted(indices)))

    def __len__(self) -> int:
        """Return the number of skipped sub-layers."""
        return len(self.attention) + len(self.mlp)

    def check(self, layers: int, *, mode: str = "skip") -> None:
        """Raise `SelfspecError` for an index beyond a model of `layers` layers; `mode` is named in the error."""
        for part, indices in (("attention", self.attention), ("mlp", self.mlp)):
            if indices and indices[-1] >= layers:
                raise SelfspecError(
                    f"{mode}.{part}: layer {indices[-1]} does not exist; the model has {layers} layers, "
                    f"so 0 to {layers - 1} can be {'skipped' if mode == 'skip' else f'in {mode}'}"
                )

    def bits(self, layers: int) -> tuple[bool, ...]:
        """Return `2 * layers` booleans: attention of layers 0.., then MLP of layers 0.. (true: skipped)."""
        self.check(layers)
        attention, mlp = set(self.attention), set(self.mlp)
        return (*(i in attention for i in range(layers)), *(i in mlp for i in range(layers)))

    @classmethod
    def from_bits(cls, bits: Sequence[bool | int]) -> SkipSet:
        """Make a skip set from the booleans that the method `bits` returns.

        Raises `SelfspecError` for an odd number of bits.
        """
        if len(bits) % 2:
            raise SelfspecError(f"a skip set has two bits a layer; got {len(bits)} bits")
        layers = len(bits) // 2
        return cls(_where(bits[:layers]), _where(bits[layers:]))

    def rows(self, layers: int) -> tuple[str, str]:
        """Return the skip map, a string for attention and a string for MLP: `#` for a sub-layer that runs, else `.`."""
        bits = self.bits(layers)
        return _map(bits[:layers]), _map(bits[layers:])


def _where(bits: Iterable[bool | int]) -> tuple[int, ...]:
    return tuple(i for i, bit in enumerate(bits) if bit)


def _map(bits: Iterable[bool]) -> str:
    return "".join("." if bit else "#" for bit in bits)


NOTHING_SKIPPED = SkipSet()
