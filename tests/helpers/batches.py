"""A batch that decodes without a model: what a prompt is continued with is known, and so is how long a step takes."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from selfspec.basics.errors import SelfspecError
from selfspec.text.detokenizer import TextStream
from selfspec.types.events import Origin
from selfspec.types.stats import Stats

PLACES = 4096


def continued(prompt: Sequence[int], tokens: int) -> list[int]:
    """What a toy batch continues a prompt with: the prompt again, from its end to its beginning, over and over."""
    turned = list(prompt)[::-1]
    return [turned[i % len(turned)] for i in range(tokens)]


@dataclass(eq=False)
class ToyRequest:
    """One text, a token a step; every second one is as if it had been drafted."""

    prompt: list[int]
    options: Any
    pieces: TextStream
    top: int | None
    read: int = 0
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    done: bool = False
    error: SelfspecError | None = None
    stats: Stats = field(default_factory=Stats)
    logprobs: list[Any] = field(default_factory=list)

    def take(self) -> str:
        """The text since the last call."""
        return self.pieces.take()

    def spans(self) -> list[tuple[Origin, str]]:
        """The same with an origin."""
        text = self.take()
        drafted = len(self.tokens) % 2 == 0
        return [(Origin.ACCEPTED_DRAFT if drafted else Origin.PLAIN, text)] if text else []

    @property
    def text(self) -> str:
        """All so far."""
        return self.pieces.text

    def grow(self) -> None:
        """One token more."""
        token = continued(self.prompt, len(self.tokens) + 1)[-1]
        self.tokens.append(token)
        self.stats.tokens, self.stats.rounds = len(self.tokens), len(self.tokens)
        self.stats.drafted = self.stats.accepted = len(self.tokens) // 2
        if self.top is not None:
            best = [(token, math.log(0.5)), (token + 1, -math.inf)][: self.top]
            self.logprobs.append(SimpleNamespace(token=token, logprob=math.log(0.5), top=best))
        stopped = self.pieces.push(token)
        if stopped or len(self.tokens) == self.options.max_new_tokens:
            self.finish, self.done = "stop" if stopped else "length", True
            self.pieces.finish()


class ToyBatch:
    """`Batch` as the server uses it. `seconds`: of a step; `reads`: steps that a prompt takes before its first token;
    `fails`: a prompt token that makes a step fail.
    """

    def __init__(
        self, llm: Any, *, rows: int = 8, seconds: float = 0.0, reads: int = 0, fails: int | None = None
    ) -> None:
        self._reads = reads
        self._llm, self._rows, self._seconds, self._fails = llm, rows, seconds, fails
        self.running: list[ToyRequest] = []
        self.waiting: list[ToyRequest] = []
        self.most = 0  # that ever ran together
        self.num_slots = self.max_seq_len = PLACES
        self.counters = SimpleNamespace(
            rounds=0,
            tokens=0,
            drafted=0,
            accepted=0,
            by_source=Counter[str](),
            drafted_by_load=Counter[int](),
            reused=0,
            evicted=0,
        )

    def __enter__(self) -> ToyBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.running.clear()

    @property
    def free(self) -> int:
        """Places that nobody has."""
        return self.num_slots - sum(len(one.prompt) + len(one.tokens) for one in self.running)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.running or self.waiting)

    def add(self, prompt: Any, options: Any, *, planned: Any = None, top: int | None = None) -> ToyRequest:
        """As `Batch.add`."""
        if len(prompt) > PLACES // 8:
            raise SelfspecError(f"a prompt of {len(prompt)} tokens never fits")
        pieces = TextStream(self._llm.tokenizer, prompt, options.stop)
        self.waiting.append(ToyRequest(list(prompt), options, pieces, top))
        return self.waiting[-1]

    def cancel(self, request: ToyRequest) -> None:
        """As `Batch.cancel`."""
        request.done = True
        self.running = [one for one in self.running if one is not request]
        self.waiting = [one for one in self.waiting if one is not request]

    def step(self) -> list[ToyRequest]:
        """As `Batch.step`."""
        while self.waiting and len(self.running) < self._rows:
            self.running.append(self.waiting.pop(0))
        self.most = max(self.most, len(self.running))
        if any(self._fails in one.prompt for one in self.running):
            raise RuntimeError("a toy's failure")
        time.sleep(self._seconds)
        for request in self.running:
            request.read += 1
        touched = [request for request in self.running if request.read > self._reads]
        for request in touched:
            request.grow()
        self.counters.rounds += 1
        self.counters.tokens += len(touched)
        self.counters.drafted += len(touched)
        self.counters.accepted += len(touched)
        self.counters.by_source["draft path"] += len(touched)
        self.counters.drafted_by_load[len(touched)] += len(touched)
        self.running = [one for one in self.running if not one.done]
        return touched
