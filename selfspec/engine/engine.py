"""The engine: continuous batching of sequences, which join, take rounds together, and leave between rounds."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch

from selfspec.basics.errors import SelfspecError
from selfspec.engine.block_scheduler import memory_of
from selfspec.engine.overlapped import OverlappedRounds
from selfspec.runtime.base import Runtime
from selfspec.runtime.model_verifier import ModelChecker
from selfspec.speculation.drafter import Drafter, Limit
from selfspec.speculation.drafts import Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput, joined
from selfspec.speculation.rounds import Scored, one_round
from selfspec.speculation.rules import Rule
from selfspec.speculation.sequence import SequenceState
from selfspec.types.methods import WIDEST_DRAFT

PROMPT_CHUNK = 1024  # most tokens of a joining prompt's pass: bounds its memory, and progress is reported after each
OnPrefill = Callable[[int, int], None]  # (prompt tokens in the cache, all prompt tokens)


class _Prefilled(ModelChecker):
    """The verifier in a sequence's first round: the prompt's pass has read its last token, so no pass is needed.

    `outputs`: the prefill's output for the last token of each sequence that has taken no round yet.
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.outputs: dict[SequenceState, ForwardOutput] = {}

    def score(
        self, seqs: Sequence[SequenceState], drafts: Sequence[Draft], *, hidden: Sequence[int] = ()
    ) -> list[Scored]:
        """Return the scores after each sequence's last token, from the output of its prefill; drafts are empty."""
        return [self._scored(seq, draft, self.outputs[seq]) for seq, draft in zip(seqs, drafts, strict=True)]

    def keep(self, seqs: Sequence[SequenceState], paths: Sequence[tuple[int, ...]]) -> None:
        """Do nothing: the prefill has committed the last tokens."""


