"""Allocation of the KV cache to sequences: contiguous rows, or blocks of one pool (paged)."""

from __future__ import annotations

from typing import Protocol

from selfspec.basics.errors import SelfspecError
from selfspec.engine.blocks import BlockPool
from selfspec.runtime.base import Runtime
from selfspec.runtime.cache import Cache
from selfspec.runtime.paged import BLOCK, PagedCache
from selfspec.speculation.sequence import SequenceState
from selfspec.types.methods import WIDEST_DRAFT

WORTH_COPYING = 16  # slots by which another row's shared prefix must be longer for it to be copied


class CacheAllocator(Protocol):
    """The allocator of cache rows to sequences, and of slots for keys and values to rows."""

    @property
    def num_slots(self) -> int:
        """The number of cache slots of all sequences together."""

    @property
    def free(self) -> int:
        """Cache slots that no sequence occupies."""

    @property
    def max_seq_len(self) -> int:
        """The most tokens of one sequence whose keys and values fit without allocating more memory."""

    def claim(self, seq: SequenceState, *, reuse: bool) -> bool:
        """Give a sequence a row (`seq.row`) with slots for its tokens; return False if too little is free now.

        With `reuse`, cached keys and values of a prefix of its tokens are reused; `seq.num_cached` is set to the length
        of that prefix. Raises `SelfspecError` if the sequence can never fit.
        """

    def grow(self, seq: SequenceState, slots: int) -> bool:
        """Ensure that the sequence has at least `slots` slots; return False if too few are free now."""

    def capacity(self, seq: SequenceState) -> int:
        """Return the number of slots of the sequence."""

    def mark_cached(self, seq: SequenceState) -> None:
        """Record that keys and values of further tokens of the sequence have been cached."""

    def release(self, seq: SequenceState) -> None:
        """Free the sequence's slots; its cached prefix may be reused by another sequence."""


def memory_of(runtime: Runtime) -> CacheAllocator:
    """Return the allocator for the runtime's kind of cache."""
    cache = runtime.cache
    return PagedAllocator(runtime, cache) if isinstance(cache, PagedCache) else ContiguousAllocator(runtime)


class ContiguousAllocator:
    """Allocator of contiguous rows of equal length; all rows grow when a sequence needs a longer row."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._taken: set[int] = set()

    @property
    def num_slots(self) -> int:
        """The number of cache slots of all rows together."""
        return self.runtime.rows * self.runtime.cache.slots

    @property
    def free(self) -> int:
        """The number of slots in rows that no sequence occupies."""
        return (self.runtime.rows - len(self._taken)) * self.runtime.cache.slots

    @property
    def max_seq_len(self) -> int:
        """The length of a row minus the slots reserved for a draft."""
        return self.runtime.cache.slots - WIDEST_DRAFT

    def claim(self, seq: SequenceState, *, reuse: bool) -> bool:
        """Claim the free row whose cached tokens share most with the sequence and lose least; keep the shared prefix.

        If another row has a clearly longer shared prefix, it is copied from that row.
        """
        free = [row for row in range(self.runtime.rows) if row not in self._taken]
        if not free:
            return False
        self.runtime.reserve(len(seq.tokens) + seq.remaining - 1 + WIDEST_DRAFT)  # the last token needs no slot
        cache, prompt = self.runtime.cache, seq.tokens[:-1]
        shared = [cache.shared(row, prompt) if reuse else 0 for row in range(self.runtime.rows)]
        seq.row = max(free, key=lambda row: 2 * shared[row] - len(cache.known(row)))
        seq.num_cached = shared[seq.row]
        best = max(range(len(shared)), key=shared.__getitem__)
        if isinstance(cache, Cache) and shared[best] >= seq.num_cached + WORTH_COPYING:
            cache.copy(best, seq.row, seq.num_cached, shared[best])
            seq.num_cached = shared[best]
        cache.rewind(seq.row, seq.num_cached)
        # The same list object, which rounds extend; without reuse, an earlier sequence's tokens are forgotten.
        cache.tokens[seq.row] = seq.tokens if reuse else ()
        self._taken.add(seq.row)
        return True

    def grow(self, seq: SequenceState, slots: int) -> bool:
        """Return True: `claim` reserved slots for the longest the sequence may become."""
        return True

    def capacity(self, seq: SequenceState) -> int:
        """Return the length of a row."""
        return self.runtime.cache.slots

    def mark_cached(self, seq: SequenceState) -> None:
        """Do nothing: the row's length in the cache already covers these tokens."""

    def release(self, seq: SequenceState) -> None:
        """Free the row; its keys and values stay until another sequence claims it."""
        self._taken.discard(seq.row)


