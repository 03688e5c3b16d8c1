"""A view of the runtime's cache through the `transformers` cache interface, for one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache as TheirCache
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from selfspec.runtime.cache import Cache

_UNUSED = getattr(cache_utils, "DummyLayer", None)  # `transformers` 5.17 has none: nothing fills such a layer there


def is_unused(layer: Any) -> bool:
    """Return whether a layer is known to keep nothing."""
    return _UNUSED is not None and isinstance(layer, _UNUSED)


def unused_layer() -> Any:
    """Return a layer that keeps nothing."""
    return LinearAttentionLayer() if _UNUSED is None else _UNUSED()


@dataclass(frozen=True, slots=True)
class ViewedPass:
    """A pass of n tokens that writes at `slots` and reads the first `kv_len` slots of cache rows `rows`."""

    cache: Cache
    slots: int | Tensor
    n: int
    kv_len: int
    rows: slice

    def write(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a pass's keys and values `[B, H, n, d]` of layer `index`; return all visible ones `[B, H, kv_len, d]`.

        Keys and values may have different d.
        """
        if isinstance(self.slots, int):
            end = self.slots + self.n
            self.cache.keys[index][self.rows][:, :, self.slots : end] = keys
            self.cache.values[index][self.rows][:, :, self.slots : end] = values
        else:
            self.cache.scatter(index, keys.transpose(1, 2), values.transpose(1, 2), self.slots, self.rows)
        return (
            self.cache.keys[index][self.rows][:, :, : self.kv_len],
            self.cache.values[index][self.rows][:, :, : self.kv_len],
        )


class HFCacheView(TheirCache):  # type: ignore[misc]
    """A `transformers` cache whose layers read and write the runtime's KV cache, for one pass.

    `indices`: where the keys and values of each layer are in the runtime's cache; None for a layer that has none.
    `indexer_indices`: where the keys of each layer's indexer are; None for a layer without an indexer.
    `states`: the recurrent state of each layer, or its whole cache layer if it has no keys and values in the runtime's
    cache; None for a layer without state. The pass changes the states.
    """

    def __init__(
        self,
        viewed_pass: ViewedPass,
        indices: Sequence[int | None],
        indexer_indices: Sequence[int | None],
        states: Sequence[Any],
    ) -> None:
        layers = zip(indices, indexer_indices, states, strict=True)
        super().__init__(layers=[_layer(viewed_pass, *layer) for layer in layers])


def _layer(viewed_pass: ViewedPass, index: int | None, indexer_index: int | None, state: Any) -> Any:
    if index is None:
        return unused_layer() if state is None else state
    if indexer_index is not None:
        return _IndexedLayer(viewed_pass, index, indexer_index)
    return _Layer(viewed_pass, index) if state is None else _HybridLayer(viewed_pass, index, state)


class _Layer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values `[rows, H_kv, slots, d]`."""

    def __init__(self, viewed_pass: ViewedPass, index: int) -> None:
        super().__init__()
        self._viewed_pass, self._index = viewed_pass, index
        self.is_initialized = True
        self.keys, self.values = viewed_pass.cache.keys[index], viewed_pass.cache.values[index]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write a pass's keys and values; return all visible keys and values `[B, H_kv, kv_len, d]`."""
        return self._viewed_pass.write(self._index, key_states, value_states)

    def get_seq_length(self, *_: Any) -> int:
        """Return the KV length before this pass: the number of visible slots that the pass does not write."""
        return self._viewed_pass.kv_len - self._viewed_pass.n

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        """Return the KV length and the offset of its first slot, which is 0 as no slot is dropped."""
        return self._viewed_pass.kv_len, 0


class _IndexedLayer(_Layer, DynamicIndexedLayer):  # type: ignore[misc]
    """A layer of sparse attention, whose indexer has keys of its own: `[rows, 1, slots, d]` in the runtime's cache."""

    def __init__(self, viewed_pass: ViewedPass, index: int, indexer_index: int) -> None:
        super().__init__(viewed_pass, index)
        self._indexer_index, self.is_indexer_initialized = indexer_index, True

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write a pass's indexer keys `[B, n, d]`; return all visible ones `[B, kv_len, d]`."""
        keys = indexer_key_states.unsqueeze(1)
        return self._viewed_pass.write(self._indexer_index, keys, keys[..., :0])[0].squeeze(1)


class _HybridLayer(_Layer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A layer with keys and values in the runtime's cache, and a recurrent state beside them."""

    def __init__(self, viewed_pass: ViewedPass, index: int, state: Any) -> None:
        super().__init__(viewed_pass, index)
        self.__dict__.update(vars(state))  # the state's dicts themselves, which the pass then changes
