"""Whole forward passes in one native call, for models whose layers `native.cpp` can compute entirely.

A native pass takes little longer than its matrix products. An eager pass takes about twice as long, as its many small
operations have overhead. Native passes compute in float32; the KV cache has the model's dtype.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from selfspec.models.families.base import Attention, Mlp
from selfspec.models.linears import fused_product
from selfspec.models.native import ROWS, LayerStruct, NativeProduct, PassStruct, Segment, SlotsStruct
from selfspec.models.native_library import KINDS, library
from selfspec.models.norms import Norm, RoundedNorm, ScaledNorm
from selfspec.models.path_modules import BridgeModule
from selfspec.models.sizes import Sizes
from selfspec.runtime.cache import Cache, Int8Copies
from selfspec.runtime.paged import PagedCache
from selfspec.speculation.tree_batch import PlacedDraft, tree_mask

__all__ = ["ROWS", "NativeBatch", "NativePass", "native_pass"]
_LONGEST_VECTOR = 16  # float32 values; sizes of a native model have to be multiples of this number


class NativePass:
    """The layers of one draft path, and the norm after the last layer, as one native call; see `native_pass`."""

    def __init__(
        self,
        sizes: Sizes,
        scaling: float,
        layers: Sequence[LayerStruct],
        norm: ScaledNorm | RoundedNorm,
        resources: Sequence[Any],
    ) -> None:
        self._resources = (norm, *resources)  # keeps alive what `layers` point to
        described = (LayerStruct * len(layers))(*layers)
        s = sizes
        sized = (KINDS[s.dtype], len(layers), s.hidden, s.heads, s.kv_heads, s.head_dim, s.intermediate, s.eps)
        self._described = PassStruct(*sized, scaling, described, norm.weight.data_ptr())
        self._address = ctypes.addressof(self._described)
        self._functions = library()

    def run(
        self, stream: Tensor, batch: NativeBatch, keep: Sequence[int] = (), normed: bool = True
    ) -> tuple[Tensor | None, Sequence[Tensor]]:
        """Run the layers over the residual stream `[n, D]` (float32), which is changed in place.

        Returns the output of the last norm `[n, D]` (None unless `normed`), and for each layer in `keep` its input
        hidden states `[n, D]`.
        """
        functions, place, threads = self._functions, ctypes.addressof(batch.slots_struct), torch.get_num_threads()
        out = torch.empty_like(stream) if normed else None
        streams: list[Tensor] = []
        batch.slots_struct.num_captured = len(keep)
        if keep:
            layers, stream_buffer = torch.tensor(keep), stream.new_empty((len(keep), *stream.shape))
            batch.slots_struct.captured_layers, batch.slots_struct.captured = (
                layers.data_ptr(),
                stream_buffer.data_ptr(),
            )
            streams = list(stream_buffer)
        scratch = torch.empty(functions.selfspec_scratch(self._address, place, threads))
        to = None if out is None else out.data_ptr()
        functions.selfspec_pass(self._address, place, stream.data_ptr(), to, scratch.data_ptr(), threads)
        return out, streams


class NativeBatch:
    """Positions, slots and masks of a pass's tokens in a cache with transposed keys, in the native pass's structures.

    One instance serves all passes over a cache. `cos` and `sin` are `[positions, 1, d]`.
    """

    def __init__(self, cache: Cache | PagedCache, cos: Tensor, sin: Tensor) -> None:
        keys, values = cache.keys[0], cache.values[0]
        self._cache = cache
        self._tables = cos, sin = cos.float().contiguous(), sin.float().contiguous()
        self._numbers = torch.arange(max(cache.slots, values.shape[2]))
        each = (cache.values[1].data_ptr() - values.data_ptr()) // values.element_size() if len(cache.values) > 1 else 0
        memory = {"cos": cos.data_ptr(), "sin": sin.data_ptr(), "keys": keys.data_ptr(), "values": values.data_ptr()}
        self._segment = Segment()
        self._row_struct, self._drafts_struct = (
            SlotsStruct(stride=values.shape[2], each_layer=each, **memory) for _ in range(2)
        )
        self._row_struct.segments, self._row_struct.segment = 1, ctypes.addressof(self._segment)
        self.slots_struct = self._row_struct
        self._resources: Any = ()  # keeps alive what `slots_struct` points to
        self._copies: Int8Copies | None = None

    def _checked(self, indices: int | Tensor, n: int, end: int) -> tuple[Tensor, int]:
        """Return positions or slots as int64, and the largest. Raises `RuntimeError` for any not in 0 to `end` - 1."""
        first, last = (
            (indices, indices + n - 1) if isinstance(indices, int) else (int(indices.min()), int(indices.max()))
        )
        if first < 0 or last >= end:
            raise _beyond(first if first < 0 else last, end)
        return (self._numbers[indices : indices + n] if isinstance(indices, int) else indices.long().contiguous()), last

    def _round(self, segment: Segment, row: int, first: int, int8_cache: bool) -> None:
        """Set whether attention reads int8 copies, and which slots are rounded: `first` is the first one written."""
        place = self.slots_struct
        place.rounded = int8_cache and isinstance(self._cache, Cache)
        if not place.rounded:
            return
        assert isinstance(self._cache, Cache)
        copies = self._cache.copies
        if copies is not self._copies:
            self._copies = copies
            for struct in (self._row_struct, self._drafts_struct):
                struct.rounded_keys, struct.rounded_values = copies.keys.data_ptr(), copies.values.data_ptr()
                struct.key_scales, struct.value_scales = (scales.data_ptr() for scales in copies.scales)
                struct.each_rounded, struct.rounded_blocks = copies.keys[0].numel(), copies.table.shape[1]
        segment.rounded, copies.valid[row] = min(copies.valid[row], first), first
        segment.rounded_blocks = copies.table[row].data_ptr()

    def for_row(
        self,
        n: int,
        positions: int | Tensor,
        slots: int | Tensor,
        mask: Tensor | None,
        row: int,
        *,
        int8_cache: bool = False,
    ) -> NativeBatch:
        """Set up a pass over `n` tokens of one cache row.

        `mask` is additive, `[1, 1, n, S]`; `int8_cache`: whether attention reads the cache's int8 copies, if it has
        any; other arguments as in `Runtime.forward`. Raises `RuntimeError` for positions
        or slots out of range.
        """
        self.slots_struct, segment = self._row_struct, self._segment
        place = self.slots_struct
        segment.blocks, end = self._cache.blocks_of(row)
        position_ids, _ = self._checked(positions, n, len(self._tables[0]))
        to, last = self._checked(slots, n, end)
        if mask is not None:
            mask = mask[..., :end].float().contiguous()
        self._resources = (position_ids, to, mask)
        segment.n = place.n = n
        self._round(segment, row, slots if isinstance(slots, int) else int(slots.min()), int8_cache)
        segment.kv_len = place.kv_len = last + 1 if mask is None else mask.shape[-1]
        segment.mask = None if mask is None else mask.data_ptr()
        place.positions, place.slots = position_ids.data_ptr(), to.data_ptr()
        return self

    def for_drafts(self, placed: Sequence[PlacedDraft], *, int8_cache: bool = False) -> NativeBatch:
        """Set up a pass over drafts, each with its root first; `int8_cache` is as in `for_row`.

        Raises `RuntimeError` for positions or slots out of range.
        """
        positions, slots, masks = array("q"), array("q"), list[Tensor]()
        self.slots_struct, segments = self._drafts_struct, (Segment * len(placed))()
        place, last = self.slots_struct, len(self._tables[0])
        place.kv_len = 0
        for segment, (row, _, start, draft) in zip(segments, placed, strict=True):
            segment.blocks, end = self._cache.blocks_of(row)
            segment.n, segment.kv_len = 1 + len(draft), start + 1 + len(draft)
            places = range(start, segment.kv_len)
            slots.extend(places)
            if draft.is_chain:
                deepest = segment.kv_len - 1
                positions.extend(places)
            else:
                deepest = start + draft.depth
                positions.append(start)
                positions.extend(start + depth for depth in draft.depths)
                masks.append(torch.zeros(tree_mask(draft).shape).masked_fill_(~tree_mask(draft), -torch.inf))
                segment.first, segment.mask = start + 1, masks[-1].data_ptr()
            if start < 0 or segment.kv_len > end or deepest >= last:
                raise _beyond(start if start < 0 else segment.kv_len - 1, min(end, last))
            self._round(segment, row, start, int8_cache)
            place.kv_len = max(place.kv_len, segment.kv_len)
        self._resources = (positions, slots, masks, segments)
        place.n, place.segments, place.segment = len(slots), len(placed), ctypes.addressof(segments)
        place.positions, place.slots = positions.buffer_info()[0], slots.buffer_info()[0]
        return self


def _beyond(place: int, end: int) -> RuntimeError:
    return RuntimeError(f"position or slot {place}: expected 0 to {end - 1}")


def native_pass(
    sizes: Sizes,
    scaling: float,
    blocks: Sequence[tuple[int, torch.device, Attention | None, Mlp | None]],
    norm: Norm,
) -> NativePass | None:
    """Return a path's layers as one native pass; None if native code cannot compute all of them, or none runs.

    `blocks`: for each layer its number, device, attention and MLP, either of which is None if skipped; a trained bridge
    takes the MLP's place. `norm`: the norm after the last layer. `scaling`: the factor on queries after RoPE.

    Native code computes float32 and bfloat16 models on the CPU with RMSNorm, Llama's attention (RoPE over whole heads)
    and gated MLPs with SiLU, if each product with a weight is a `NativeProduct`. The hidden size, the head dimension,
    the MLPs' intermediate size and a bridge's rank have to be multiples of 16. The caller has to check that all layers
    have the same RoPE, not an interleaved one.
    """
    plain = all(size % _LONGEST_VECTOR == 0 for size in (sizes.hidden, sizes.head_dim, sizes.intermediate))
    if sizes.dtype not in KINDS or not plain or not isinstance(norm, (ScaledNorm, RoundedNorm)):
        return None
    layers: list[LayerStruct] = []
    resources: list[Any] = []
    for _, device, attention, mlp in blocks:
        if device.type != "cpu":
            return None
        layer = LayerStruct()
        if isinstance(mlp, BridgeModule):
            into, onto, mlp = mlp.into, mlp.onto, None
            if not isinstance(onto, NativeProduct) or not isinstance(into, NativeProduct | None):
                return None
            if onto.into % _LONGEST_VECTOR:
                return None
            resources += [into, onto]
            layer.gate_up, layer.down = None if into is None else into.address, onto.address
        for part, names in ((attention, ("before_attention", "qkv", "o")), (mlp, ("before_mlp", "gate_up", "down"))):
            if part is None:
                continue
            norm_and_products = _made_of(part)
            if norm_and_products is None:
                return None
            resources += norm_and_products
            before, *products = norm_and_products
            setattr(layer, names[0], before.weight.data_ptr())
            for name, product in zip(names[1:], products, strict=True):
                setattr(layer, name, product.address)
        layers.append(layer)
    return NativePass(sizes, scaling, layers, norm, resources) if resources else None


def _made_of(part: Any) -> tuple[ScaledNorm | RoundedNorm, NativeProduct, NativeProduct] | None:
    """Return a sub-layer's norm, input product and output product; None if native code cannot compute one of them."""
    plain = getattr(part, "plain", None)
    if plain is None or not isinstance(part.norm, (ScaledNorm, RoundedNorm)):
        return None
    into, onto = (None if (fused := fused_product(modules)) is None else fused.product for modules in plain)
    if not isinstance(into, NativeProduct) or not isinstance(onto, NativeProduct):
        return None
    return part.norm, into, onto
