"""A view of the runtime's cache through the `transformers` cache interface, for one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache as TheirCache
from transformers.cache_utils import DynamicLayer

from selfspec.runtime.cache import Cache


@dataclass(frozen=True, slots=True)
class ViewedPass:
    """A pass of n tokens that writes at `slots` and reads the first `kv_len` slots of cache rows `rows`."""

    cache: Cache
    slots: int | Tensor
    n: int
    kv_len: int
    rows: slice


class HFCacheView(TheirCache):  # type: ignore[misc]
    """A `transformers` cache of all layers, backed by the runtime's cache, for one pass."""

    def __init__(self, of: ViewedPass, layers: int) -> None:
        super().__init__(layers=[_Layer(of, index) for index in range(layers)])


class _Layer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values `[B, H_kv, slots, d]`."""

    def __init__(self, of: ViewedPass, index: int) -> None:
        super().__init__()
        self._of, self._index = of, index
        self.is_initialized = True
        self.keys, self.values = of.cache.keys[index], of.cache.values[index]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write a pass's keys and values; return all visible keys and values `[B, H_kv, kv_len, d]`."""
        of = self._of
        if isinstance(of.slots, int):
            end = of.slots + of.n
            self.keys[of.rows][:, :, of.slots : end] = key_states
            self.values[of.rows][:, :, of.slots : end] = value_states
        else:
            of.cache.scatter(self._index, key_states.transpose(1, 2), value_states.transpose(1, 2), of.slots, of.rows)
        return self.keys[of.rows][:, :, : of.kv_len], self.values[of.rows][:, :, : of.kv_len]

    def get_seq_length(self, *_: Any) -> int:
        """Return the number of slots before those of the pass."""
        return self._of.kv_len - self._of.n

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        """Return the KV length and the offset of its first slot, which is 0 as none is dropped."""
        return self._of.kv_len, 0
