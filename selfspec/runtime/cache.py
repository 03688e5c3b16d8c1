"""The static KV cache: tensors of fixed size for all sequences, with a committed length for each sequence.

A cache row holds one sequence. A cache slot stores one token's keys and values of every layer. Drafts may read int8
copies of keys and values, as in QuantSpec (arXiv 2502.10424).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

ALL_ROWS = slice(None)
Move = tuple[int, int, int, Sequence[int]]
"""`(dst_row, src_row, dst_start, src_slots)`: copy these source slots to consecutive slots from `dst_start` on."""
_SPARE = 16  # extra slots of each row: padding is written there, and kernels that read whole vectors may overrun


class CacheRows:
    """The rows of a KV cache, one for each sequence, each of at most `slots` slots.

    `length[row]` is the number of committed slots of a row, whose keys and values the full target model computed.
    `tokens[row]` are the row's tokens if the caller has set them, else empty. Tokens from index `length[row]` on have
    no keys and values yet. `positions` `[rows, slots]`, unless None, holds the sequence position of the token in each
    slot, for sliding windows. The position of a committed slot equals its slot number.
    """

    positions: Tensor | None = None

    def __init__(self, rows: int, slots: int) -> None:
        self.rows = rows
        self.slots = slots
        self.length = [0] * rows
        self.tokens: list[Sequence[int]] = [()] * rows

    def clear(self, row: int) -> None:
        """Set a row's length to zero and drop its tokens."""
        self.length[row], self.tokens[row] = 0, ()

    def known(self, row: int) -> Sequence[int]:
        """Return the tokens of a row's committed slots, as far as the caller has set them in `tokens`."""
        return self.tokens[row][: self.length[row]]

    def shared(self, row: int, tokens: Sequence[int]) -> int:
        """Return the length of the longest common prefix of `tokens` and the row's known committed tokens."""
        known = self.known(row)
        pairs = enumerate(zip(known, tokens, strict=False))
        return next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(known), len(tokens)))

    @property
    def copy_bytes(self) -> int:
        """Size of the int8 copies of keys and values in bytes: 0 if the cache has none."""
        return 0

    def written(self, rows: slice, slots: int | Tensor) -> None:
        """Note that keys and values of these rows are about to be written, from the first of `slots` on."""

    def set_positions(self, positions: int | Tensor, slots: int | Tensor, n: int, rows: slice) -> None:
        """Record the sequence positions of the tokens in n slots; the arguments are those of `Runtime.forward`."""
        assert self.positions is not None
        if isinstance(positions, int):
            positions = torch.arange(positions, positions + n, device=self.positions.device)[None]
        row_positions = self.positions[rows]
        if isinstance(slots, int):
            row_positions[:, slots : slots + n] = positions
        else:
            row_positions.scatter_(1, slots, positions.expand_as(slots))

    def window_mask(self, window: int, positions: int | Tensor, n: int, kv_len: int, rows: slice) -> Tensor:
        """Return the sliding-window mask `[B, n, kv_len]` of n tokens at `positions` over the first `kv_len` slots.

        It is true where the position of a slot is greater than the position of the token minus `window`.
        """
        assert self.positions is not None
        if isinstance(positions, int):
            positions = torch.arange(positions, positions + n, device=self.positions.device)[None]
        return self.positions[rows, None, :kv_len] > positions.unsqueeze(-1) - window

    def _settle_positions(self, row: int, start: int, end: int) -> None:
        """Set the positions of committed slots, from `start` up to, not including, `end`."""
        if self.positions is not None and start < end:
            self.positions[row, start:end] = torch.arange(start, end, device=self.positions.device)

    def rewind(self, row: int, length: int) -> None:
        """Set a row's length: a smaller one discards slots, a larger one commits slots whose keys were copied."""
        self._settle_positions(row, self.length[row], length)
        self.length[row] = length


