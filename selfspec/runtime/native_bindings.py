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

from selfspec.models.families.base import Attention, AttentionSpec, Mlp, NativeSubLayer, Sizes
from selfspec.models.linears import fused_product
from selfspec.models.native import (
    ROWS,
    LayerStruct,
    NativeProduct,
    NormStruct,
    PassStruct,
    Segment,
    SlotsStruct,
    SpecStruct,
    SubLayerStruct,
)
from selfspec.models.native_library import ACTIVATIONS, KINDS, available, library
from selfspec.models.norms import NormData
from selfspec.models.quantized_sublayers import BridgeModule
from selfspec.runtime.attention_inputs import RotaryTable
from selfspec.runtime.cache import Cache, Int8Copies
from selfspec.runtime.paged import PagedCache
from selfspec.speculation.drafts import Draft
from selfspec.speculation.tree_batch import PlacedDraft, tree_mask

__all__ = ["ROWS", "NativeBatch", "NativePass", "native_pass"]
_LONGEST_VECTOR = 16  # float32 values; sizes of a native model have to be multiples of this number


class NativePass:
    """The layers of one draft path, and the norm after the last layer, as one native call; see `native_pass`.

    `attention_layers`: the numbers of the layers whose attention it runs.
    """

    def __init__(
        self,
        sizes: Sizes,
        scaling: float,
        layers: Sequence[LayerStruct],
        norm: NormData,
        resources: Sequence[Any],
    ) -> None:
        self._resources = (norm, *resources)  # keeps alive what `layers` point to
        self.attention_layers = tuple(i for i, layer in enumerate(layers) if layer.attention.onto)
        described = (LayerStruct * len(layers))(*layers)
        s = sizes
        widest = max((product.into for product in resources if isinstance(product, NativeProduct)), default=0)
        sized = (KINDS[s.dtype], len(layers), s.hidden, s.heads, s.kv_heads, s.head_dim, max(s.intermediate, widest))
        self._described = PassStruct(*sized, scaling, described, NormStruct.of(norm))
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
        scratch = torch.empty(
            functions.selfspec_scratch(self._address, place, threads), dtype=torch.float32, device="cpu"
        )
        to = None if out is None else out.data_ptr()
        functions.selfspec_pass(self._address, place, stream.data_ptr(), to, scratch.data_ptr(), threads)
        batch.mark_copies()
        return out, streams


