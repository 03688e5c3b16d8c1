"""Skip sets, and draft paths: how the model runs while it drafts. Plain data, which `selfspec.runtime` compiles."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

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


Mode = Literal["full", "int8", "int4", "skip"]
"""How one sub-layer runs while drafting: at full precision, with int8 or int4 weights, or skipped."""

HeadMode = Literal["full", "int8", "int4"]
LowMode = Literal["int8", "int4"]
"""The quantised modes."""

MODES: tuple[Mode, ...] = get_args(Mode)  # each reads fewer bytes than the one before it
LOW: tuple[LowMode, ...] = get_args(LowMode)
SIGNS: dict[Mode, str] = {"full": "#", "int8": "8", "int4": "4", "skip": "."}  # in skip maps
WORDS: dict[Mode, str] = {"full": "in full", "int8": "in int8", "int4": "in int4", "skip": "skipped"}


@dataclass(frozen=True, slots=True)
class DraftPath:
    """A draft path: the mode of each sub-layer and of the language-model head while drafting.

    Sub-layers that are in none of the sets run at full precision.

    `skip`: the skipped sub-layers. `int8` and `int4`: the sub-layers that run with int8 or int4 weights. `head`: the
    mode of the head. `vocabulary`: the only tokens whose logits the head computes; None: all tokens. `trained`: the
    name under which bridges or adapters are registered with the runtime (`Runtime.register_trained`); None: none.
    `int4_weights`: the name under which int4 weights are registered (`Runtime.register_int4`), which the sub-layers in
    `int4` use; None: these sub-layers' weights are rounded to nearest, or as `Runtime.using_int4` says.
    Raises `SelfspecError` for a sub-layer with two modes, a skipped head, and a vocabulary that is empty or has a
    repeated or negative token.
    """

    skip: SkipSet = NOTHING_SKIPPED
    vocabulary: tuple[int, ...] | None = None
    int8: SkipSet = NOTHING_SKIPPED
    int4: SkipSet = NOTHING_SKIPPED
    head: HeadMode = "full"
    trained: str | None = None
    int4_weights: str | None = None

    def __post_init__(self) -> None:
        tokens = self.vocabulary
        if tokens is not None and (not tokens or len(set(tokens)) < len(tokens) or min(tokens) < 0):
            raise SelfspecError(
                "draft vocabulary: empty, or with a repeated or negative token; expected one or more different tokens "
                "from 0"
            )
        if self.head not in MODES[:-1]:
            raise SelfspecError(f"head '{self.head}': expected {', '.join(MODES[:-1])}")
        if not self.low_precision:
            return
        for part in ("attention", "mlp"):
            mode_by_layer: dict[int, str] = {}
            for mode in ("skip", "int8", "int4"):
                for layer in getattr(getattr(self, mode), part):
                    if layer in mode_by_layer:
                        raise SelfspecError(
                            f"{part} of layer {layer} is both {mode_by_layer[layer]} and {mode}; expected one of them"
                        )
                    mode_by_layer[layer] = mode

    @classmethod
    def skipping(cls, attention: Sequence[int] = (), mlp: Sequence[int] = ()) -> DraftPath:
        """Make a path that skips these layers' attention or MLP sub-layers; all others run at full precision."""
        return cls(SkipSet(tuple(attention), tuple(mlp)))

    @classmethod
    def from_modes(
        cls, modes: Sequence[Mode], *, head: HeadMode = "full", vocabulary: tuple[int, ...] | None = None
    ) -> DraftPath:
        """Make a path of `2 * layers` modes: attention of layers 0.., then MLP of layers 0.. (inverse of `modes`)."""
        sets = {mode: SkipSet.from_bits([m == mode for m in modes]) for mode in ("skip", "int8", "int4")}
        return cls(sets["skip"], vocabulary, sets["int8"], sets["int4"], head)

    def modes(self, layers: int) -> tuple[Mode, ...]:
        """Return `2 * layers` modes: attention of layers 0.., then MLP of layers 0...

        Raises `SelfspecError` as `check` does.
        """
        if not self.low_precision:
            return tuple("skip" if bit else "full" for bit in self.skip.bits(layers))
        each = zip(self.skip.bits(layers), self.int8.bits(layers), self.int4.bits(layers), strict=True)
        return tuple("skip" if s else "int8" if b8 else "int4" if b4 else "full" for s, b8, b4 in each)

    def check(self, layers: int) -> None:
        """Raise `SelfspecError` for a layer that a model of `layers` layers does not have."""
        self.skip.check(layers)
        self.int8.check(layers, mode="int8")
        self.int4.check(layers, mode="int4")

    def share(self, words: int | None) -> float:
        """Return the share of a vocabulary of `words` tokens that the head covers; 1 if `words` is None (unknown)."""
        return 1.0 if self.vocabulary is None or not words else len(self.vocabulary) / words

    def runs(self, layers: int) -> list[tuple[int, int]]:
        """Return the runs of adjacent layers that are skipped entirely, as (first, end) with end exclusive."""
        skipped = set(self.skip.attention) & set(self.skip.mlp)
        firsts = [i for i in range(layers) if i in skipped and i - 1 not in skipped]
        return [(i, next(j for j in range(i, layers + 1) if j not in skipped)) for i in firsts]

    @property
    def low_precision(self) -> bool:
        """Whether any sub-layer or the head is quantised."""
        return bool(len(self.int8) or len(self.int4) or self.head != "full")

    @property
    def quantized_sets(self) -> tuple[tuple[Mode, SkipSet], ...]:
        """The quantised modes that are in use, each with its sub-layers."""
        sets: tuple[tuple[Mode, SkipSet], ...] = (("int8", self.int8), ("int4", self.int4))
        return tuple((mode, sublayers) for mode, sublayers in sets if len(sublayers))

    @property
    def cheaper(self) -> bool:
        """Whether any sub-layer is skipped or quantised, or the head quantised; else drafting saves no time."""
        return self.low_precision or len(self.skip) > 0

    def rows(self, layers: int) -> tuple[str, str]:
        """Return the skip map: strings for attention and for MLP, with a sign of `SIGNS` for each layer."""
        signs = "".join(SIGNS[mode] for mode in self.modes(layers))
        return signs[:layers], signs[layers:]

    @property
    def summary(self) -> str:
        """Short description: the numbers of skipped and quantised sub-layers, and the mode of a quantised head."""
        parts = [
            f"{len(sublayers)} {WORDS[mode]}"
            for mode, sublayers in (*self.quantized_sets, ("skip", self.skip))
            if len(sublayers)
        ]
        if parts:
            first, _, rest = parts[0].partition(" ")
            parts[0] = f"{first} sub-layer{'s' if first != '1' else ''} {rest}"
        if self.head != "full":
            parts.append(f"the head {WORDS[self.head]}")
        return ", ".join(parts) or "everything in full"


FULL = DraftPath()


def as_path(path: DraftPath | SkipSet) -> DraftPath:
    """Return a draft path; for a skip set, the path that skips it and runs all other sub-layers at full precision."""
    return DraftPath(path) if isinstance(path, SkipSet) else path
