"""Continuous batching: requests wait, are prefilled, are decoded in joint rounds, and leave between rounds."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from selfspec.basics.errors import SelfspecError
from selfspec.basics.machine import clock
from selfspec.controllers import BatchDraftScheduler
from selfspec.drafters import make_guarded
from selfspec.drafters.batch_policy import (
    chain_of,
    decide_together,
    int8_cache_runtimes,
    reads_blocks,
    runtime_of,
)
from selfspec.drafters.controlled import PlainDrafter
from selfspec.engine.engine import Engine
from selfspec.llm.batch_costs import measure_round_costs
from selfspec.llm.batch_memory import copy_bytes, runtime_for, slot_bytes
from selfspec.llm.options import Options
from selfspec.llm.request import Model, Request, TokenLogprobs, prompt_logprobs
from selfspec.llm.sampling_plan import Plan
from selfspec.profile.schema import Profile
from selfspec.runtime.base import Runtime
from selfspec.speculation.drafter import Drafter
from selfspec.speculation.drafts import Outcome
from selfspec.speculation.sequence import SequenceState
from selfspec.text.prompt_template import Prompt
from selfspec.types.draft_work import GUIDE, LOOKUP_WORK
from selfspec.types.stats import Counts

CHUNK = 512  # prefill chunk in tokens while no sequence is being decoded
ROUNDS, MIN_CHUNK = 4.0, 128  # while sequences decode: highest cost of a chunk, in rounds; smallest chunk, in tokens


class BatchModel(Model, Protocol):
    """The attributes and methods of `LLM` that a batch uses."""

    model: Any
    runtime: Runtime
    profile: Profile | None
    drafter: Drafter


@dataclass(slots=True)
class BatchCounters(Counts):
    """Counters since the start of a batch.

    `drafted` counts the drafted tokens that were verified. `requests`: queued prompts. `reused`: prompt tokens found in
    the KV cache. `evicted`: preemptions, after each of which a sequence is prefilled again. `by_source`: accepted
    tokens by the name of the proposer or draft path. `drafted_by_load`: verified drafted tokens by the number of
    sequences in the round.
    """

    requests: int = 0
    reused: int = 0
    evicted: int = 0
    by_source: Counter[str] = field(default_factory=Counter)
    drafted_by_load: Counter[int] = field(default_factory=Counter)

    def record(self, rows: int, outcome: Outcome) -> None:
        """Count one sequence's round in a batch of `rows` sequences."""
        draft = outcome.draft
        self.tokens += len(outcome.tokens)
        self.drafted += len(draft)
        self.accepted += outcome.accepted
        self.drafted_by_load[rows] += len(draft)
        if draft.sources:
            self.by_source.update(draft.sources[node] for node in outcome.path[: outcome.accepted])


