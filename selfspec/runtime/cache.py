"""The static key-value cache: allocated once, one length for each row, one place that rewinds and commits.

A slot is a place for one token's keys and values at every layer. Knows nothing of models, prompts and drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from selfspec.runtime.cache_rows import CacheRows

ALL_ROWS = slice(None)
Move = tuple[int, int, int, Sequence[int]]
"""To a row, from a row: to the slots from one on, from these ones."""
_SPARE = 16  # slots beyond those for tokens: a vector is read whole


class Cache(CacheRows):
    """Keys and values `[B, H_kv, slots, d]` for each layer, with spare last slots that no mask shows.

    With `turned` a head's keys lie in memory as `[d, slots]`, the order in which a CPU's product of one query with all
    of them reads fastest.

    With `placed`, `positions` `[B, slots]` are those of the slots' tokens: committed ones stand at their slot's number.
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
        turned: bool = False,
        placed: bool = False,
    ) -> None:
        super().__init__(rows, slots)
        # One tensor [L, B, H_kv, slots, d] for each run of layers on one device: views of all are made in one call.
        runs = [(len(list(layers)), device) for device, layers in groupby(devices)]

        def zeros(layers: int, device: torch.device, *shape: int) -> Tensor:
            return torch.zeros((layers, rows, kv_heads, *shape), dtype=dtype, device=device)

        def keys(layers: int, device: torch.device) -> Tensor:
            if turned:
                return zeros(layers, device, head_dim, slots + _SPARE).transpose(-1, -2)
            return zeros(layers, device, slots + _SPARE, head_dim)

        self._whole = [(keys(*run), zeros(*run, slots + _SPARE, head_dim)) for run in runs]
        # Rows and key heads are folded; one key head serves `group` query heads, repeated without copying.
        folded = [(keys.flatten(1, 2), values.flatten(1, 2)) for keys, values in self._whole]
        self._folded = [(keys.transpose(-1, -2), values) for keys, values in folded]
        self._repeated = [(_repeat(keys, group), _repeat(values, group)) for keys, values in folded]
        self._heads = kv_heads
        self.keys = [layer for keys, _ in self._whole for layer in keys]
        self.values = [layer for _, values in self._whole for layer in values]
        self._table = torch.arange(rows)
        at = torch.arange(slots + _SPARE, device=devices[0])
        self.positions = at.repeat(rows, 1) if placed else None
        self.told: Callable[[Move], None] | None = None  # of each move of keys and values within the cache, before it

    @property
    def spare(self) -> int:
        """The slot for padding's keys."""
        return self.slots

    def blocks_of(self, row: int) -> tuple[int, int]:
        """The address of the numbers of a row's blocks in memory, of which there is one, and how many slots it has."""
        return self._table.data_ptr() + 8 * row, self.slots + _SPARE

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def seen(self, slots: int, rows: slice = ALL_ROWS, first: int = 0) -> tuple[list[Tensor], list[Tensor]]:
        """Keys `[B * H_kv, d, slots]` and values `[B * H_kv, slots, d]` of the slots up to `slots`, for each layer.

        Without those before `first`.
        """
        return self._views(self._folded, (-1, -2), first, slots - first, self._span(rows, self._heads))

    def repeated(self, slots: int, rows: slice = ALL_ROWS, first: int = 0) -> tuple[list[Tensor], list[Tensor]]:
        """The same keys and values for every query head, `[B * H_kv, group, slots, d]` by layer."""
        return self._views(self._repeated, (-2, -2), first, slots - first, self._span(rows, self._heads))

    def run(self, start: int, n: int, rows: slice = ALL_ROWS) -> tuple[list[Tensor], list[Tensor]]:
        """A run of `n` slots of keys and values to be written, `[B, H_kv, n, d]` for each layer."""
        return self._views(self._whole, (-2, -2), start, n, self._span(rows, 1))

    @staticmethod
    def _views(
        wholes: Sequence[tuple[Tensor, Tensor]],
        dims: tuple[int, int],
        start: int,
        n: int,
        span: tuple[int, int] | None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        found: tuple[list[Tensor], list[Tensor]] = ([], [])
        for pair in wholes:
            for views, t, dim in zip(found, pair, dims, strict=True):
                part = t.narrow(dim, start, n)
                views += (part if span is None else part.narrow(1, *span)).unbind(0)
        return found

    def _span(self, rows: slice, each: int) -> tuple[int, int] | None:
        """Where `rows` begin and how long they are in a dimension that has `each` places a row; None: all of them."""
        if rows == ALL_ROWS:
            return None
        first, last, _ = rows.indices(self.rows)
        return first * each, (last - first) * each

    def scatter(self, index: int, k: Tensor, v: Tensor, slots: Tensor, rows: slice) -> None:
        """Write keys and values `[B, n, H_kv, d]` of a layer at `slots` `[B, n]`."""
        row = torch.arange(len(slots), device=slots.device).unsqueeze(1)
        self.keys[index][rows][row, :, slots] = k
        self.values[index][rows][row, :, slots] = v

    def place(self, positions: int | Tensor, slots: int | Tensor, n: int, rows: slice) -> None:
        """Say where the tokens of `n` slots stand: as in `Runtime.forward`."""
        assert self.positions is not None
        if isinstance(positions, int):
            positions = torch.arange(positions, positions + n, device=self.positions.device)[None]
        held = self.positions[rows]
        if isinstance(slots, int):
            held[:, slots : slots + n] = positions
        else:
            held.scatter_(1, slots, positions.expand_as(slots))

    def near(self, window: int, positions: int | Tensor, n: int, seen: int, rows: slice) -> Tensor:
        """Of the first `seen` slots, those that stand less than a window before `positions` `[B, n, seen]`."""
        assert self.positions is not None
        if isinstance(positions, int):
            positions = torch.arange(positions, positions + n, device=self.positions.device)[None]
        return self.positions[rows, None, :seen] > positions.unsqueeze(-1) - window

    def take(self, other: Cache) -> None:
        """Take over what is committed in a smaller cache of the same model and rows."""
        longest = max(other.length)
        for mine, theirs in zip(self._whole, other._whole, strict=True):
            for t, old in zip(mine, theirs, strict=True):
                t.narrow(3, 0, longest).copy_(old.narrow(3, 0, longest))
        self.length, self.tokens = list(other.length), list(other.tokens)

    def copy(self, source: int, row: int, start: int, end: int) -> None:
        """Give a row what another holds in the slots from `start` to `end`; its length stays."""
        self.move((row, source, start, range(start, end)))

    def move(self, move: Move) -> None:
        """Copy keys and values from slots to slots."""
        if self.told is not None:
            self.told(move)
        row, source, start, slots = move
        at = torch.tensor(slots)
        for t in (t for pair in self._whole for t in pair):  # all layers of a device at once
            t[:, row].narrow(2, start, len(slots)).copy_(t[:, source].index_select(2, at.to(t.device)))

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep the root of a verified draft and the nodes on `path`, in order; forget the rest.

        A full pass wrote the root at slot `length` and node i at `length + 1 + i`. The path's slots are moved to
        `length + 1` on, then `length` grows by `1 + len(path)`.
        """
        start = self.length[row] + 1
        if any(node != place for place, node in enumerate(path)):
            self.move((row, row, start, [start + node for node in path]))
        self.length[row] = end = start + len(path)
        if self.positions is not None:
            self.positions[row, start:end] = torch.arange(start, end, device=self.positions.device)


def _repeat(t: Tensor, group: int) -> Tensor:  # [L, B * H_kv, slots, d]
    return t.unsqueeze(2).expand(-1, -1, group, -1, -1)
