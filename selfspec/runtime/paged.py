"""The paged KV cache: block tables map a row's slots to blocks, which the caller allocates."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from selfspec.basics.errors import SelfspecError
from selfspec.models.families.base import Sizes
from selfspec.models.skeleton import Skeleton
from selfspec.runtime.cache import Cache, CacheRows
from selfspec.types.methods import WIDEST_DRAFT

BLOCK = 64  # slots per block: a multiple of what kernels read at once, which is up to four vectors


class BlockTables(NamedTuple):
    """A pool of `blocks` blocks, and the block table of each cache row (None: the cache creates empty tables)."""

    blocks: int
    tables: list[list[int]] | None = None


class PagedCache(CacheRows):
    """Keys `[L, blocks, H_kv, d, BLOCK]` and values `[L, blocks, H_kv, BLOCK, d]`, which only native passes read.

    `tables[row]` are the numbers of a row's blocks in order: slot s is in block `tables[row][s // BLOCK]`. The block
    allocator may change the tables between passes. Rows may share the blocks of a common prefix. No row has more than
    `slots` slots. Pass the attribute `pool` to another cache to share the tables. `track_positions`: whether to keep
    `positions`, see `CacheRows`.
    """

    def __init__(
        self, sizes: Sizes, layers: int, pool: BlockTables, *, rows: int, slots: int, track_positions: bool = False
    ) -> None:
        super().__init__(rows, min(pool.blocks, -(-slots // BLOCK)) * BLOCK)
        tables = [list[int]() for _ in range(rows)] if pool.tables is None else pool.tables
        if len(tables) != rows or pool.blocks < 1:
            raise SelfspecError(f"{len(tables)} tables of {pool.blocks} blocks; expected {rows} tables of 1 or more")
        self.tables, self.blocks, self.pool = tables, pool.blocks, BlockTables(pool.blocks, tables)
        self.positions = torch.arange(self.slots).repeat(rows, 1) if track_positions else None
        shape, dtype = (layers, pool.blocks, sizes.kv_heads), sizes.dtype
        self.keys = torch.zeros((*shape, sizes.head_dim, BLOCK), dtype=dtype)
        self.values = torch.zeros((*shape, BLOCK, sizes.head_dim), dtype=dtype)
        self._cached_tables: list[tuple[list[int], array[int]]] = [
            ([], array("q"))
        ] * rows  # each row's table as last read, and its int64 copy

    @property
    def bytes(self) -> int:
        """Size of the keys and values in bytes."""
        return self.keys.nbytes + self.values.nbytes

    def blocks_of(self, row: int) -> tuple[int, int]:
        """Return the address of the row's int64 block table, and the row's number of slots.

        Raises `SelfspecError` for block numbers out of range.
        """
        table = self.tables[row]
        if self._cached_tables[row][0] != table:
            if not 0 <= min(table, default=0) <= max(table, default=0) < self.blocks:
                raise SelfspecError(f"block table of row {row}: {table}; expected numbers from 0 to {self.blocks - 1}")
            self._cached_tables[row] = list(table), array("q", table)
        return self._cached_tables[row][1].buffer_info()[0], min(len(table) * BLOCK, self.slots)

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Commit the root of a verified draft and the accepted nodes on `path`, in order, as `Cache.commit` does."""
        start = self.length[row] + 1
        end = start + len(path)
        if any(node != place for place, node in enumerate(path)):
            table = torch.tensor(self.tables[row])
            source, to = torch.tensor([start + node for node in path]), torch.arange(start, end)
            old, new = (table[slots // BLOCK] for slots in (source, to))
            self.keys[:, new, :, :, to % BLOCK] = self.keys[:, old, :, :, source % BLOCK]
            self.values[:, new, :, to % BLOCK] = self.values[:, old, :, source % BLOCK]
        self.length[row] = end
        self._settle_positions(row, start, end)


def cache_of(
    skeleton: Skeleton, *, rows: int, slots: int, keys_transposed: bool, track_positions: bool, pool: BlockTables | None
) -> Cache | PagedCache:
    """Return a static KV cache of `slots` slots per row, or a paged KV cache if `pool` is given.

    A row of a paged cache has at most as many slots as the model's context plus the widest draft.
    """
    s = skeleton.sizes
    if pool is not None:
        longest = skeleton.context + WIDEST_DRAFT
        return PagedCache(s, len(skeleton.blocks), pool, rows=rows, slots=longest, track_positions=track_positions)
    return Cache(
        rows=rows,
        kv_heads=s.kv_heads,
        group=s.heads // s.kv_heads,
        slots=slots,
        head_dim=s.head_dim,
        dtype=s.dtype,
        devices=[block.device for block in skeleton.blocks],
        keys_transposed=keys_transposed,
        track_positions=track_positions,
        positions_device=skeleton.device,
    )