class Batch:
    """Continuous batching of many prompts, at most `rows` at a time; a context manager.

    Greedy text, and seeded text under rule `match`, does not depend on the other prompts of the batch. `add` queues a
    prompt; `step` admits waiting requests, prefills a chunk of one prompt, and runs one round of all prefilled
    sequences. If the chunk is a prompt's last, `step` emits that prompt's first token instead, and the next step runs
    the round without a chunk before it. Requests with the same adapter run together; the first request with another
    adapter, and all requests after it, wait until the running requests have ended.

    `memory`: GiB for the KV cache, including a draft model's; by default enough for `rows` texts of 2,048 tokens and
    for one text of `longest` tokens, but at most half of the available memory. `longest`: tokens of the longest
    sequence; by default the context length if sequences share one pool of blocks, else 2,048. `adaptive`: decide the
    draft lengths for all sequences of a round together, by round costs that are measured when the batch is entered;
    False: each sequence's controller decides alone. `make`: builds the drafter on the batch's runtime; None: the
    drafter is the profile's.

    Raises `SelfspecError` if there is not enough memory for one row.
    """

    def __init__(
        self,
        llm: BatchModel,
        *,
        rows: int = 8,
        memory: float | None = None,
        longest: int | None = None,
        adaptive: bool = True,
        make: Callable[[Runtime], Drafter] | None = None,
    ) -> None:
        self.llm = llm
        self.counters = BatchCounters()
        self._runtime, self._drafter = _made(llm, rows, memory, longest, make)
        self._scheduler: BatchDraftScheduler | None = None
        self._adaptive = adaptive and self._drafter.drafts
        self._own = make is None  # the profile's predicted acceptance rate is only for the profile's drafter
        self._engine = Engine(self._runtime, self._drafter, reuse=True)
        self._adapter = llm.adapters.named(None)
        self._waiting: deque[Request] = deque()
        self._requests: dict[SequenceState, Request] = {}
        self._owed = False  # whether the last step emitted a first token, while the other sequences waited
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        if self._adaptive:
            prices, profile = measure_round_costs(self._runtime, chain_of(self._drafter)), self.llm.profile
            predicted = profile.predicted if profile is not None and self._own else None
            self._scheduler = (
                BatchDraftScheduler(prices)
                if predicted is None
                else BatchDraftScheduler(prices, first=predicted.acceptance_rate)
            )
            decide_together(self._drafter, self._scheduler)
        self._resources.enter_context(self._engine)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._waiting.clear()
        self._requests.clear()
        self._resources.close()

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests that are not admitted yet, in the order in which they will be."""
        return tuple(self._waiting)

    @property
    def running(self) -> Sequence[Request]:
        """Admitted requests, in prefill or decoding."""
        return tuple(self._requests.values())

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._waiting and not self._requests

    @property
    def rows(self) -> int:
        """The maximum number of sequences in a round."""
        return self._runtime.rows

    @property
    def num_slots(self) -> int:
        """Capacity of the KV cache in tokens."""
        return self._engine.memory.num_slots

    @property
    def max_seq_len(self) -> int:
        """The most tokens of one sequence whose keys and values the cache can hold."""
        return self._engine.memory.max_seq_len

    @property
    def free(self) -> int:
        """Unused capacity of the KV cache in tokens."""
        return self._engine.memory.free

    def add(self, prompt: Prompt, options: Options, *, planned: Plan | None = None, top: int | None = None) -> Request:
        """Queue a prompt, and return its request.

        `planned`: the plan of this prompt and these options, for this request only; None: the plan is made here.
        `top`: keep the log probability of each new token, and those of the `top` most probable tokens at each position
        (None: keep none). Raises `SelfspecError` for a wrong option, for a prompt that exceeds the context length, and
        if prompt and new tokens need more slots than the KV cache has.
        """
        request = Request(self.llm, prompt, options, planned=planned, top=top)
        self.check_fits(len(request.prompt), request.seq.remaining)
        self._waiting.append(request)
        self.counters.requests += 1
        return request

    def check_fits(self, prompt: int, new: int) -> None:
        """Raise `SelfspecError` if the KV cache has too few slots for `prompt` prompt tokens and `new` new tokens."""
        needed, longest = prompt + new - 1, self.max_seq_len
        if needed > longest:
            raise SelfspecError(
                f"a prompt of {prompt} tokens and {new} new ones need {needed} slots "
                f"of the KV cache, and one sequence may have {longest}; give more memory, or ask for fewer tokens"
            )

    def prompt_logprobs(self, prompt: Sequence[int], options: Options, top: int) -> list[TokenLogprobs]:
        """Return the log probabilities of a prompt's tokens, as `request.prompt_logprobs`, by the options' adapter."""
        adapters, name = self.llm.adapters, self.llm.adapters.named(options.adapter)
        with ExitStack() as stack:

            def begin() -> bool:
                stack.enter_context(adapters.active(name))
                return False

            return prompt_logprobs(self.llm.runtime, prompt, top, reuse=begin)

    def cancel(self, request: Request) -> None:
        """End a request now and free its cache row. A request that has ended is unchanged."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request.seq in self._requests:
            self._engine.leave(request.seq)
            del self._requests[request.seq]
        else:
            return
        request.end()

    def step(self) -> list[Request]:
        """Admit requests, prefill one chunk and run one round; return the requests that progressed or failed."""
        refused = self._admit()
        with self.llm.adapters.active(self._adapter):
            read = self._prefill()
            return [*refused, *read, *self._round()]

    def _admit(self) -> list[Request]:
        """Admit the requests at the head of the queue that fit; return those for which no cache can be allocated."""
        refused = []
        if self._waiting and not self._requests and self._waiting[0].adapter != self._adapter:
            self._turn(self._waiting[0].adapter)
        while self._waiting and self._waiting[0].adapter == self._adapter:
            request = self._waiting[0]
            try:
                if not self._engine.admit(request.seq):
                    break
            except SelfspecError as error:
                self._waiting.popleft().end(error)
                refused.append(request)
                continue
            self._waiting.popleft()
            self._requests[request.seq] = request
            self.counters.reused += request.seq.num_cached
            request.mark_admitted()
        return refused

    def _turn(self, adapter: str) -> None:
        """Switch to another adapter while no request runs; clear the KV cache, whose keys are of the old adapter."""
        self._resources.close()
        for row in range(self._runtime.rows):
            self._runtime.cache.clear(row)
        self._engine, self._adapter = Engine(self._runtime, self._drafter, reuse=True), adapter
        self._resources.enter_context(self._engine)

    def _prefill(self) -> list[Request]:
        """Prefill a chunk of the first admitted prompt; an error ends that request alone.

        No chunk is read while the running sequences are owed a round, so that they wait for one chunk at most.
        """
        if not self._engine.prefilling or (self._owed and self._engine.running):
            return []
        seq = self._engine.prefilling[0]
        try:
            while self._engine.prefill(seq, None if self._runtime.stateful else self._chunk()):
                if self._engine.running:
                    break
        except Exception as error:
            return [self._failed(seq, error)]
        return []

    def _chunk(self) -> int:
        running = len(self._engine.running)
        if not running or self._scheduler is None:
            return CHUNK if not running else MIN_CHUNK
        prices, tokens = self._scheduler.prices, MIN_CHUNK
        while tokens < CHUNK and prices.verified(2 * tokens) <= ROUNDS * prices.verified(running):
            tokens *= 2
        return tokens

    def _round(self) -> list[Request]:
        rows = len(self._engine.running)
        self._owed = bool(self._engine.prefilled)
        if not rows:
            return []
        scheduler = None if self._owed else self._scheduler  # a first token takes no pass
        start = clock()
        try:
            if scheduler is not None:
                scheduler.begin(rows, len(self._engine.prefilling))
            outcomes = self._stepped()
            seconds = clock() - start
            requests = self._record(outcomes, rows, scheduler)
            if scheduler is not None:
                scheduler.record_duration(seconds)
            return requests
        except Exception as error:
            return self._retry_alone(error)

    def _stepped(self) -> list[tuple[SequenceState, Outcome]]:
        try:
            return self._engine.step()
        finally:
            self._requeue(self._engine.preempted)
            self._engine.preempted = []

    def _record(
        self,
        outcomes: Sequence[tuple[SequenceState, Outcome]],
        rows: int,
        scheduler: BatchDraftScheduler | None = None,
    ) -> list[Request]:
        """Record the outcomes of a round of `rows` sequences, for the scheduler too; return their requests."""
        self.counters.rounds += 1
        requests = []
        for seq, outcome in outcomes:
            self.counters.record(rows, outcome)
            if scheduler is not None:
                drafted = 0 if outcome.draft.work == LOOKUP_WORK else outcome.draft.depth
                accepted = 0 if GUIDE in outcome.draft.sources else outcome.accepted  # nobody looked these up
                scheduler.record_draft(drafted, accepted, len(outcome.tokens), nodes=len(outcome.draft))
            request = self._requests[seq]
            requests.append(request)
            try:
                request.record_round(outcome)
                if not seq.remaining:
                    request.end()
                    del self._requests[seq]
            except Exception as error:
                self._failed(seq, error)
        return requests

    def _requeue(self, seqs: Sequence[SequenceState]) -> None:
        """Return preempted sequences to the front of the queue."""
        self.counters.evicted += len(seqs)
        self._waiting.extendleft(self._requests.pop(seq) for seq in seqs)

    def _retry_alone(self, error: Exception) -> list[Request]:
        """Handle a failed round: run each sequence alone, end those that fail again, and requeue the others."""
        suspects = list(self._engine.prefilled or self._engine.running)
        if len(suspects) == 1:
            return [self._failed(suspects[0], error)]
        for seq in suspects:
            self._engine.leave(seq)
        requests = [self._requests[seq] for seq in suspects]
        for seq, request in zip(suspects, requests, strict=True):
            try:
                request.record_unreported()
                if not seq.remaining:
                    request.end()
                    del self._requests[seq]
                    continue
                self._engine.join(seq)
                for _ in range(2):  # the first round drafts nothing
                    if seq in self._engine.running:
                        self._record(self._stepped(), 1)
                if seq in self._engine.running:
                    self._engine.leave(seq)
            except Exception as own:
                self._failed(seq, own)
        self._requeue([seq for seq in reversed(suspects) if seq in self._requests])
        return requests

    def _failed(self, seq: SequenceState, error: Exception) -> Request:
        if seq in (*self._engine.running, *self._engine.prefilling):
            self._engine.leave(seq)
        request = self._requests.pop(seq)
        failure = error if isinstance(error, SelfspecError) else SelfspecError(f"{type(error).__name__}: {error}")
        request.end(failure)
        return request