class PagedAllocator:
    """Allocator of blocks of one pool: a sequence has the blocks that it needs now; equal prefixes share blocks."""

    def __init__(self, runtime: Runtime, cache: PagedCache) -> None:
        self.runtime, self._cache = runtime, cache
        self._blocks = BlockPool(cache.blocks, BLOCK)
        self._rows: dict[SequenceState, int] = {}

    @property
    def num_slots(self) -> int:
        """The number of cache slots of all blocks together."""
        return self._blocks.total * self._blocks.size

    @property
    def free(self) -> int:
        """The number of slots in blocks that no sequence occupies, including blocks that still cache a prefix."""
        return self._blocks.free * self._blocks.size

    @property
    def max_seq_len(self) -> int:
        """The slots of all blocks, or of one row if that is less."""
        return min(self.num_slots, self._cache.slots)

    def claim(self, seq: SequenceState, *, reuse: bool) -> bool:
        """Claim a free row, the blocks that cache the sequence's prefix, and new blocks for its other tokens.

        One block for each running sequence must stay free, so that a new sequence does not cause preemption.
        """
        cache, size = self._cache, self._blocks.size
        free = next((row for row in range(self.runtime.rows) if row not in self._rows.values()), None)
        if len(seq.tokens) + seq.remaining - 1 > self.max_seq_len:  # the last token needs no slot
            raise SelfspecError(
                f"{len(seq.tokens)} tokens and {seq.remaining} new tokens do not fit the {self.max_seq_len} slots of "
                "the KV cache; give more memory, or request fewer tokens"
            )
        if free is None:
            return False
        known = self._blocks.cached_blocks(seq.tokens[:-1]) if reuse else []
        needed = -(-(len(seq.tokens) + (seq.remaining > 1)) // size) - len(known)
        if needed + len(self._rows) > self._blocks.num_free_except(known):
            return False
        seq.row, seq.num_cached = free, len(known) * size
        cache.tables[seq.row] = [*self._blocks.share(known), *self._blocks.take(needed)]
        cache.rewind(seq.row, seq.num_cached)
        self._rows[seq] = free
        self._blocks.begin(seq, len(known))
        return True

    def grow(self, seq: SequenceState, slots: int) -> bool:
        """Allocate the missing blocks and return True; if too few are free, allocate none and return False."""
        table = self._cache.tables[seq.row]
        missing = -(-slots // self._blocks.size) - len(table)
        if missing > self._blocks.free:
            return False
        table += self._blocks.take(missing)
        return True

    def capacity(self, seq: SequenceState) -> int:
        """Return the slots of the sequence's blocks."""
        return len(self._cache.tables[seq.row]) * self._blocks.size

    def mark_cached(self, seq: SequenceState) -> None:
        """Make the blocks that have become full available for sharing."""
        cache = self._cache
        self._blocks.index_full(seq, seq.tokens, cache.tables[seq.row], cache.length[seq.row])

    def release(self, seq: SequenceState) -> None:
        """Free the sequence's blocks, except blocks that other sequences share."""
        row = self._rows.pop(seq)
        self._blocks.release(self._cache.tables[row])
        self._blocks.end(seq)
        self._cache.tables[row] = []
        self._cache.clear(row)