class Engine:
    """Continuous batching of sequences on one runtime; a context manager that locks the runtime while entered.

    With `reuse` a joining sequence prefills only what follows its longest cached prefix. That prefix may come from a
    sequence of this engine, or from an earlier engine with `reuse`. An engine without `reuse` clears the cache. A
    function `reuse` is called when the engine has locked the runtime.

    Each sequence has a separate cache row and emits the tokens that it would emit alone. If the cache is paged, the
    most recently admitted sequence is preempted when blocks run out. The preempted sequence is put into `preempted`,
    and continues where it was once it has joined again. Entering raises `BusyError` while another generation uses the
    runtime. An exception in a round leaves the runtime usable; the engine must then be closed, which ends its remaining
    sequences.
    """

    def __init__(self, runtime: Runtime, drafter: Drafter, *, reuse: bool | Callable[[], bool] = False) -> None:
        self.runtime = runtime
        self.drafter = drafter
        self.reuse, self._reuse = False, reuse
        self.memory = memory_of(runtime)
        self.preempted: list[SequenceState] = []  # preempted sequences, for the caller to collect
        self._checker = ModelChecker(runtime)
        self._prefilled = _Prefilled(runtime)
        self._prefilling: dict[SequenceState, list[ForwardOutput]] = {}  # the outputs of the passes so far
        self._overlapped = OverlappedRounds(runtime, drafter)
        self._running: list[SequenceState] = []
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        self.reuse = self._resources.enter_context(self.runtime.session(0, reuse=self._reuse))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for seq in (*self._running, *self._prefilling):
            self._resources.callback(self.leave, seq)
        self._resources.close()  # releases the runtime last, even if a drafter raises

    @property
    def running(self) -> Sequence[SequenceState]:
        """The sequences that take rounds: those whose prefill is finished, and that have not left."""
        return tuple(self._running)

    @property
    def prefilling(self) -> Sequence[SequenceState]:
        """The admitted sequences whose prefill is not finished."""
        return tuple(self._prefilling)

    @property
    def prefilled(self) -> Sequence[SequenceState]:
        """The running sequences that have taken no round yet; the next `step` is for them alone."""
        return tuple(self._prefilled.outputs)

    def join(self, seq: SequenceState, on_prefill: OnPrefill | None = None) -> None:
        """Admit a sequence and prefill its prompt, in passes of at most `PROMPT_CHUNK` tokens.

        A model with layers with a state reads the prompt in one pass. `on_prefill`: called before the first pass and
        after each, if the prompt has more uncached tokens than `PROMPT_CHUNK`. Raises `SelfspecError` if no row is
        free, or no cache can be allocated for the sequence's length.
        """
        if not self.admit(seq):
            raise SelfspecError(f"all {self.runtime.rows} rows of the cache are taken; let a sequence leave first")
        total = len(seq.tokens)
        report = on_prefill if total - seq.num_cached > PROMPT_CHUNK else None
        left, max_tokens = total - seq.num_cached, None if self.runtime.stateful else PROMPT_CHUNK
        while left:
            if report is not None:
                report(total - left, total)
            left = self.prefill(seq, max_tokens)
        if report is not None:
            report(total, total)

    def admit(self, seq: SequenceState) -> bool:
        """Give a sequence a cache row and slots for its tokens; return False if none is free now. `prefill` prefills.

        Raises `SelfspecError` if no cache can ever be allocated for its length.
        """
        # A drafter that reads hidden states needs those of all prompt tokens, so no prefix may be skipped.
        if not self.memory.claim(seq, reuse=self.reuse and not self.drafter.hidden):
            return False
        self._overlapped.discard()  # the cache may have been replaced by a larger one
        self._prefilling[seq] = []
        return True

    def prefill(self, seq: SequenceState, max_tokens: int | None = None) -> int:
        """Prefill at most `max_tokens` tokens (None: all) of an admitted sequence; return how many tokens are left.

        Once no token is left, the sequence takes rounds. Its first round emits the token that the logits of the last
        pass choose: it drafts nothing and runs no pass.
        """
        self.runtime.turn_lock.note_progress()
        passes, cache, last = self._prefilling[seq], self.runtime.cache, len(seq.tokens) - 1
        start = cache.length[seq.row]
        end = last + 1 if max_tokens is None else min(start + max_tokens, last + 1)
        tokens = torch.tensor([seq.tokens[start:end]], dtype=torch.long, device=self.runtime.device)
        output = self.runtime.forward(
            tokens,
            start,
            rows=slice(seq.row, seq.row + 1),
            logits="last" if end > last else None,
            hidden=self.drafter.hidden,
        )
        if start < last:
            passes.append(ForwardOutput(None, output.hidden).part(0, min(end, last) - start))
        cache.commit(seq.row, range(end - start - 1))
        self.memory.mark_cached(seq)
        if end > last:
            self._running.append(seq)
            del self._prefilling[seq]
            self._prefilled.outputs[seq] = output.last()
            self.drafter.begin(seq, joined(passes))  # the output for the last token comes with the first outcome
        return last + 1 - end

    def leave(self, seq: SequenceState) -> None:
        """Remove a sequence that has not ended; its tokens stay as they are. A sequence that ended has left already."""
        begun = seq not in self._prefilling
        if begun:
            self._running.remove(seq)
        else:
            del self._prefilling[seq]
        self._prefilled.outputs.pop(seq, None)
        self.memory.release(seq)
        if begun:
            self.drafter.end(seq)

    def step(self) -> list[tuple[SequenceState, Outcome]]:
        """Run one round of the `prefilled` sequences, or else of all that may emit; sequences that end in it leave.

        A round of `prefilled` sequences runs no pass.
        """
        self.runtime.turn_lock.note_progress()
        limits = dict.fromkeys(self.prefilled, Limit(0)) or self._limits()
        seqs = list(limits)
        if not seqs:
            return []
        if self.prefilled:
            outcomes = one_round(self._prefilled, self.drafter, seqs, list(limits.values()))
            self._prefilled.outputs.clear()
        elif (on_device := self._overlapped.step(limits, ahead=not self._prefilling)) is not None:
            outcomes = on_device
        else:
            outcomes = one_round(self._checker, self.drafter, seqs, list(limits.values()))
        for seq in seqs:
            self.memory.mark_cached(seq)
            if not seq.remaining:
                self.leave(seq)
        return list(zip(seqs, outcomes, strict=True))

    def _limits(self) -> dict[SequenceState, Limit]:
        """Return each sequence's draft limit in this round, by its remaining tokens and its cache slots.

        Sequences are served in order of admission. If a sequence lacks a slot for a committed token, the most recently
        admitted sequence is preempted.
        """
        limits: dict[SequenceState, Limit] = {}
        for seq in self.running:
            if seq not in self._running or not seq.remaining:
                continue
            depth, written = min(seq.remaining - 1, WIDEST_DRAFT), len(seq.tokens)
            if not self.memory.grow(seq, written + WIDEST_DRAFT):
                while not self.memory.grow(seq, written):
                    self._evict((*self._running, *self._prefilling)[-1])
                    if seq not in self._running:
                        break
            if seq in self._running:
                nodes = min(self.memory.capacity(seq) - written, WIDEST_DRAFT)
                limits[seq] = Limit(min(depth, nodes), nodes)
        return limits

    def _evict(self, seq: SequenceState) -> None:
        """Preempt a sequence: free all its resources; it must join again."""
        self.leave(seq)
        self.preempted.append(seq)


def decode(
    runtime: Runtime,
    drafter: Drafter,
    seq: SequenceState,
    *,
    rule: Rule | None = None,
    stop: Callable[[int], bool] | None = None,
    reuse: bool | Callable[[], bool] = False,
    on_prefill: OnPrefill | None = None,
) -> Generator[Outcome]:
    """Decode one sequence, a round at a time; each yielded `Outcome` holds the tokens that the round emitted.

    Ends at an end-of-sequence token, when `seq.remaining` is 0, or when `stop` returns True; no token is emitted after
    that. `stop` is called once for each emitted token in order. `rule` and `stop`, if set, replace `seq.rule` and
    `seq.stop`. With `reuse`, a cached prefix, left by an earlier sequence with `reuse`, is not prefilled again. The
    first round emits the token that follows the prompt, without a draft or a pass of its own. `on_prefill` is as in
    `Engine.join`. Raises `BusyError` while another generation uses the runtime.
    """
    seq.rule, seq.stop = rule or seq.rule, stop or seq.stop
    with Engine(runtime, drafter, reuse=reuse) as engine:
        engine.join(seq, on_prefill)
        while seq.remaining:
            ((_, outcome),) = engine.step()
            yield outcome
