"""Whole passes over a few tokens in one native call, for layers that are nothing but what `native.cpp` computes.

What is multiplied is then all that a step costs: a pass of many small operations spends as long between them. Knows
nothing of drafts and prompts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from selfspec.model.families.base import Attention, Mlp, Workspace
from selfspec.model.linears import whole_parts
from selfspec.model.native import ROWS, Layer, NativeProduct, Pass, Place, library
from selfspec.model.norms import Norm, ScaledNorm
from selfspec.model.sizes import Sizes
from selfspec.runtime.cache import Cache

_LONGEST_VECTOR = 16  # float32 values: what sizes are multiples of


class NativePass:
    """The layers of one path, native as a whole; see `native_pass`."""

    def __init__(self, sizes: Sizes, layers: Sequence[Layer], norm: ScaledNorm, held: Sequence[Any]) -> None:
        self._held = (norm, *held)  # what `layers` point to
        self._layers = (Layer * len(layers))(*layers)
        s = sizes
        sized = (len(layers), s.hidden, s.heads, s.kv_heads, s.head_dim, s.intermediate, s.eps)
        self._described = Pass(*sized, self._layers, norm.weight.data_ptr())
        self._at = ctypes.addressof(self._described)
        self._functions = library()

    def run(self, work: Workspace, spot: Spot) -> None:
        """Bring the stream through the layers, in place; `normed` is then what the last norm makes of it."""
        threads, stream, out = torch.get_num_threads(), work.stream, work.normed
        functions, n = self._functions, len(stream)
        seen = max(spot.place.seen, spot.most)
        own = functions.selfspec_own(self._at, n, seen)
        scratch = torch.empty(functions.selfspec_shared(self._at, n) + threads * own)
        functions.selfspec_pass(
            self._at,
            ctypes.addressof(spot.place),
            stream.data_ptr(),
            stream.stride(0),
            out.data_ptr(),
            scratch.data_ptr(),
            seen,
            threads,
        )


class Spot:
    """Where up to `ROWS` tokens stand in a row of a cache, as a native pass reads it. Made once for a cache."""

    def __init__(self, cache: Cache, cos: Tensor, sin: Tensor) -> None:
        self._keys, self._values = cache.keys[0], cache.values[0]
        self._each_row = self._values.stride(0)
        self._numbers = torch.arange(cache.slots + 1)
        each = cache.values[1].data_ptr() - self._values.data_ptr() if len(cache.values) > 1 else 0
        self.place = Place(stride=self._values.shape[2], each_layer=each // 4, cos=cos.data_ptr(), sin=sin.data_ptr())
        self.most = 0
        self._tensors: tuple[Any, ...] = (cos, sin)

    def set(self, n: int, positions: int | Tensor, slots: int | Tensor, mask: Tensor | None, row: int) -> Spot:
        """Of `n` tokens of a row; `mask` is additive, `[1, 1, n, seen]`; other arguments as in `Runtime.forward`."""
        place = self.place
        at, to = (self._numbers[p : p + n] if isinstance(p, int) else p.contiguous() for p in (positions, slots))
        self._now = (at, to, mask)
        place.n, place.seen = n, 0 if mask is None else mask.shape[-1]
        self.most = slots + n if isinstance(slots, int) else int(slots.max()) + 1
        place.positions, place.slots = at.data_ptr(), to.data_ptr()
        place.mask = None if mask is None else mask.data_ptr()
        place.keys = self._keys.data_ptr() + 4 * row * self._each_row
        place.values = self._values.data_ptr() + 4 * row * self._each_row
        return self


def native_pass(
    sizes: Sizes, blocks: Sequence[tuple[int, torch.device, Attention | None, Mlp | None]], norm: Norm
) -> NativePass | None:
    """The blocks of a path as one native pass; None unless every one of them is native and plain.

    That is: float32 on a CPU, RMSNorm, products that are native, rope over whole heads, a gated MLP with SiLU.
    """
    plain = all(size % _LONGEST_VECTOR == 0 for size in (sizes.hidden, sizes.head_dim, sizes.intermediate))
    if sizes.dtype != torch.float32 or not plain or not isinstance(norm, ScaledNorm):
        return None
    layers: list[Layer] = []
    held: list[Any] = []
    for _, device, attention, mlp in blocks:
        if device.type != "cpu":
            return None
        layer = Layer()
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
    return NativePass(sizes, layers, norm, held) if held else None


def _made_of(part: Attention | Mlp) -> tuple[ScaledNorm, NativeProduct, NativeProduct] | None:
    """A sub-layer's norm, its products that read the stream, and that which writes to it, where they are native."""
    plain = getattr(part, "plain", None)
    if plain is None or not isinstance(part.norm, ScaledNorm):  # type: ignore[union-attr]
        return None
    wholes = [whole_parts(modules) for modules in plain]
    products = [None if whole is None else whole.product for whole in wholes]
    if not all(isinstance(product, NativeProduct) for product in products):
        return None
    into, onto = products
    return part.norm, into, onto  # type: ignore[union-attr, return-value]


__all__ = ["ROWS", "NativePass", "Spot", "native_pass"]
