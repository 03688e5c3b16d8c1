"""A request of a batch: its prompt, its sequence, and its results so far."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from selfspec.basics.errors import SelfspecError
from selfspec.llm.options import Options
from selfspec.llm.sampling_plan import Plan, with_deadline
from selfspec.llm.stream import Generation, Spans, count_round, finish_of
from selfspec.models.adapters import Adapters
from selfspec.speculation.drafts import Outcome
from selfspec.speculation.sequence import SequenceState
from selfspec.text.detokenizer import TextStream
from selfspec.text.prompt import Prompt
from selfspec.types.events import Origin
from selfspec.types.stats import Finish, Stats


class Model(Protocol):
    """Interface of the `LLM` that a request uses."""

    tokenizer: Any
    adapters: Adapters

    def encode(self, prompt: Prompt) -> list[int]:
        """Encode a prompt, as `LLM.encode`."""

    def check_fits(self, prompt: Prompt, options: Options) -> None:
        """Check a prompt's length, as `LLM.check_fits`."""

    def plan(self, prompt: Prompt, options: Options) -> Plan:
        """Resolve the options for a prompt, as `LLM.plan`."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a token from the raw logits, and those of the most probable tokens at its position.

    `top`: pairs of token and log probability, the most probable first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Request:
    """One prompt of a batch. `prompt`: its token ids; `seq`: its sequence in the engine.

    Raises `SelfspecError` for prompts and options that `LLM.generate` rejects, and for a seed with a rule whose text
    depends on how the rounds draft.
    """

    def __init__(
        self,
        llm: Model,
        prompt: Prompt,
        options: Options,
        *,
        planned: Plan | None = None,
        probabilities: bool = False,
        top: int | None = None,
    ) -> None:
        self.prompt = llm.encode(prompt)
        self.adapter = llm.adapters.named(options.adapter)
        planned = planned or llm.plan(self.prompt, options)
        if planned.sampler.seeded and not (planned.sampler.greedy or planned.sampler.tied):
            raise SelfspecError(
                f"rule '{options.rule}' with a seed: among others the text would depend on them; expected rule match, "
                "or no seed"
            )
        self._text = TextStream(llm.tokenizer, self.prompt, planned.stops)
        stop = with_deadline(self._text.push, planned.config.max_time)
        self.seq = SequenceState(
            list(self.prompt), planned.max_new_tokens, planned.sampler, planned.ends, rule=planned.rule, stop=stop
        )
        self.tokens: list[int] = []  # new tokens so far
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
        """The text so far, without a tail that may still change."""
        return self._text.text

    @property
    def finish(self) -> Finish | None:
        """Why the text ended; None while it runs, and for an interrupted request."""
        return self.stats.finish

    @property
    def result(self) -> Generation:
        """The generation so far, as `LLM.generate` returns it."""
        return Generation(self.text, list(self.tokens), self.stats, self._text)

    def take(self) -> str:
        """Return the text that is new since the last call."""
        return self._text.take()

    def spans(self) -> list[tuple[Origin, str]]:
        """Return the new text split at token boundaries, each part with its token's origin; use instead of `take`."""
        return list(self._spans.split(self.take()))

    def mark_admitted(self) -> None:
        """Record the admission: the request has a cache row, and its time counts from now."""
        self.stats.num_cached = self.seq.num_cached
        self._since = time.perf_counter()

    def record_round(self, outcome: Outcome) -> None:
        """Record the sequence's outcome of a batch round."""
        now = time.perf_counter()
        count_round(self.stats, outcome, now - self._since, probabilities=self._probabilities)
        self._since = now
        self.tokens += outcome.tokens
        self.stats.finish = self._finish()
        if self._top is not None:
            self.logprobs += logprobs_of(outcome, self._top)

    def end(self, error: SelfspecError | None = None) -> None:
        """Finish the request, with an error if it failed."""
        self._text.finish()
        self.error, self.done = error, True


def logprobs_of(outcome: Outcome, top: int) -> list[TokenLogprobs]:
    """Return the log probabilities of the tokens that a round emitted, each with the `top` most probable tokens."""
    assert outcome.step.logits is not None
    rows = [0, *(node + 1 for node in outcome.path)][: len(outcome.tokens)]
    logits = outcome.step.logits[0, rows]
    every = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    best = every.topk(top) if top else None
    logprobs = []
    for i, token in enumerate(outcome.tokens):
        pairs = () if best is None else zip(best.indices[i].tolist(), best.values[i].tolist(), strict=True)
        logprobs.append(TokenLogprobs(token, float(every[i, token]), tuple(pairs)))
    return logprobs
