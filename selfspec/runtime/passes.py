"""Whole passes over a few tokens in one native call, for layers that are nothing but what `native.cpp` computes.

What is multiplied is then all that a step costs: a pass of many small operations spends as long between them. All is
computed in float32 but for the cache, which is the model's. Knows nothing of drafts and prompts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from selfspec.model.families.base import Attention, Mlp
from selfspec.model.linears import whole_parts
from selfspec.model.native import KINDS, ROWS, Layer, NativeProduct, Pass, Place
from selfspec.model.native_library import library
from selfspec.model.norms import Norm, RoundedNorm, ScaledNorm
from selfspec.model.sizes import Sizes
from selfspec.model.trained import Crossing
from selfspec.runtime.cache import Cache

__all__ = ["ROWS", "NativePass", "Spot", "native_pass"]
_LONGEST_VECTOR = 16  # float32 values: what sizes are multiples of


class NativePass:
    """The layers of one path, and the last norm, as one call; see `native_pass`."""

    def __init__(
        self, sizes: Sizes, scaling: float, layers: Sequence[Layer], norm: ScaledNorm | RoundedNorm, held: Sequence[Any]
    ) -> None:
        self._held = (norm, *held)  # what `layers` point to
        described = (Layer * len(layers))(*layers)
        s = sizes
        sized = (KINDS[s.dtype], len(layers), s.hidden, s.heads, s.kv_heads, s.head_dim, s.intermediate, s.eps)
        self._described = Pass(*sized, scaling, described, norm.weight.data_ptr())
        self._at = ctypes.addressof(self._described)
        self._functions = library()

    def run(self, stream: Tensor, spot: Spot, keep: Sequence[int] = ()) -> tuple[Tensor, Sequence[Tensor]]:
        """What the last norm makes of the stream `[n, D]`, float32, which is changed in place.

        With it the streams that enter the layers `keep`.
        """
        functions, place, threads = self._functions, ctypes.addressof(spot.place), torch.get_num_threads()
        out = torch.empty_like(stream)
        kept: list[Tensor] = []
        spot.place.keeps = len(keep)
        if keep:
            layers, whole = torch.tensor(keep), stream.new_empty((len(keep), *stream.shape))
            spot.place.keep, spot.place.kept = layers.data_ptr(), whole.data_ptr()
            kept = list(whole)
        scratch = torch.empty(functions.selfspec_scratch(self._at, place, threads))
        functions.selfspec_pass(self._at, place, stream.data_ptr(), out.data_ptr(), scratch.data_ptr(), threads)
        return out, kept


class Spot:
    """Where up to `ROWS` tokens stand in a row of a cache of turned keys, as a native pass reads it.

    Made once for a cache; `cos` and `sin` are `[positions, 1, d]`.
    """

    def __init__(self, cache: Cache, cos: Tensor, sin: Tensor) -> None:
        values = cache.values[0]
        self._tables = cos, sin = cos.float().contiguous(), sin.float().contiguous()
        self._numbers = torch.arange(values.shape[2])
        self._keys, self._values = cache.keys[0].data_ptr(), values.data_ptr()
        self._row = values.stride(0) * values.element_size()
        each = (cache.values[1].data_ptr() - self._values) // values.element_size() if len(cache.values) > 1 else 0
        self.place = Place(stride=values.shape[2], each_layer=each, cos=cos.data_ptr(), sin=sin.data_ptr())

    def _checked(self, at: int | Tensor, n: int, end: int) -> tuple[Tensor, int]:
        """Positions or slots as the native pass reads them, and the last. `RuntimeError` for what is not there."""
        first, last = (at, at + n - 1) if isinstance(at, int) else (int(at.min()), int(at.max()))
        if first < 0 or last >= end:
            raise RuntimeError(f"positions and slots go from 0 to {end - 1}; want no {first if first < 0 else last}")
        return (self._numbers[at : at + n] if isinstance(at, int) else at.long().contiguous()), last

    def set(self, n: int, positions: int | Tensor, slots: int | Tensor, mask: Tensor | None, row: int) -> Spot:
        """Of `n` tokens of a row; `mask` is additive, `[1, 1, n, seen]`; other arguments as in `Runtime.forward`."""
        place = self.place
        at, _ = self._checked(positions, n, len(self._tables[0]))
        to, last = self._checked(slots, n, place.stride)
        if mask is not None:
            mask = mask[..., : place.stride].float().contiguous()
        self._now = (at, to, mask)  # held while they are read
        place.seen = last + 1 if mask is None else mask.shape[-1]
        place.n, place.positions, place.slots = n, at.data_ptr(), to.data_ptr()
        place.mask = None if mask is None else mask.data_ptr()
        place.keys, place.values = self._keys + row * self._row, self._values + row * self._row
        return self


def native_pass(
    sizes: Sizes,
    scaling: float,
    blocks: Sequence[tuple[int, torch.device, Attention | None, Mlp | None]],
    norm: Norm,
) -> NativePass | None:
    """The blocks of a path as one native pass; None unless every one of them is native and plain.

    That is: float32 or bfloat16 on a CPU, RMSNorm, products that are native, rope over whole heads, a gated MLP with
    SiLU. `scaling` multiplies queries after rope.
    """
    plain = all(size % _LONGEST_VECTOR == 0 for size in (sizes.hidden, sizes.head_dim, sizes.intermediate))
    if sizes.dtype not in KINDS or not plain or not isinstance(norm, (ScaledNorm, RoundedNorm)):
        return None
    layers: list[Layer] = []
    held: list[Any] = []
    for _, device, attention, mlp in blocks:
        if device.type != "cpu":
            return None
        layer = Layer()
        if isinstance(mlp, Crossing):
            into, onto, mlp = mlp.into, mlp.onto, None
            if not isinstance(onto, NativeProduct) or not isinstance(into, NativeProduct | None):
                return None
            if onto.into % _LONGEST_VECTOR:
                return None
            held += [into, onto]
            layer.gate_up, layer.down = None if into is None else into.address, onto.address
        for part, names in ((attention, ("before_attention", "qkv", "o")), (mlp, ("before_mlp", "gate_up", "down"))):
            if part is None:
                continue
            found = _made_of(part)
            if found is None:
                return None
            held += found
            before, *products = found
            setattr(layer, names[0], before.weight.data_ptr())
            for name, product in zip(names[1:], products, strict=True):
                setattr(layer, name, product.address)
        layers.append(layer)
    return NativePass(sizes, scaling, layers, norm, held) if held else None


def _made_of(part: Any) -> tuple[ScaledNorm | RoundedNorm, NativeProduct, NativeProduct] | None:
    """A sub-layer's norm, its products that read the stream, and that which writes to it, where they are native."""
    plain = getattr(part, "plain", None)
    if plain is None or not isinstance(part.norm, (ScaledNorm, RoundedNorm)):
        return None
    into, onto = (None if (whole := whole_parts(modules)) is None else whole.product for modules in plain)
    if not isinstance(into, NativeProduct) or not isinstance(onto, NativeProduct):
        return None
    return part.norm, into, onto
