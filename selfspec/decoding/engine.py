"""The engine: sequences join, take rounds together, and leave between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch

from selfspec.basics.errors import SelfspecError
from selfspec.facts.limits import WIDEST_DRAFT
from selfspec.runtime.checkers import ModelChecker
from selfspec.runtime.forward import Runtime
from selfspec.speculation.drafter import Drafter, Limit
from selfspec.speculation.drafts import Outcome
from selfspec.speculation.rounds import one_round
from selfspec.speculation.sequence import SequenceState
from selfspec.speculation.step import Step


class Engine:
    """Decodes sequences together on one runtime, which it holds while it is entered; a context manager.

    With `reuse` a sequence that joins reads only what follows of the beginning that it shares with what a free row
    holds: a sequence of this engine, or of one before it that reused. An engine that does not reuse forgets them all.

    Each sequence has a cache row of its own and gives the tokens that it would give alone. Raises `BusyError`, when
    entered, while the runtime has a stream. An exception in a round leaves the runtime usable; the engine is then to be
    closed, which ends what is still in it.
    """

    def __init__(self, runtime: Runtime, drafter: Drafter, *, reuse: bool = False) -> None:
        self.runtime = runtime
        self.drafter = drafter
        self.reuse = reuse
        self._checker = ModelChecker(runtime)
        self._running: list[SequenceState] = []
        self._undrafted: set[SequenceState] = set()  # whose first round is to be plain
        self._held = ExitStack()

    def __enter__(self) -> Self:
        self._held.enter_context(self.runtime.session(0, reuse=self.reuse))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for seq in self._running:
            self._held.callback(self.leave, seq)
        self._held.close()  # the runtime last, whatever a drafter raises

    @property
    def running(self) -> Sequence[SequenceState]:
        """The sequences that have joined and not left."""
        return tuple(self._running)

    def join(self, seq: SequenceState, *, first_plain: bool = False) -> None:
        """Give a sequence a cache row, and read its prompt but the last token, which its first round reads.

        With `first_plain` its first round drafts nothing, so that its first token comes as soon as plain decoding's.
        Raises `SelfspecError` when all rows are taken, and when no cache for its length can be had.
        """
        taken = {other.row for other in self._running}
        free = [row for row in range(self.runtime.rows) if row not in taken]
        if not free:
            raise SelfspecError(f"all {self.runtime.rows} rows of the cache are taken; let a sequence leave first")
        self._claim(seq, free)
        self.runtime.reserve(len(seq.tokens) + seq.room + WIDEST_DRAFT)
        if self.reuse:
            self.runtime.cache.tokens[seq.row] = seq.tokens  # the very list, which rounds lengthen
        prefill = self._prefill(seq)
        self._running.append(seq)
        self.drafter.begin(seq, prefill)
        if first_plain:
            self._undrafted.add(seq)

    def leave(self, seq: SequenceState) -> None:
        """End a sequence now; its tokens stay as they are. One that has ended has left already."""
        self._running.remove(seq)
        self._undrafted.discard(seq)
        self.drafter.end(seq)

    def step(self) -> list[tuple[SequenceState, Outcome]]:
        """One round of every sequence that has room; those that end in it leave."""
        seqs = [seq for seq in self._running if seq.room]
        if not seqs:
            return []
        limits = [Limit(0 if seq in self._undrafted else min(seq.room - 1, WIDEST_DRAFT)) for seq in seqs]
        outcomes = one_round(self._checker, self.drafter, seqs, limits)
        self._undrafted.clear()
        for seq in seqs:
            if not seq.room:
                self.leave(seq)
        return list(zip(seqs, outcomes, strict=True))

    def _claim(self, seq: SequenceState, free: Sequence[int]) -> None:
        """Give a sequence the free row that keeps most and loses least, and forget what that holds beyond what is kept.

        A drafter that reads the prompt's streams needs all of them.
        """
        cache, prompt = self.runtime.cache, seq.tokens[:-1]
        reuse = self.reuse and not self.drafter.hidden
        shared = {row: cache.shared(row, prompt) if reuse else 0 for row in free}
        seq.row = max(free, key=lambda row: 2 * shared[row] - len(cache.known(row)))
        seq.kept = shared[seq.row]
        cache.rewind(seq.row, seq.kept)

    def _prefill(self, seq: SequenceState) -> Step:
        """Write the prompt's keys, but the last token's, which the first round writes like any round."""
        tokens = torch.tensor([seq.tokens[seq.kept : -1]], dtype=torch.long, device=self.runtime.device)
        if not tokens.numel():
            return Step(None)
        rows = slice(seq.row, seq.row + 1)
        step = self.runtime.forward(tokens, seq.kept, rows=rows, logits=None, hidden=self.drafter.hidden)
        self.runtime.cache.commit(seq.row, range(tokens.shape[1] - 1))
        return step