class NativeBatch:
    """Positions, slots and masks of a pass's tokens in a cache with transposed keys, in the native pass's structures.

    One instance serves all passes over a cache. `attention_specs`: the model's, each with its rotary table.
    """

    def __init__(self, cache: Cache | PagedCache, attention_specs: Sequence[tuple[AttentionSpec, RotaryTable]]) -> None:
        keys, values = cache.keys[0], cache.values[0]
        self._cache = cache
        self._windows = [spec.window for spec, _ in attention_specs]
        self._tables = [
            (table.cos.float().contiguous(), table.sin.float().contiguous()) for _, table in attention_specs
        ]
        self._positions = len(self._tables[0][0])
        self._specs = (SpecStruct * len(attention_specs))(
            *(
                SpecStruct(cos.data_ptr(), sin.data_ptr(), table.rotary_dim, table.interleaved, spec.window or 0)
                for (spec, table), (cos, sin) in zip(attention_specs, self._tables, strict=True)
            )
        )
        self._numbers = torch.arange(max(cache.slots, values.shape[2]))
        each = (cache.values[1].data_ptr() - values.data_ptr()) // values.element_size() if len(cache.values) > 1 else 0
        memory = {"spec": ctypes.addressof(self._specs), "keys": keys.data_ptr(), "values": values.data_ptr()}
        self._segment = Segment()
        self._row_struct, self._drafts_struct = (
            SlotsStruct(stride=values.shape[2], each_layer=each, **memory) for _ in range(2)
        )
        self._row_struct.segments, self._row_struct.segment = 1, ctypes.addressof(self._segment)
        self.slots_struct = self._row_struct
        self._resources: Any = ()  # keeps alive what `slots_struct` points to
        self._copies: Int8Copies | None = None
        self._unmarked: list[tuple[int, int, Sequence[int]]] = []  # what the pass marks as valid in the copies

    def mark_copies(self) -> None:
        """Note that the pass was run: the copies that it read are valid."""
        for rounded in self._unmarked:
            assert self._copies is not None
            self._copies.mark_valid(*rounded)
        self._unmarked.clear()

    def _checked(self, indices: int | Tensor, n: int, end: int) -> tuple[Tensor, int]:
        """Return positions or slots as int64, and the largest. Raises `RuntimeError` for any not in 0 to `end` - 1."""
        first, last = (
            (indices, indices + n - 1) if isinstance(indices, int) else (int(indices.min()), int(indices.max()))
        )
        if first < 0 or last >= end:
            raise _beyond(first if first < 0 else last, end)
        return (self._numbers[indices : indices + n] if isinstance(indices, int) else indices.long().contiguous()), last

    def _round(self, segment: Segment, row: int, first: int, int8_layers: Sequence[int] | None) -> None:
        """Set whether attention reads int8 copies, and which slots are rounded: `first` is the first one written."""
        place = self.slots_struct
        copies = self._cache.copies if int8_layers is not None and isinstance(self._cache, Cache) else None
        place.rounded = copies is not None
        if copies is None or int8_layers is None:
            return
        if copies is not self._copies:
            self._copies = copies
            for struct in (self._row_struct, self._drafts_struct):
                struct.rounded_keys, struct.rounded_values = copies.keys.data_ptr(), copies.values.data_ptr()
                struct.key_scales, struct.value_scales = (scales.data_ptr() for scales in copies.scales)
                struct.each_rounded, struct.rounded_blocks = copies.keys[0].numel(), copies.table.shape[1]
        segment.rounded = copies.first_invalid(row, first, int8_layers)
        self._unmarked.append((row, first, int8_layers))
        segment.rounded_blocks = copies.table[row].data_ptr()

    def for_row(
        self,
        n: int,
        positions: int | Tensor,
        slots: int | Tensor,
        masks: Sequence[Tensor] | None,
        row: int,
        *,
        int8_layers: Sequence[int] | None = None,
    ) -> NativeBatch:
        """Set up a pass over `n` tokens of one cache row.

        `masks` are additive, `[1, 1, n, S]`, one for each attention spec, and hide what is outside its window.
        `int8_layers`: the layers whose attention reads the cache's int8 copies, if it has any (None: none does). Other
        arguments as in `Runtime.forward`. Raises `RuntimeError` for positions or slots out of range.
        """
        self._unmarked.clear()  # of a pass that did not run
        self.slots_struct, segment = self._row_struct, self._segment
        place = self.slots_struct
        segment.blocks, end = self._cache.blocks_of(row)
        position_ids, _ = self._checked(positions, n, self._positions)
        to, last = self._checked(slots, n, end)
        masks = None if masks is None else [mask[..., :end].float().contiguous() for mask in masks]
        pointers = array("q", () if masks is None else [mask.data_ptr() for mask in masks])
        self._resources = (position_ids, to, masks, pointers)
        segment.n = place.n = n
        self._round(segment, row, slots if isinstance(slots, int) else int(slots.min()), int8_layers)
        segment.kv_len = place.kv_len = last + 1 if masks is None else masks[0].shape[-1]
        segment.masks = None if masks is None else pointers.buffer_info()[0]
        place.positions, place.slots = position_ids.data_ptr(), to.data_ptr()
        return self

    def for_drafts(self, placed: Sequence[PlacedDraft], *, int8_layers: Sequence[int] | None = None) -> NativeBatch:
        """Set up a pass over drafts, each with its root first; `int8_layers` is as in `for_row`.

        Raises `RuntimeError` for positions or slots out of range.
        """
        self._unmarked.clear()
        positions, slots, masks = array("q"), array("q"), list[Any]()
        self.slots_struct, segments = self._drafts_struct, (Segment * len(placed))()
        place, last = self.slots_struct, self._positions
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
                own = self._tree_masks(draft)
                pointers = array("q", [mask.data_ptr() for mask in own])
                masks += (own, pointers)
                segment.first, segment.masks = start + 1, pointers.buffer_info()[0]
            if start < 0 or segment.kv_len > end or deepest >= last:
                raise _beyond(start if start < 0 else segment.kv_len - 1, min(end, last))
            self._round(segment, row, start, int8_layers)
            place.kv_len = max(place.kv_len, segment.kv_len)
        self._resources = (positions, slots, masks, segments)
        place.n, place.segments, place.segment = len(slots), len(placed), ctypes.addressof(segments)
        place.positions, place.slots = positions.buffer_info()[0], slots.buffer_info()[0]
        return self

    def _tree_masks(self, draft: Draft) -> list[Tensor]:
        """Return the additive masks `[1 + m, m]` of a tree, for each attention spec."""
        visible, depths = tree_mask(draft), torch.tensor([0, *draft.depths])
        whole = torch.zeros(visible.shape, dtype=torch.float32).masked_fill_(~visible, -torch.inf)

        def within(window: int | None) -> Tensor:
            if window is None or draft.depth < window:
                return whole
            return whole.masked_fill(depths[1:] <= depths.unsqueeze(1) - window, -torch.inf)

        return [within(window) for window in self._windows]


