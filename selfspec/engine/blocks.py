"""Blocks of a pool: who holds them, and which tokens' keys those hold that may be shared. Pure Python.

As in vLLM's automatic prefix caching (Kwon et al. 2309.06180): a block that is full is known by a digest of all tokens
up to its end, and stays known after the last sequence has left it until it is needed for something else.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice

from selfspec.basics.errors import SelfspecError

_START = b""


class BlockPool:
    """`total` blocks of `size` slots. A block is held by as many sequences as its count says; 0: it is free."""

    def __init__(self, total: int, size: int) -> None:
        self.total, self.size = total, size
        self._count = [0] * total
        self._blank = list(range(total - 1, -1, -1))  # free, and known for nothing
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, but known, who has waited longest first
        self._block: dict[bytes, int] = {}  # by digest
        self._digest: dict[int, bytes] = {}  # by block
        self._ends: dict[Hashable, list[bytes]] = {}  # of each sequence: the digests of its full blocks

    @property
    def free(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._blank) + len(self._kept)

    def free_beside(self, known: Iterable[int]) -> int:
        """Those that are free and not among `known`."""
        return self.free - sum(not self._count[block] for block in known)

    def known(self, tokens: Sequence[int]) -> list[int]:
        """The blocks that hold the keys of what `tokens` begin with, whole blocks alone."""
        found = list[int]()
        for digest in self._digests(tokens, _START):
            block = self._block.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Sequence[int]) -> list[int]:
        """One more holds each of these."""
        for block in blocks:
            if not self._count[block]:
                del self._kept[block]
            self._count[block] += 1
        return list(blocks)

    def take(self, number: int) -> list[int]:
        """So many blocks that were free; blank ones first. Raises `SelfspecError` where there are not as many."""
        if number > self.free:
            raise SelfspecError(f"{number} blocks of the pool are needed, {self.free} are free")
        taken = list[int]()
        for _ in range(number):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._kept.popitem(last=False)
                self._forget(block)
            self._count[block] = 1
            taken.append(block)
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """One less holds each of these. The last of a text are forgotten first, as others share beginnings."""
        for block in reversed(blocks):
            self._count[block] -= 1
            if not self._count[block]:
                if block in self._digest:
                    self._kept[block] = None
                else:
                    self._blank.append(block)

    def begin(self, holder: Hashable, shared: int) -> None:
        """Of this sequence so many full blocks were known already."""
        self._ends[holder] = [_START] * shared

    def filled(self, holder: Hashable, tokens: Sequence[int], table: Sequence[int], length: int) -> None:
        """The keys of the first `length` tokens are there: blocks that have become full are known from now on."""
        ends = self._ends[holder]
        full = length // self.size
        if full <= len(ends):
            return
        if ends and not ends[-1]:  # what was shared, looked up when first needed
            ends[:] = [self._digest[block] for block in table[: len(ends)]]
        before = ends[-1] if ends else _START
        new = tokens[len(ends) * self.size : full * self.size]
        for digest in self._digests(new, before):
            block = table[len(ends)]
            ends.append(digest)
            if digest not in self._block and block not in self._digest:
                self._block[digest], self._digest[block] = block, digest

    def end(self, holder: Hashable) -> None:
        """The sequence has left."""
        del self._ends[holder]

    def _digests(self, tokens: Sequence[int], digest: bytes) -> Iterable[bytes]:
        """Of each whole block of `tokens`, which come after what `digest` is of."""
        at = iter(tokens)
        for _ in range(len(tokens) // self.size):
            text = ",".join(map(str, islice(at, self.size)))
            digest = hashlib.blake2b(digest + text.encode(), digest_size=16).digest()
            yield digest

    def _forget(self, block: int) -> None:
        self._block.pop(self._digest.pop(block), None)
