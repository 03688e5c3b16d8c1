"""The engine: sequences join, take rounds together, and leave between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch

from selfspec.basics.errors import SelfspecError
from selfspec.engine.block_scheduler import memory_of
from selfspec.runtime.forward import Runtime
from selfspec.runtime.model_verifier import ModelChecker
from selfspec.speculation.drafter import Drafter, Limit
from selfspec.speculation.drafts import Outcome
from selfspec.speculation.forward_output import ForwardOutput, joined
from selfspec.speculation.rounds import one_round
from selfspec.speculation.sequence import SequenceState
from selfspec.types.limits import WIDEST_DRAFT


@dataclass(slots=True)
class _Reading:
    """Of a sequence whose prompt is being read: the passes over it so far, and whether its first round is plain."""

    first_plain: bool
    passes: list[ForwardOutput] = field(default_factory=list)


class Engine:
    """Decodes sequences together on one runtime, which it holds while it is entered; a context manager.

    With `reuse` a sequence that joins reads only what follows of the beginning that it shares with what the cache
    holds: of a sequence of this engine, or of one before it that reused. An engine that does not reuse forgets all.

    Each sequence has a cache row of its own and gives the tokens that it would give alone. Where the cache is a pool
    of blocks, who joined last is driven out when others need its blocks: it is in `evicted` then, and goes on where it
    was once it has joined again. Raises `BusyError`, when entered, while the runtime has a stream. An exception in a
    round leaves the runtime usable; the engine is then to be closed, which ends what is still in it.
    """

    def __init__(self, runtime: Runtime, drafter: Drafter, *, reuse: bool = False) -> None:
        self.runtime = runtime
        self.drafter = drafter
        self.reuse = reuse
        self.memory = memory_of(runtime)
        self.evicted: list[SequenceState] = []  # for whoever drives the engine to take from
        self._checker = ModelChecker(runtime)
        self._reading: dict[SequenceState, _Reading] = {}
        self._running: list[SequenceState] = []
        self._undrafted: set[SequenceState] = set()  # whose first round is to be plain
        self._held = ExitStack()

    def __enter__(self) -> Self:
        self._held.enter_context(self.runtime.session(0, reuse=self.reuse))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for seq in (*self._running, *self._reading):
            self._held.callback(self.leave, seq)
        self._held.close()  # the runtime last, whatever a drafter raises

    @property
    def running(self) -> Sequence[SequenceState]:
        """The sequences that take rounds: they have joined and not left."""
        return tuple(self._running)

    @property
    def reading(self) -> Sequence[SequenceState]:
        """Those that were admitted and whose prompts are not read yet."""
        return tuple(self._reading)

    def join(self, seq: SequenceState, *, first_plain: bool = False) -> None:
        """Give a sequence a cache row, and read its prompt but the last token, which its first round reads.

        With `first_plain` its first round drafts nothing, so that its first token comes as soon as plain decoding's.
        Raises `SelfspecError` when all rows are taken, and when no cache for its length can be had.
        """
        if not self.admit(seq, first_plain=first_plain):
            raise SelfspecError(f"all {self.runtime.rows} rows of the cache are taken; let a sequence leave first")
        self.read(seq)

    def admit(self, seq: SequenceState, *, first_plain: bool = False) -> bool:
        """Give a sequence a cache row and room for its tokens; False where there is none now. `read` reads its prompt.

        Raises `SelfspecError` when no cache for its length can ever be had.
        """
        # A drafter that reads the prompt's streams needs all of them.
        if not self.memory.claim(seq, reuse=self.reuse and not self.drafter.hidden):
            return False
        self._reading[seq] = _Reading(first_plain)
        return True

    def read(self, seq: SequenceState, most: int | None = None) -> int:
        """Read at most so many tokens of an admitted sequence's prompt; how many are left. It then takes rounds."""
        reading, cache = self._reading[seq], self.runtime.cache
        start, last = cache.length[seq.row], len(seq.tokens) - 1
        end = last if most is None else min(start + most, last)
        if end > start:
            tokens = torch.tensor([seq.tokens[start:end]], dtype=torch.long, device=self.runtime.device)
            rows = slice(seq.row, seq.row + 1)
            reading.passes.append(
                self.runtime.forward(tokens, start, rows=rows, logits=None, hidden=self.drafter.hidden)
            )
            cache.commit(seq.row, range(end - start - 1))
            self.memory.committed(seq)
        if end == last:
            self._running.append(seq)
            del self._reading[seq]
            self.drafter.begin(seq, joined(reading.passes))
            if reading.first_plain:
                self._undrafted.add(seq)
        return last - end

    def leave(self, seq: SequenceState) -> None:
        """End a sequence now; its tokens stay as they are. One that has ended has left already."""
        begun = seq not in self._reading
        if begun:
            self._running.remove(seq)
        else:
            del self._reading[seq]
        self._undrafted.discard(seq)
        self.memory.release(seq)
        if begun:
            self.drafter.end(seq)

    def step(self) -> list[tuple[SequenceState, Outcome]]:
        """One round of every sequence that has room; those that end in it leave."""
        limits = self._limits()
        seqs = list(limits)
        if not seqs:
            return []
        outcomes = one_round(self._checker, self.drafter, seqs, list(limits.values()))
        self._undrafted.clear()
        for seq in seqs:
            self.memory.committed(seq)
            if not seq.remaining:
                self.leave(seq)
        return list(zip(seqs, outcomes, strict=True))

    def _limits(self) -> dict[SequenceState, Limit]:
        """How much each may draft in this round, by its own room and the cache's.

        Who came first is served first: for a token that must be written, who joined last is driven out.
        """
        limits: dict[SequenceState, Limit] = {}
        for seq in self.running:
            if seq not in self._running or not seq.remaining:
                continue
            depth, written = min(seq.remaining - 1, WIDEST_DRAFT), len(seq.tokens)
            if not self.memory.grow(seq, written + WIDEST_DRAFT):
                while not self.memory.grow(seq, written):
                    self._evict((*self._running, *self._reading)[-1])
                    if seq not in self._running:
                        break
            if seq in self._running:
                nodes = min(self.memory.room(seq) - written, WIDEST_DRAFT)
                limits[seq] = Limit(0 if seq in self._undrafted else min(depth, nodes), nodes)
        return limits

    def _evict(self, seq: SequenceState) -> None:
        """Take all that it has; it is to join again."""
        self.leave(seq)
        self.evicted.append(seq)
