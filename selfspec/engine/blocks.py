"""The block pool of a paged KV cache: reference counts of blocks, and sharing of cached prefixes. Pure Python.

As in vLLM's automatic prefix caching (Kwon et al. 2309.06180): a full block is identified by a digest of all tokens up
to its end. It stays cached after its last sequence has left, until it is needed for other tokens.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice

from selfspec.basics.errors import SelfspecError

_START = b""


class BlockPool:
    """A pool of `total` blocks of `size` slots, each with a reference count: the number of sequences that use it."""

    def __init__(self, total: int, size: int) -> None:
        self.total, self.size = total, size
        self._count = [0] * total
        self._blank = list(range(total - 1, -1, -1))  # free and not cached
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free but cached, least recently used first
        self._block: dict[bytes, int] = {}  # by digest
        self._digest: dict[int, bytes] = {}  # by block
        self._ends: dict[Hashable, list[bytes]] = {}  # by sequence: the digests of its full blocks

    @property
    def free(self) -> int:
        """The number of blocks that no sequence uses."""
        return len(self._blank) + len(self._evictable)

    def num_free_except(self, known: Iterable[int]) -> int:
        """Return the number of free blocks that are not among `known`."""
        return self.free - sum(not self._count[block] for block in known)

    def cached_blocks(self, tokens: Sequence[int]) -> list[int]:
        """Return the full blocks that cache the longest prefix of `tokens`."""
        blocks = list[int]()
        for digest in self._digests(tokens, _START):
            block = self._block.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> list[int]:
        """Increment the reference count of each block; return the blocks as a list."""
        for block in blocks:
            if not self._count[block]:
                del self._evictable[block]
            self._count[block] += 1
        return list(blocks)

    def take(self, number: int) -> list[int]:
        """Allocate `number` free blocks, uncached blocks first. Raises `SelfspecError` if fewer blocks are free."""
        if number > self.free:
            raise SelfspecError(f"{number} blocks of the pool are needed, {self.free} are free")
        taken = list[int]()
        for _ in range(number):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._evictable.popitem(last=False)
                self._forget(block)
            self._count[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Decrement the reference counts; a sequence's last blocks are evicted first, as prefixes are shared."""
        for block in reversed(blocks):
            self._count[block] -= 1
            if not self._count[block]:
                if block in self._digest:
                    self._evictable[block] = None
                else:
                    self._blank.append(block)

    def begin(self, holder: Hashable, shared: int) -> None:
        """Register the sequence `holder`, whose first `shared` full blocks were cached already."""
        self._ends[holder] = [_START] * shared

    def index_full(self, holder: Hashable, tokens: Sequence[int], table: Sequence[int], length: int) -> None:
        """Index the blocks of `table` that became full, so that other sequences can share them.

        `tokens`: the sequence's tokens, of which the first `length` have their keys and values cached. `table`: the
        sequence's blocks in order.
        """
        ends = self._ends[holder]
        full = length // self.size
        if full <= len(ends):
            return
        if ends and not ends[-1]:  # the digests of shared blocks are looked up when first needed
            ends[:] = [self._digest[block] for block in table[: len(ends)]]
        before = ends[-1] if ends else _START
        new = tokens[len(ends) * self.size : full * self.size]
        for digest in self._digests(new, before):
            block = table[len(ends)]
            ends.append(digest)
            if digest not in self._block and block not in self._digest:
                self._block[digest], self._digest[block] = block, digest

    def end(self, holder: Hashable) -> None:
        """Unregister the sequence."""
        del self._ends[holder]

    def _digests(self, tokens: Sequence[int], digest: bytes) -> Iterable[bytes]:
        """Yield the digest of each full block of `tokens`, chained to `digest` of the tokens before."""
        token_iter = iter(tokens)
        for _ in range(len(tokens) // self.size):
            text = ",".join(map(str, islice(token_iter, self.size)))
            digest = hashlib.blake2b(digest + text.encode(), digest_size=16).digest()
            yield digest

    def _forget(self, block: int) -> None:
        self._block.pop(self._digest.pop(block), None)