class Int8Copies:
    """Int8 copies of a cache's values `[L, rows, H_kv, slots, d]`, and of its keys, in blocks of `BLOCK` slots.

    Keys are `[L, rows, H_kv, blocks, d, BLOCK]` and values `[L, rows, H_kv, blocks, BLOCK, d]`: drafts read a head's in
    the order of memory. `table` `[rows, blocks]` holds the numbers of the blocks of each row's first head. A slot's
    keys of a head, and its values, are rounded by their largest one: `scales` `[2, L, rows, H_kv, blocks, BLOCK]` are
    those of keys and of values. Native passes round slots before they read them, in layers whose attention they run.
    `valid[row][layer]`: the number of a row's first slots whose copies are those of the present keys and values.
    """

    BLOCK: ClassVar[int] = 64  # as in `attention.h`

    def __init__(self, values: Tensor) -> None:
        layers, rows, heads, slots, d = values.shape
        blocks = -(-slots // self.BLOCK)
        self.table = torch.arange(rows * heads * blocks).view(rows, -1)[:, :blocks]
        self.keys = torch.empty(layers, rows, heads, blocks, d, self.BLOCK, dtype=torch.int8)
        self.values = torch.empty(layers, rows, heads, blocks, self.BLOCK, d, dtype=torch.int8)
        self.scales = torch.empty(2, *self.values.shape[:-1], dtype=torch.float32)
        self.valid = [[0] * layers for _ in range(rows)]

    def first_invalid(self, row: int, start: int, layers: Sequence[int]) -> int:
        """Return the first slot that a pass over slots from `start` on must round, in `layers`."""
        valid = self.valid[row]
        return min((start, *(valid[layer] for layer in layers)))

    def mark_valid(self, row: int, start: int, layers: Sequence[int]) -> None:
        """Note that a pass over slots from `start` on, which were marked, has rounded all before them, in `layers`."""
        for layer in layers:
            self.valid[row][layer] = start

    def mark_written(self, row: int, start: int) -> None:
        """Note that keys and values from slot `start` on are written."""
        self.valid[row] = [min(count, start) for count in self.valid[row]]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.keys.nbytes + self.values.nbytes + self.scales.nbytes

    @classmethod
    def size(cls, values: Tensor) -> int:
        """Return the bytes that the copies of a cache with these values take."""
        layers, rows, heads, slots, d = values.shape
        return -(-slots // cls.BLOCK) * cls.BLOCK * layers * rows * slot_copy_bytes(heads, d)


def slot_copy_bytes(kv_heads: int, head_dim: int) -> int:
    """Return the bytes of the int8 copies of one slot's keys and values in one layer, with their float32 scales."""
    return kv_heads * (2 * head_dim + 8)


class KVShape(NamedTuple):
    """The number of KV heads of a layer, and the sizes of a head's keys and values."""

    heads: int
    key_dim: int
    value_dim: int


class Cache(CacheRows):
    """Keys and values `[rows, H_kv, slots, d]` of each layer; each row has extra slots that every mask hides.

    `group`: query heads per KV head. `devices`: the device of each layer. `shapes`: the shape of each layer's keys and
    values, if layers differ; `kv_views` and `repeated_views` are then for all rows only.

    With `keys_transposed`, the keys of a head are stored transposed, `[d, slots]`: a CPU multiplies one query with all
    keys fastest in this layout.

    `track_positions`: whether to keep `positions`, see `CacheRows`. `positions_device`: the device of `positions` and
    of a pass's tokens (None: the first layer's). `max_copy_bytes`: the most memory of int8 copies; where they take more
    there are none.
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
        positions_device: torch.device | None = None,
        shapes: Sequence[KVShape] | None = None,
    ) -> None:
        super().__init__(rows, slots)
        shapes = [KVShape(kv_heads, head_dim, head_dim)] * len(devices) if shapes is None else shapes
        # One tensor [L, B, H_kv, slots, d] for each run of equal layers on one device: one call makes all their views.
        runs = [
            (len(list(layers)), device, shape) for (device, shape), layers in groupby(zip(devices, shapes, strict=True))
        ]

        def zeros(layers: int, device: torch.device, heads: int, *shape: int) -> Tensor:
            return torch.zeros((layers, rows, heads, *shape), dtype=dtype, device=device)

        def keys(layers: int, device: torch.device, shape: KVShape) -> Tensor:
            if keys_transposed:
                return zeros(layers, device, shape.heads, shape.key_dim, slots + _SPARE).transpose(-1, -2)
            return zeros(layers, device, shape.heads, slots + _SPARE, shape.key_dim)

        def values(layers: int, device: torch.device, shape: KVShape) -> Tensor:
            return zeros(layers, device, shape.heads, slots + _SPARE, shape.value_dim)

        self._buffers = [(keys(*run), values(*run)) for run in runs]
        # Rows and KV heads are folded into one dimension; each KV head is expanded to `group` query heads, not copied.
        folded = [(k.flatten(1, 2), v.flatten(1, 2)) for k, v in self._buffers]
        self._folded = [(k.transpose(-1, -2), v) for k, v in folded]
        self._repeated = [(_repeat(k, group), _repeat(v, group)) for k, v in folded]
        self._heads = kv_heads
        self.keys = [layer for k, _ in self._buffers for layer in k]
        self.values = [layer for _, v in self._buffers for layer in v]
        self._table = torch.arange(rows)
        slot_numbers = torch.arange(slots + _SPARE, device=positions_device or (devices[0] if devices else None))
        self.positions = slot_numbers.repeat(rows, 1) if track_positions else None
        self.on_move: Callable[[Move], None] | None = None  # callback before each move within the cache
        self.max_copy_bytes = math.inf
        self._copies: Int8Copies | None = None

    @property
    def spare(self) -> int:
        """The number of the extra slot that padding tokens are written to."""
        return self.slots

    def blocks_of(self, row: int) -> tuple[int, int]:
        """Return the address of the row's block table, and the row's number of slots, extra slots included.

        In a static cache each row is one block, so that its int64 block table has one entry: the row's number.
        """
        return self._table.data_ptr() + 8 * row, self.slots + _SPARE

    @property
    def bytes(self) -> int:
        """Size of the keys and values in bytes, without that of int8 copies."""
        return sum(int(t.nbytes) for t in (*self.keys, *self.values))

    @property
    def copy_bytes(self) -> int:
        """Size of the int8 copies that have been made, in bytes."""
        return 0 if self._copies is None else self._copies.bytes

    @property
    def copies(self) -> Int8Copies | None:
        """The int8 copies, made at the first use; None if they take more than `max_copy_bytes`.

        Only for transposed keys on the CPU.
        """
        values = self._buffers[0][1]
        if self._copies is None and Int8Copies.size(values) <= self.max_copy_bytes:
            self._copies = Int8Copies(values)
        return self._copies

    def written(self, rows: slice, slots: int | Tensor) -> None:
        """Note that keys and values of these rows are about to be written, from the first of `slots` on."""
        if self._copies is not None:
            first = max(slots if isinstance(slots, int) else int(slots.min()), 0)
            for row in range(*rows.indices(self.rows)):
                self._copies.mark_written(row, first)

    def kv_views(self, slots: int, rows: slice = ALL_ROWS, first: int = 0) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of keys `[B * H_kv, d, S]` and values `[B * H_kv, S, d]` for each layer.

        The views cover the S slots from `first` up to, not including, `slots`, of the B cache rows in `rows`.
        """
        return self._views(self._folded, (-1, -2), first, slots - first, self._span(rows, self._heads))

    def repeated_views(self, slots: int, rows: slice = ALL_ROWS, first: int = 0) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of keys and values for each layer, expanded to every query head: `[B * H_kv, group, S, d]`.

        Slots and rows are selected as in `kv_views`.
        """
        return self._views(self._repeated, (-2, -2), first, slots - first, self._span(rows, self._heads))

    def writable_views(self, start: int, n: int, rows: slice = ALL_ROWS) -> tuple[list[Tensor], list[Tensor]]:
        """Return writable views of the keys and values `[B, H_kv, n, d]` in n slots from `start` on, for each layer."""
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
        """Return start and length of `rows` in a dimension with `each` entries per row; None if `rows` are all rows."""
        if rows == ALL_ROWS:
            return None
        first, last, _ = rows.indices(self.rows)
        return first * each, (last - first) * each

    def scatter(self, index: int, k: Tensor, v: Tensor, slots: Tensor, rows: slice) -> None:
        """Write keys and values `[B, n, H_kv, d]` of layer `index` to `slots` `[B, n]` of the B cache `rows`."""
        row = torch.arange(len(slots), device=slots.device).unsqueeze(1)
        self.keys[index][rows][row, :, slots] = k
        self.values[index][rows][row, :, slots] = v

    def copy_from(self, other: Cache) -> None:
        """Copy committed slots, lengths and tokens of `other`, a smaller cache of the same model with as many rows."""
        longest = max(other.length)
        for mine, theirs in zip(self._buffers, other._buffers, strict=True):
            for t, old in zip(mine, theirs, strict=True):
                t.narrow(3, 0, longest).copy_(old.narrow(3, 0, longest))
        self.length, self.tokens = list(other.length), list(other.tokens)

    def copy(self, source: int, row: int, start: int, end: int) -> None:
        """Copy the slots from `start` up to, not including, `end` of row `source` to `row`; no length changes."""
        self.move((row, source, start, range(start, end)))

    def move(self, move: Move) -> None:
        """Copy keys and values of all layers as `move` describes, after calling `on_move` if it is set."""
        if self.on_move is not None:
            self.on_move(move)
        row, source, start, slots = move
        self.written(slice(row, row + 1), start)
        slot_index = torch.tensor(slots)
        for t in (t for pair in self._buffers for t in pair):  # all layers of a device at once
            t[:, row].narrow(2, start, len(slots)).copy_(t[:, source].index_select(2, slot_index.to(t.device)))
        self._settle_positions(row, start, start + len(slots))

    def rearrange(self, rows: slice, to: Tensor, slots: Tensor) -> None:
        """Copy the keys and values of all layers in `slots` `[B, n]` of the B cache `rows` to slots `to` `[B, n]`.

        Can be captured in a graph. The positions of the tokens copied become the numbers of their slots.
        """
        first, end, _ = rows.indices(self.rows)
        for t in (t for pair in self._buffers for t in pair):
            part = t[:, first:end]  # [L, B, H_kv, slots, d]
            shape = (*part.shape[:3], slots.shape[1], part.shape[4])
            here, there = (of.view(1, len(of), 1, -1, 1).expand(shape) for of in (slots.contiguous(), to.contiguous()))
            part.scatter_(3, there, part.gather(3, here))
        if self.positions is not None:
            self.positions[rows].scatter_(1, to, to)

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Commit the root of a verified draft and the accepted nodes on `path`, in order; discard all other nodes.

        A verification pass wrote the root at slot `length` and node i at `length + 1 + i`. The path's slots are moved
        to the slots from `length + 1` on, then `length` grows by `1 + len(path)`.
        """
        start = self.length[row] + 1
        if any(node != place for place, node in enumerate(path)):
            self.move((row, row, start, [start + node for node in path]))
        self.length[row] = end = start + len(path)
        self._settle_positions(row, start, end)


def _repeat(t: Tensor, group: int) -> Tensor:  # [L, B * H_kv, slots, d]
    return t.unsqueeze(2).expand(-1, -1, group, -1, -1)