def _made(
    llm: BatchModel,
    rows: int,
    memory: float | None,
    longest: int | None,
    make: Callable[[Runtime], Drafter] | None,
) -> tuple[Runtime, Drafter]:
    """Build the batch's runtime and drafter, which `make` or the profile describes.

    `memory`: GiB for the KV cache of the model with its int8 copies, if drafts read any, and, if the drafter has a
    draft model, of the draft model.
    """
    profile = llm.profile

    def drafter_on(runtime: Runtime) -> Drafter:
        if make is not None:
            return make(runtime)
        return (
            make_guarded(runtime, profile, together=True) if profile is not None and profile.drafts else PlainDrafter()
        )

    probe = llm.drafter if make is None else make(llm.runtime)  # shows which caches the drafter needs
    other = runtime_of(probe)
    draft_slot_bytes = 0 if other is None or other.model is llm.runtime.model else slot_bytes(other)
    blocks = reads_blocks(probe) and (not draft_slot_bytes or (other is not None and other.native))
    copied = [] if blocks else int8_cache_runtimes(probe)
    sizes = [(own.layers, own.skeleton.sizes.kv_heads, own.skeleton.sizes.head_dim) for own in copied]
    extra = draft_slot_bytes + sum(copy_bytes(*each) for each in sizes)
    runtime = runtime_for(llm.runtime, rows=rows, memory=memory, longest=longest, extra_slot_bytes=extra, blocks=blocks)
    return runtime, drafter_on(runtime)
