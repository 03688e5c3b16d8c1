"""Many prompts at once: they wait, are read, take rounds together, and leave; who leaves is followed at once."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import BatchDraftScheduler
from selfspec.drafters import make_guarded
from selfspec.drafters.batch_policy import chain_of, decide_together, reads_blocks, runtime_of
from selfspec.drafters.plain import PlainDrafter
from selfspec.engine.engine import Engine
from selfspec.llm.batch_costs import load_prices
from selfspec.llm.batch_memory import runtime_for, slot_bytes
from selfspec.llm.options import Options
from selfspec.llm.request import Model, Request
from selfspec.profile.schema import Profile
from selfspec.runtime.forward import Runtime
from selfspec.speculation.drafter import Drafter
from selfspec.speculation.drafts import Outcome
from selfspec.speculation.sequence import SequenceState
from selfspec.text.prompt import Prompt
from selfspec.types.draft_work import GUESSED

CHUNK = 512  # tokens of a prompt that are read at once where nobody waits for a round
ROUNDS, LEAST = 4.0, 128  # else: what takes as long as so many rounds, but no fewer tokens


class Profiled(Model, Protocol):
    """What a batch asks of an `LLM`."""

    runtime: Runtime
    profile: Profile | None
    drafter: Drafter


@dataclass(slots=True)
class BatchCounters:
    """What was done since the start.

    `by_source`: accepted tokens by what came up with them; `drafted_by_load`: drafted tokens that were verified, by how
    many sequences took rounds together; `reused`: tokens of prompts whose keys were there; `evicted`: how often a
    sequence was driven out and is read again.
    """

    requests: int = 0
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    reused: int = 0
    evicted: int = 0
    by_source: Counter[str] = field(default_factory=Counter)
    drafted_by_load: Counter[int] = field(default_factory=Counter)

    def see(self, rows: int, outcome: Outcome) -> None:
        """A sequence took a round among so many."""
        draft = outcome.draft
        self.tokens += len(outcome.tokens)
        self.drafted += len(draft)
        self.accepted += outcome.accepted
        self.drafted_by_load[rows] += len(draft)
        if draft.sources:
            self.by_source.update(draft.sources[node] for node in outcome.path[: outcome.accepted])


class Batch:
    """Decodes many prompts together, `rows` of them at most at a time; a context manager.

    Each gives the text that it gives alone: greedy, and with a seed under rule `match`. `add` lets a prompt wait;
    `step` does the next piece of work: who waits is given room, a chunk of a prompt is read, and all that are read take
    a round. `memory`: GiB for keys and values, of a draft model too; left out, enough for `rows` texts of 2,048 tokens,
    and no more than half of what is free. How much is drafted is decided for all of a round together, by what rounds
    were measured to take here when the batch was entered; with `adaptive` False each sequence's controller decides
    alone. Requests of one adapter run together; who comes first with another waits until they end, and all after it
    wait, too. `make`: another drafter than the profile's, for the batch's runtime.

    Raises `SelfspecError` where there is not the memory for one row.
    """

    def __init__(
        self,
        llm: Profiled,
        *,
        rows: int = 8,
        memory: float | None = None,
        adaptive: bool = True,
        make: Callable[[Runtime], Drafter] | None = None,
    ) -> None:
        self.llm = llm
        self.counters = BatchCounters()
        self._runtime, self._drafter = _made(llm, rows, memory, make)
        self._load: BatchDraftScheduler | None = None
        self._adaptive = adaptive and self._drafter.drafts
        self._own = make is None  # what the profile tells is of this drafter
        self._engine = Engine(self._runtime, self._drafter, reuse=True)
        self._adapter = llm.adapters.named(None)
        self._waiting: deque[Request] = deque()
        self._requests: dict[SequenceState, Request] = {}
        self._held = ExitStack()

    def __enter__(self) -> Self:
        if self._adaptive:
            prices, profile = load_prices(self._runtime, chain_of(self._drafter)), self.llm.profile
            told = profile.predicted if profile is not None and self._own else None
            self._load = (
                BatchDraftScheduler(prices) if told is None else BatchDraftScheduler(prices, first=told.acceptance_rate)
            )
            decide_together(self._drafter, self._load)
        self._held.enter_context(self._engine)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._waiting.clear()
        self._requests.clear()
        self._held.close()

    @property
    def waiting(self) -> Sequence[Request]:
        """Those that have no room yet, first come first."""
        return tuple(self._waiting)

    @property
    def running(self) -> Sequence[Request]:
        """Those that are read, or take rounds."""
        return tuple(self._requests.values())

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._waiting and not self._requests

    @property
    def rows(self) -> int:
        """The most that take rounds together."""
        return self._runtime.rows

    @property
    def places(self) -> int:
        """Tokens whose keys and values there is room for."""
        return self._engine.memory.places

    @property
    def free(self) -> int:
        """Of these, those that nobody has."""
        return self._engine.memory.free

    def add(self, prompt: Prompt, options: Options, *, probabilities: bool = False, top: int | None = None) -> Request:
        """Let a prompt wait for its turn.

        `probabilities`: its events hold the model's own; `top`: log probabilities are kept of its tokens, and of so
        many of the likeliest at each place. Raises `SelfspecError` for a wrong option, for a prompt that outgrows the
        context, and where all memory would not hold it.
        """
        request = Request(self.llm, prompt, options, probabilities=probabilities, top=top)
        needed, longest = len(request.prompt) + request.seq.remaining, self._engine.memory.longest
        if needed > longest:
            raise SelfspecError(
                f"a prompt of {len(request.prompt)} tokens and {request.seq.remaining} new ones need {needed} places "
                f"for keys and values, and one sequence may have {longest}; give more memory, or ask for fewer tokens"
            )
        self._waiting.append(request)
        self.counters.requests += 1
        return request

    def cancel(self, request: Request) -> None:
        """End a request now: its row and its memory are free. One that is over stays as it is."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request.seq in self._requests:
            self._engine.leave(request.seq)
            del self._requests[request.seq]
        else:
            return
        request.end()

    def step(self) -> list[Request]:
        """The next piece of work; those that something happened to."""
        self._admit()
        self.llm.adapters.use(self._adapter)  # others may have used the model meanwhile
        read = self._read()
        return [*read, *self._round()]

    def _admit(self) -> None:
        if self._waiting and not self._requests and self._waiting[0].adapter != self._adapter:
            self._turn(self._waiting[0].adapter)
        while self._waiting and self._waiting[0].adapter == self._adapter and self._engine.admit(self._waiting[0].seq):
            request = self._waiting.popleft()
            self._requests[request.seq] = request
            self.counters.reused += request.seq.num_cached
            request.admitted()

    def _turn(self, adapter: str) -> None:
        """Go on with another adapter, while nothing runs: keys that were made by one serve no other."""
        self._held.close()
        for row in range(self._runtime.rows):
            self._runtime.cache.clear(row)
        self._engine, self._adapter = Engine(self._runtime, self._drafter, reuse=True), adapter
        self._held.enter_context(self._engine)

    def _read(self) -> list[Request]:
        """A chunk of the prompt of who came first; what it fails with ends that request alone."""
        if not self._engine.reading:
            return []
        seq = self._engine.reading[0]
        try:
            while self._engine.read(seq, self._chunk()):
                if self._engine.running:
                    break
        except Exception as error:
            return [self._failed(seq, error)]
        return []

    def _chunk(self) -> int:
        running = len(self._engine.running)
        if not running or self._load is None:
            return CHUNK if not running else LEAST
        prices, tokens = self._load.prices, LEAST
        while tokens < CHUNK and prices.verified(2 * tokens) <= ROUNDS * prices.verified(running):
            tokens *= 2
        return tokens

    def _round(self) -> list[Request]:
        rows = len(self._engine.running)
        if not rows:
            return []
        start = time.perf_counter()
        try:
            outcomes = self._stepped(rows)
            seconds = time.perf_counter() - start
            found = self._take(outcomes, rows)
            if self._load is not None:
                self._load.took(seconds)
            return found
        except Exception as error:
            return self._tell_apart(error)

    def _stepped(self, rows: int) -> list[tuple[SequenceState, Outcome]]:
        if self._load is not None:
            self._load.begin(rows, len(self._engine.reading))
        outcomes = self._engine.step()
        self._requeue(self._engine.evicted)
        self._engine.evicted = []
        return outcomes

    def _take(self, outcomes: Sequence[tuple[SequenceState, Outcome]], rows: int) -> list[Request]:
        """What a round of so many brought."""
        self.counters.rounds += 1
        found = []
        for seq, outcome in outcomes:
            self.counters.see(rows, outcome)
            if self._load is not None:
                drafted = 0 if outcome.draft.work == GUESSED else outcome.draft.depth
                self._load.see(drafted, outcome.accepted, len(outcome.tokens), nodes=len(outcome.draft))
            request = self._requests[seq]
            request.take_round(outcome)
            found.append(request)
            if not seq.remaining:
                del self._requests[seq]
                request.end()
        return found

    def _requeue(self, seqs: Sequence[SequenceState]) -> None:
        """They wait again, before all others."""
        self.counters.evicted += len(seqs)
        self._waiting.extendleft(self._requests.pop(seq) for seq in seqs)

    def _tell_apart(self, error: Exception) -> list[Request]:
        """A round failed: who fails alone, too, ends; the others go on."""
        suspects = list(self._engine.running)
        if len(suspects) == 1:
            return [self._failed(suspects[0], error)]
        for seq in suspects:
            self._engine.leave(seq)
        found = []
        for seq in suspects:
            try:
                self._engine.join(seq)
                found += self._take(self._stepped(1), 1)
                if seq in self._engine.running:
                    self._engine.leave(seq)
            except Exception as own:
                found.append(self._failed(seq, own))
        self._requeue([seq for seq in reversed(suspects) if seq in self._requests])
        return found

    def _failed(self, seq: SequenceState, error: Exception) -> Request:
        if seq in (*self._engine.running, *self._engine.reading):
            self._engine.leave(seq)
        request = self._requests.pop(seq)
        said = error if isinstance(error, SelfspecError) else SelfspecError(f"{type(error).__name__}: {error}")
        request.end(said)
        return request


def _made(
    llm: Profiled, rows: int, memory: float | None, make: Callable[[Runtime], Drafter] | None
) -> tuple[Runtime, Drafter]:
    """The batch's runtime, and what drafts on it; a draft model's keys and values share the memory."""
    profile = llm.profile

    def drafter_on(runtime: Runtime) -> Drafter:
        if make is not None:
            return make(runtime)
        return make_guarded(runtime, profile) if profile is not None and profile.drafts else PlainDrafter()

    probe = llm.drafter if make is None else make(llm.runtime)  # by which it is seen what there must be
    other = runtime_of(probe)
    beside = 0 if other is None or other.model is llm.runtime.model else slot_bytes(other)
    blocks = reads_blocks(probe) and (not beside or (other is not None and other.native))
    runtime = runtime_for(llm.runtime, rows=rows, memory=memory, beside=beside, blocks=blocks)
    return runtime, drafter_on(runtime)
