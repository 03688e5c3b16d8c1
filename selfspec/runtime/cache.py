"""The static KV cache: allocated once, with one length for each row, and one place that rewinds and commits.

A cache slot stores one token's keys and values of every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from selfspec.runtime.cache_rows import CacheRows

ALL_ROWS = slice(None)
Move = tuple[int, int, int, Sequence[int]]
"""`(dst_row, src_row, dst_start, src_slots)`: copy these source slots to consecutive slots from `dst_start` on."""
_SPARE = 16  # slots after the last one for tokens, as kernels read whole vectors


class Cache(CacheRows):
    """Keys and values `[B, H_kv, slots, d]` for each layer, followed by spare slots that every mask hides.

    With `turned`, the keys of a head are stored transposed, `[d, slots]`: a CPU multiplies one query with all keys
    fastest in this layout.

    With `placed`, `positions` `[B, slots]` holds each slot's sequence position; a committed slot's is its own number.
    """

    def __init__(
        self,
        *,
        rows: int,
        kv_heads: int,
        group: int,
        slots: int,
        head_dim: int,
        dtype: torch.dtype,
        devices: Sequence[torch.device],
        keys_transposed: bool = False,
        track_positions: bool = False,
    ) -> None:
        super().__init__(rows, slots)
        # One tensor [L, B, H_kv, slots, d] for each run of layers on one device: one call makes views of all layers.
        runs = [(len(list(layers)), device) for device, layers in groupby(devices)]

        def zeros(layers: int, device: torch.device, *shape: int) -> Tensor:
            return torch.zeros((layers, rows, kv_heads, *shape), dtype=dtype, device=device)

        def keys(layers: int, device: torch.device) -> Tensor:
            if keys_transposed:
                return zeros(layers, device, head_dim, slots + _SPARE).transpose(-1, -2)
            return zeros(layers, device, slots + _SPARE, head_dim)

        self._buffers = [(keys(*run), zeros(*run, slots + _SPARE, head_dim)) for run in runs]
        # Rows and KV heads are folded into one dimension; each KV head is expanded to `group` query heads, not copied.
        folded = [(keys.flatten(1, 2), values.flatten(1, 2)) for keys, values in self._buffers]
        self._folded = [(keys.transpose(-1, -2), values) for keys, values in folded]
        self._repeated = [(_repeat(keys, group), _repeat(values, group)) for keys, values in folded]
        self._heads = kv_heads
        self.keys = [layer for keys, _ in self._buffers for layer in keys]
        self.values = [layer for _, values in self._buffers for layer in values]
        self._table = torch.arange(rows)
        slot_numbers = torch.arange(slots + _SPARE, device=devices[0])
        self.positions = slot_numbers.repeat(rows, 1) if track_positions else None
        self.on_move: Callable[[Move], None] | None = None  # callback before each move within the cache

    @property
    def spare(self) -> int:
        """The slot that padding tokens write to."""
        return self.slots

    def blocks_of(self, row: int) -> tuple[int, int]:
        """Return the address of the row's block table, which has one entry, and the row's number of slots."""
        return self._table.data_ptr() + 8 * row, self.slots + _SPARE

    @property
    def bytes(self) -> int:
        """Size of the keys and values in bytes."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def kv_views(self, slots: int, rows: slice = ALL_ROWS, first: int = 0) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of keys `[B * H_kv, d, S]` and values `[B * H_kv, S, d]` for each layer.

        The S = `slots` - `first` slots are those from `first` up to, not including, `slots`.
        """
        return self._views(self._folded, (-1, -2), first, slots - first, self._span(rows, self._heads))

    def repeated_views(self, slots: int, rows: slice = ALL_ROWS, first: int = 0) -> tuple[list[Tensor], list[Tensor]]:
        """Return the same keys and values expanded to every query head, `[B * H_kv, group, S, d]` for each layer."""
        return self._views(self._repeated, (-2, -2), first, slots - first, self._span(rows, self._heads))

    def writable_views(self, start: int, n: int, rows: slice = ALL_ROWS) -> tuple[list[Tensor], list[Tensor]]:
        """Return writable views of `n` consecutive slots of keys and values, `[B, H_kv, n, d]` for each layer."""
        return self._views(self._buffers, (-2, -2), start, n, self._span(rows, 1))

    @staticmethod
    def _views(
        buffers: Sequence[tuple[Tensor, Tensor]],
        dims: tuple[int, int],
        start: int,
        n: int,
        span: tuple[int, int] | None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        keys_and_values: tuple[list[Tensor], list[Tensor]] = ([], [])
        for pair in buffers:
            for views, t, dim in zip(keys_and_values, pair, dims, strict=True):
                part = t.narrow(dim, start, n)
                views += (part if span is None else part.narrow(1, *span)).unbind(0)
        return keys_and_values

    def _span(self, rows: slice, each: int) -> tuple[int, int] | None:
        """Return start and length of `rows` in a dimension with `each` entries a row; None stands for all rows."""
        if rows == ALL_ROWS:
            return None
        first, last, _ = rows.indices(self.rows)
        return first * each, (last - first) * each

    def scatter(self, index: int, k: Tensor, v: Tensor, slots: Tensor, rows: slice) -> None:
        """Write keys and values `[B, n, H_kv, d]` of layer `index` at `slots` `[B, n]`."""
        row = torch.arange(len(slots), device=slots.device).unsqueeze(1)
        self.keys[index][rows][row, :, slots] = k
        self.values[index][rows][row, :, slots] = v

    def set_positions(self, positions: int | Tensor, slots: int | Tensor, n: int, rows: slice) -> None:
        """Record the sequence positions of the tokens in `n` slots; arguments as in `Runtime.forward`."""
        assert self.positions is not None
        if isinstance(positions, int):
            positions = torch.arange(positions, positions + n, device=self.positions.device)[None]
        row_positions = self.positions[rows]
        if isinstance(slots, int):
            row_positions[:, slots : slots + n] = positions
        else:
            row_positions.scatter_(1, slots, positions.expand_as(slots))

    def window_mask(self, window: int, positions: int | Tensor, n: int, kv_len: int, rows: slice) -> Tensor:
        """Return a mask `[B, n, seen]`: true for slots whose position is less than `window` before `positions`."""
        assert self.positions is not None
        if isinstance(positions, int):
            positions = torch.arange(positions, positions + n, device=self.positions.device)[None]
        return self.positions[rows, None, :kv_len] > positions.unsqueeze(-1) - window

    def copy_from(self, other: Cache) -> None:
        """Copy the committed slots, lengths and tokens of a smaller cache of the same model and number of rows."""
        longest = max(other.length)
        for mine, theirs in zip(self._buffers, other._buffers, strict=True):
            for t, old in zip(mine, theirs, strict=True):
                t.narrow(3, 0, longest).copy_(old.narrow(3, 0, longest))
        self.length, self.tokens = list(other.length), list(other.tokens)

    def copy(self, source: int, row: int, start: int, end: int) -> None:
        """Copy the slots from `start` to `end` of row `source` to `row`, whose length does not change."""
        self.move((row, source, start, range(start, end)))

    def move(self, move: Move) -> None:
        """Copy keys and values of all layers as `move` describes, after calling the `told` callback."""
        if self.on_move is not None:
            self.on_move(move)
        row, source, start, slots = move
        slot_index = torch.tensor(slots)
        for t in (t for pair in self._buffers for t in pair):  # all layers of a device at once
            t[:, row].narrow(2, start, len(slots)).copy_(t[:, source].index_select(2, slot_index.to(t.device)))

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Commit the root of a verified draft and the accepted nodes on `path`, in order; discard the rest.

        A verification pass wrote the root at slot `length` and node i at `length + 1 + i`. The path's slots are moved
        to the slots from `length + 1` on, then `length` grows by `1 + len(path)`.
        """
        start = self.length[row] + 1
        if any(node != place for place, node in enumerate(path)):
            self.move((row, row, start, [start + node for node in path]))
        self.length[row] = end = start + len(path)
        if self.positions is not None:
            self.positions[row, start:end] = torch.arange(start, end, device=self.positions.device)


def _repeat(t: Tensor, group: int) -> Tensor:  # [L, B * H_kv, slots, d]
    return t.unsqueeze(2).expand(-1, -1, group, -1, -1)
