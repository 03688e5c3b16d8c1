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
    """A `transformers` cache that reads and writes the runtime's KV cache, for one pass."""

    def __init__(self, viewed_pass: ViewedPass, layers: int) -> None:
        super().__init__(layers=[_Layer(viewed_pass, index) for index in range(layers)])


class _Layer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values `[rows, H_kv, slots, d]`."""

    def __init__(self, viewed_pass: ViewedPass, index: int) -> None:
        super().__init__()
        self._viewed_pass, self._index = viewed_pass, index
        self.is_initialized = True
        self.keys, self.values = viewed_pass.cache.keys[index], viewed_pass.cache.values[index]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write a pass's keys and values; return all visible keys and values `[B, H_kv, kv_len, d]`."""
        viewed_pass = self._viewed_pass
        if isinstance(viewed_pass.slots, int):
            end = viewed_pass.slots + viewed_pass.n
            self.keys[viewed_pass.rows][:, :, viewed_pass.slots : end] = key_states
            self.values[viewed_pass.rows][:, :, viewed_pass.slots : end] = value_states
        else:
            viewed_pass.cache.scatter(
                self._index,
                key_states.transpose(1, 2),
                value_states.transpose(1, 2),
                viewed_pass.slots,
                viewed_pass.rows,
            )
        return self.keys[viewed_pass.rows][:, :, : viewed_pass.kv_len], self.values[viewed_pass.rows][
            :, :, : viewed_pass.kv_len
        ]

    def get_seq_length(self, *_: Any) -> int:
        """Return the KV length before this pass: the number of visible slots that the pass does not write."""
        return self._viewed_pass.kv_len - self._viewed_pass.n

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        """Return the KV length and the offset of its first slot, which is 0 as no slot is dropped."""
        return self._viewed_pass.kv_len, 0
