"""A key-value cache in blocks: a row's slots lie wherever its table says. Knows nothing of who hands blocks out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from selfspec.basics.errors import SelfspecError
from selfspec.models.sizes import Sizes
from selfspec.runtime.cache_rows import CacheRows

BLOCK = 64  # slots of a block: whole vectors of keys, also where they are read by fours


class BlockTables(NamedTuple):
    """So many blocks, and the tables of a cache's rows: another cache's, or, where left out, of its own."""

    blocks: int
    tables: list[list[int]] | None = None


class PagedCache(CacheRows):
    """Keys `[L, blocks, H_kv, d, BLOCK]` and values `[L, blocks, H_kv, BLOCK, d]`, which native passes alone read.

    `tables[row]` are the numbers of a row's blocks in order: slot s lies in the block `tables[row][s // BLOCK]`. Who
    hands blocks out writes them, and may do so between any two passes. Rows may share blocks of what they have in
    common from the beginning on. No row has more than `slots` slots. `pool`: what another cache shares the tables by.
    """

    def __init__(self, sizes: Sizes, layers: int, pool: BlockTables, *, rows: int, slots: int) -> None:
        super().__init__(rows, min(pool.blocks, -(-slots // BLOCK)) * BLOCK)
        tables = [list[int]() for _ in range(rows)] if pool.tables is None else pool.tables
        if len(tables) != rows or pool.blocks < 1:
            raise SelfspecError(f"{len(tables)} tables of {pool.blocks} blocks; expected {rows} tables, and blocks")
        self.tables, self.blocks, self.pool = tables, pool.blocks, BlockTables(pool.blocks, tables)
        shape, dtype = (layers, pool.blocks, sizes.kv_heads), sizes.dtype
        self.keys = torch.zeros((*shape, sizes.head_dim, BLOCK), dtype=dtype)
        self.values = torch.zeros((*shape, BLOCK, sizes.head_dim), dtype=dtype)
        self._told: list[tuple[list[int], array[int]]] = [([], array("q"))] * rows  # tables as they were last read

    @property
    def bytes(self) -> int:
        """Memory held."""
        return self.keys.nbytes + self.values.nbytes

    def blocks_of(self, row: int) -> tuple[int, int]:
        """The address of the numbers of a row's blocks, and how many slots it has.

        Raises `SelfspecError` for blocks that there are not.
        """
        table = self.tables[row]
        if self._told[row][0] != table:
            if not 0 <= min(table, default=0) <= max(table, default=0) < self.blocks:
                raise SelfspecError(f"blocks have the numbers 0 to {self.blocks - 1}; row {row} is given {table}")
            self._told[row] = list(table), array("q", table)
        return self._told[row][1].buffer_info()[0], min(len(table) * BLOCK, self.slots)

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Keep the root of a verified draft and the nodes on `path`, in order, as `Cache.commit` does."""
        start = self.length[row] + 1
        end = start + len(path)
        if any(node != place for place, node in enumerate(path)):
            table = torch.tensor(self.tables[row])
            source, to = torch.tensor([start + node for node in path]), torch.arange(start, end)
            old, new = (table[slots // BLOCK] for slots in (source, to))
            self.keys[:, new, :, :, to % BLOCK] = self.keys[:, old, :, :, source % BLOCK]
            self.values[:, new, :, to % BLOCK] = self.values[:, old, :, source % BLOCK]
        self.length[row] = end
