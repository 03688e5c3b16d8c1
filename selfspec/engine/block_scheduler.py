"""Who has which room in the cache: contiguous rows, or blocks of one pool. Knows nothing of drafts and rounds."""

from __future__ import annotations

from typing import Protocol

from selfspec.basics.errors import SelfspecError
from selfspec.engine.blocks import BlockPool
from selfspec.runtime.cache import Cache
from selfspec.runtime.forward import Runtime
from selfspec.runtime.paged import BLOCK, PagedCache
from selfspec.speculation.sequence import SequenceState
from selfspec.types.limits import WIDEST_DRAFT

WORTH_COPYING = 16  # slots: what is shared beyond what a row holds already, for less it is not copied


class CacheAllocator(Protocol):
    """Gives sequences cache rows, and their rows room for keys and values."""

    @property
    def places(self) -> int:
        """Token places in all."""

    @property
    def free(self) -> int:
        """Token places that nobody holds."""

    @property
    def longest(self) -> int:
        """The most tokens that one sequence may come to, prompt and new ones, without more memory than there is."""

    def claim(self, seq: SequenceState, *, reuse: bool) -> bool:
        """Give a sequence a row (`seq.row`), with room for its tokens; False where there is none now.

        With `reuse` it keeps what the cache has of its beginning, `seq.kept` tokens. Raises `SelfspecError` where there
        never is.
        """

    def grow(self, seq: SequenceState, slots: int) -> bool:
        """See to it that the sequence has so many slots; False where there are not as many now."""

    def room(self, seq: SequenceState) -> int:
        """Slots that the sequence has."""

    def committed(self, seq: SequenceState) -> None:
        """Keys of more of its tokens are in the cache now."""

    def release(self, seq: SequenceState) -> None:
        """The sequence leaves; what the cache has of it may serve another's beginning."""


def memory_of(runtime: Runtime) -> CacheAllocator:
    """As the runtime's cache is made."""
    cache = runtime.cache
    return PagedAllocator(runtime, cache) if isinstance(cache, PagedCache) else ContiguousAllocator(runtime)


class ContiguousAllocator:
    """Contiguous rows of one length, which grows as sequences ask for more where the cache may grow."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._taken: set[int] = set()

    @property
    def places(self) -> int:
        """Slots of all rows."""
        return self.runtime.rows * self.runtime.cache.slots

    @property
    def free(self) -> int:
        """Slots of rows that nobody has."""
        return (self.runtime.rows - len(self._taken)) * self.runtime.cache.slots

    @property
    def longest(self) -> int:
        """A row's, but for what is drafted."""
        return self.runtime.cache.slots - WIDEST_DRAFT

    def claim(self, seq: SequenceState, *, reuse: bool) -> bool:
        """The free row that keeps most and loses least, and forgets what it holds beyond what is kept.

        What another row has of its beginning beyond that is copied from there.
        """
        free = [row for row in range(self.runtime.rows) if row not in self._taken]
        if not free:
            return False
        self.runtime.reserve(len(seq.tokens) + seq.remaining + WIDEST_DRAFT)
        cache, prompt = self.runtime.cache, seq.tokens[:-1]
        shared = [cache.shared(row, prompt) if reuse else 0 for row in range(self.runtime.rows)]
        seq.row = max(free, key=lambda row: 2 * shared[row] - len(cache.known(row)))
        seq.num_cached = shared[seq.row]
        best = max(range(len(shared)), key=shared.__getitem__)
        if isinstance(cache, Cache) and shared[best] >= seq.num_cached + WORTH_COPYING:
            cache.copy(best, seq.row, seq.num_cached, shared[best])
            seq.num_cached = shared[best]
        cache.rewind(seq.row, seq.num_cached)
        if reuse:
            cache.tokens[seq.row] = seq.tokens  # the very list, which rounds lengthen
        self._taken.add(seq.row)
        return True

    def grow(self, seq: SequenceState, slots: int) -> bool:
        """A row has room for all that its sequence may ever need."""
        return True

    def room(self, seq: SequenceState) -> int:
        """The row's."""
        return self.runtime.cache.slots

    def committed(self, seq: SequenceState) -> None:
        """The row's length says so."""

    def release(self, seq: SequenceState) -> None:
        """Its row is free; its keys stay until another needs it."""
        self._taken.discard(seq.row)


class PagedAllocator:
    """Blocks of one pool: a sequence has as many as it needs now, and shares those of a common beginning."""

    def __init__(self, runtime: Runtime, cache: PagedCache) -> None:
        self.runtime, self._cache = runtime, cache
        self._blocks = BlockPool(cache.blocks, BLOCK)
        self._rows: dict[SequenceState, int] = {}

    @property
    def places(self) -> int:
        """Slots of all blocks."""
        return self._blocks.total * self._blocks.size

    @property
    def free(self) -> int:
        """Slots of blocks that no sequence has, whether they still hold a beginning or not."""
        return self._blocks.free * self._blocks.size

    @property
    def longest(self) -> int:
        """All blocks', or a row's."""
        return min(self.places, self._cache.slots)

    def claim(self, seq: SequenceState, *, reuse: bool) -> bool:
        """A free row, blocks that hold its beginning already, and others for the rest of its tokens.

        One block for each sequence that runs must stay free, so that who comes does not drive others out.
        """
        cache, size = self._cache, self._blocks.size
        free = next((row for row in range(self.runtime.rows) if row not in self._rows.values()), None)
        if len(seq.tokens) + seq.remaining > self.longest:
            raise SelfspecError(
                f"{len(seq.tokens)} tokens and {seq.remaining} new ones need more than the {self.longest} places for "
                "keys and values; give more memory, or ask for fewer tokens"
            )
        if free is None:
            return False
        known = self._blocks.known(seq.tokens[:-1]) if reuse else []
        needed = -(-(len(seq.tokens) + 1) // size) - len(known)
        if needed + len(self._rows) > self._blocks.free_beside(known):
            return False
        seq.row, seq.num_cached = free, len(known) * size
        cache.tables[seq.row] = [*self._blocks.share(known), *self._blocks.take(needed)]
        cache.rewind(seq.row, seq.num_cached)
        self._rows[seq] = free
        self._blocks.begin(seq, len(known))
        return True

    def grow(self, seq: SequenceState, slots: int) -> bool:
        """More blocks, all that are missing or none."""
        table = self._cache.tables[seq.row]
        missing = -(-slots // self._blocks.size) - len(table)
        if missing > self._blocks.free:
            return False
        table += self._blocks.take(missing)
        return True

    def room(self, seq: SequenceState) -> int:
        """That of the blocks it has."""
        return len(self._cache.tables[seq.row]) * self._blocks.size

    def committed(self, seq: SequenceState) -> None:
        """Blocks that are full may now be shared."""
        cache = self._cache
        self._blocks.filled(seq, seq.tokens, cache.tables[seq.row], cache.length[seq.row])

    def release(self, seq: SequenceState) -> None:
        """Its blocks are free, but for those that others share."""
        row = self._rows.pop(seq)
        self._blocks.give_back(self._cache.tables[row])
        self._blocks.end(seq)
        self._cache.tables[row] = []
        self._cache.clear(row)
