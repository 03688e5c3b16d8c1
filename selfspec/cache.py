"""The static key-value cache: allocated once, one length for each row, one place that rewinds and commits.

A slot is a place for one token's keys and values at every layer. Knows nothing of models, prompts and drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Cache:
    """Keys and values `[B, H_kv, slots, d]` for each layer, with a spare last slot that no mask shows.

    `length[row]` is the number of committed slots of a row: its keys below that are the whole model's own.
    """

    def __init__(
        self,
        *,
        rows: int,
        kv_heads: int,
        slots: int,
        head_dim: int,
        dtype: torch.dtype,
        devices: Sequence[torch.device],
    ) -> None:
        shape = (rows, kv_heads, slots + 1, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for device in devices]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for device in devices]
        self.rows = rows
        self.slots = slots
        self.length = [0] * rows

    @property
    def spare(self) -> int:
        """The slot for padding's keys."""
        return self.slots

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def clear(self, row: int) -> None:
        """Forget a row."""
        self.length[row] = 0

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep the root of a verified draft and the nodes on `path`, in order; forget the rest.

        A full pass wrote the root at slot `length` and node i at `length + 1 + i`. The path's slots are moved to
        `length + 1` on, then `length` grows by `1 + len(path)`.
        """
        start = self.length[row] + 1
        if any(node != place for place, node in enumerate(path)):
            source = torch.tensor([start + node for node in path])
            for keys, values in zip(self.keys, self.values, strict=True):
                self._move(keys[row], source, start)
                self._move(values[row], source, start)
        self.length[row] = start + len(path)

    @staticmethod
    def _move(kept: Tensor, source: Tensor, start: int) -> None:  # kept: [H_kv, slots, d]
        kept.narrow(1, start, len(source)).copy_(kept.index_select(1, source.to(kept.device)))