def _beyond(place: int, end: int) -> RuntimeError:
    return RuntimeError(f"position or slot {place}: expected 0 to {end - 1}")


def native_pass(
    sizes: Sizes,
    scaling: float,
    blocks: Sequence[tuple[int, torch.device, Attention | None, Mlp | None]],
    norm: NormData | None,
) -> NativePass | None:
    """Return a path's layers as one native pass; None if native code cannot compute all of them.

    `blocks`: for each layer its number, device, attention and MLP, either of which is None if skipped; a trained bridge
    takes the MLP's place. `norm`: the norm after the last layer. `scaling`: the factor on queries after RoPE.

    Native code computes float32 and bfloat16 models on the CPU whose sub-layers all describe themselves for it
    (`Attention.native`, `GatedMlp.native`), if each product with a weight is a `NativeProduct`. The hidden size, the
    head dimension, the MLPs' intermediate size and a bridge's rank have to be multiples of 16.
    """
    plain = all(size % _LONGEST_VECTOR == 0 for size in (sizes.hidden, sizes.head_dim, sizes.intermediate))
    if sizes.dtype not in KINDS or not plain or norm is None:
        return None
    layers: list[LayerStruct] = []
    resources: list[Any] = []
    for _, device, attention, mlp in blocks:
        layer = LayerStruct()
        if device.type != "cpu" or not (
            _describe_attention(layer, attention, resources) and _describe_mlp(layer, mlp, resources)
        ):
            return None
        layers.append(layer)
    return NativePass(sizes, scaling, layers, norm, resources) if resources or available() else None


def _describe_attention(layer: LayerStruct, attention: Attention | None, resources: list[Any]) -> bool:
    """Set a layer's attention (None: skipped), and append what it points to; return False if it is not native."""
    if attention is None:
        return True
    native = attention.native
    if native is None or native.q_norm is None or native.k_norm is None:
        return False
    layer.queries, layer.keys = NormStruct.of(native.q_norm), NormStruct.of(native.k_norm)
    layer.spec, layer.apart, layer.cap = attention.attention_spec, native.by_head, native.cap
    resources += (native.q_norm, native.k_norm)
    return _describe(layer.attention, native, resources)


def _describe_mlp(layer: LayerStruct, mlp: Mlp | None, resources: list[Any]) -> bool:
    """Set a layer's MLP or bridge (None: skipped), and append what it points to; return False if it is not native."""
    if mlp is None:
        return True
    if isinstance(mlp, BridgeModule):
        fits = isinstance(mlp.onto, NativeProduct) and mlp.onto.into % _LONGEST_VECTOR == 0
        return fits and _set_products(layer.mlp, mlp.into, mlp.onto, resources)
    native = getattr(mlp, "native", None)
    if native is None or native.activation is None:
        return False
    layer.activation, layer.gated, layer.parallel = ACTIVATIONS[native.activation], native.gated, native.parallel
    return _describe(layer.mlp, native, resources)


def _describe(struct: SubLayerStruct, native: NativeSubLayer, resources: list[Any]) -> bool:
    into, onto = (fused_product(modules) for modules in (native.into, [native.onto]))
    if native.before is None or native.after is None or into is None or onto is None:
        return False
    struct.before, struct.after = NormStruct.of(native.before), NormStruct.of(native.after)
    resources += (native.before, native.after)
    return _set_products(struct, into.product, onto.product, resources, native.factor)


def _set_products(struct: SubLayerStruct, into: Any, onto: Any, resources: list[Any], factor: float = 1.0) -> bool:
    if not isinstance(into, NativeProduct | None) or not isinstance(onto, NativeProduct):
        return False
    struct.into, struct.onto, struct.factor = None if into is None else into.address, onto.address, factor
    resources += (into, onto)
    return True
