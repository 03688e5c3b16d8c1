"""A prompt of a batch: while it waits, is read and decoded, and what came of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from selfspec.basics.errors import SelfspecError
from selfspec.llm.options import Options
from selfspec.llm.sampling_plan import Plan, timed
from selfspec.llm.stream import Generation, Spans, count_round, finish_of
from selfspec.models.adapters import Adapters
from selfspec.speculation.drafts import Outcome
from selfspec.speculation.sequence import SequenceState
from selfspec.text.detokenizer import TextStream
from selfspec.text.prompt import Prompt
from selfspec.types.events import Origin
from selfspec.types.stats import Finish, Stats


class Model(Protocol):
    """What a request asks of an `LLM`."""

    tokenizer: Any
    adapters: Adapters

    def encode(self, prompt: Prompt) -> list[int]:
        """`LLM.encode`."""

    def plan(self, prompt: Prompt, options: Options) -> Plan:
        """`LLM.plan`."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log probability, of the raw logits, and those of the likeliest at its place, the likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Request:
    """One prompt of a batch. `prompt`: its token ids; `seq`: what the engine decodes.

    Raises `SelfspecError` for what `LLM.generate` refuses, and for a seed with a rule whose text depends on the rounds
    that are taken.
    """

    def __init__(
        self, llm: Model, prompt: Prompt, options: Options, *, probabilities: bool = False, top: int | None = None
    ) -> None:
        self.prompt = llm.encode(prompt)
        self.adapter = llm.adapters.named(options.adapter)
        planned = llm.plan(self.prompt, options)
        if planned.sampler.seeded and not (planned.sampler.greedy or planned.sampler.tied):
            raise SelfspecError(
                f"rule '{options.rule}' with a seed: among others the text would depend on them; expected rule match, "
                "or no seed"
            )
        self._text = TextStream(llm.tokenizer, self.prompt, planned.stops)
        stop = timed(self._text.push, planned.config.max_time)
        self.seq = SequenceState(
            list(self.prompt), planned.max_new_tokens, planned.sampler, planned.ends, rule=planned.rule, stop=stop
        )
        self.tokens: list[int] = []  # new ones so far
        self.stats = Stats(prompt=len(self.prompt))
        self.error: SelfspecError | None = None
        self.done = False
        self.logprobs: list[TokenLogprobs] = []
        self._probabilities, self._top = probabilities, top
        self._spans = Spans(self._text, self.stats)
        self._finish = finish_of(self.seq, self._text, self.tokens, guided=options.guide is not None)
        self._since = time.perf_counter()

    @property
    def text(self) -> str:
        """All text so far that may be shown."""
        return self._text.text

    @property
    def finish(self) -> Finish | None:
        """Why the text ended; None while it has not, and where it was broken off."""
        return self.stats.finish

    @property
    def result(self) -> Generation:
        """What came of it so far, as `LLM.generate` gives it."""
        return Generation(self.text, list(self.tokens), self.stats, self._text)

    def take(self) -> str:
        """The text that has come since the last call."""
        return self._text.take()

    def spans(self) -> list[tuple[Origin, str]]:
        """The same, cut where the tokens meet, each with its token's origin; instead of `take`."""
        return list(self._spans.of(self.take()))

    def admitted(self) -> None:
        """It has a row now; what it takes is counted from here."""
        self.stats.kept = self.seq.num_cached
        self._since = time.perf_counter()

    def take_round(self, outcome: Outcome) -> None:
        """A round that it took among others."""
        now = time.perf_counter()
        count_round(self.stats, outcome, now - self._since, probabilities=self._probabilities)
        self._since = now
        self.tokens += outcome.tokens
        self.stats.finish = self._finish()
        if self._top is not None:
            self.logprobs += logprobs_of(outcome, self._top)

    def end(self, error: SelfspecError | None = None) -> None:
        """It is over, well or not."""
        self._text.finish()
        self.error, self.done = error, True


def logprobs_of(outcome: Outcome, top: int) -> list[TokenLogprobs]:
    """Of the tokens that a round emitted."""
    assert outcome.step.logits is not None
    rows = [0, *(node + 1 for node in outcome.path)][: len(outcome.tokens)]
    logits = outcome.step.logits[0, rows]
    every = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    best = every.topk(top) if top else None
    found = []
    for i, token in enumerate(outcome.tokens):
        pairs = () if best is None else zip(best.indices[i].tolist(), best.values[i].tolist(), strict=True)
        found.append(TokenLogprobs(token, float(every[i, token]), tuple(pairs)))
    return found
