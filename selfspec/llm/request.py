"""A request of a batch: its prompt, its sequence, its results so far, and the scores of its prompt's own tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.llm.options import Options
from selfspec.llm.sampling_plan import Deadline, Plan
from selfspec.llm.stream import Generation, Spans, count_round, finish_of
from selfspec.models.adapters import Adapters
from selfspec.runtime.base import Runtime
from selfspec.speculation.drafts import Outcome
from selfspec.speculation.sequence import SequenceState
from selfspec.text.detokenizer import TextStream
from selfspec.text.prompt_template import Prompt
from selfspec.types.events import Origin
from selfspec.types.stats import Finish, Round, Stats


class Model(Protocol):
    """The attributes and methods of `LLM` that a request uses."""

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
    """Log probability of a token, computed from the raw logits; None where unknown, as for a first prompt token.

    `top`: pairs of token and log probability, for the most probable tokens at the same position, most probable first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class Request:
    """One prompt of a batch, with its options and its results so far.

    `planned`: the plan of this prompt and these options; None: the plan is made here. `top`: keep the log
    probability of each new token in `logprobs`, and those of the `top` most probable tokens at each position (None:
    keep none).

    Attributes: `prompt`, its token ids; `seq`, its sequence in the engine; `error`, why the request failed; `done`,
    whether the request has ended.

    Raises `SelfspecError` for prompts and options that `LLM.generate` rejects, and for a seed with rule `token` or
    `block`, whose text depends on how the rounds draft.
    """

    def __init__(
        self, llm: Model, prompt: Prompt, options: Options, *, planned: Plan | None = None, top: int | None = None
    ) -> None:
        self.prompt = llm.encode(prompt)
        self.adapter = llm.adapters.named(options.adapter)
        planned = planned or llm.plan(self.prompt, options)
        if planned.sampler.seeded and not (planned.sampler.greedy or planned.sampler.tied):
            raise SelfspecError(
                f"rule '{options.rule}' with a seed: in a batch, the text would depend on the other sequences; "
                "expected rule match, or no seed"
            )
        self._text = TextStream(llm.tokenizer, self.prompt, planned.stops)
        self._deadline = Deadline(self._text.push, planned.config.max_time)
        self.seq = SequenceState(
            list(self.prompt),
            planned.max_new_tokens,
            planned.sampler,
            planned.final_tokens,
            rule=planned.rule,
            stop=self._deadline,
            continuation=planned.continuation,
        )
        self.tokens: list[int] = []  # new tokens so far
        self.stats = Stats(prompt=len(self.prompt))
        self.error: SelfspecError | None = None
        self.done = False
        self.logprobs: list[TokenLogprobs] = []
        self._probabilities, self._top = options.probabilities, top
        self._spans = Spans(self._text, self.stats)
        self._finish = finish_of(
            self.seq, self._text, self.tokens, guided=options.guide is not None, stop_tokens=planned.stop_tokens
        )
        self._since = time.perf_counter()
        self._admitted = False

    @property
    def text(self) -> str:
        """The text so far, without an incomplete character or possible stop string at the end."""
        return self._text.text

    @property
    def finish(self) -> Finish | None:
        """The reason why the text ended; None while the request runs, and for an interrupted request."""
        return self.stats.finish

    @property
    def result(self) -> Generation:
        """The generation so far, as `LLM.generate` returns it."""
        return Generation(self.text, list(self.tokens), self.stats, self._text)

    def take(self) -> str:
        """Return the text that has become ready since the last call of `take` or `spans`."""
        return self._text.take()

    def spans(self) -> list[tuple[Origin, str]]:
        """Return what `take` would return, split at token boundaries, as pairs (origin of a token, text).

        Call only `spans` or only `take` for a request: after text that `take` returned, `spans` returns wrong origins.
        """
        return list(self._spans.split(self.take()))

    def mark_admitted(self) -> None:
        """Record that the engine admitted the request to a cache row; the time of its first round starts now."""
        if not self._admitted:  # afterwards, what it left itself may be cached
            self._deadline.restart()  # waiting for a row is not counted
            self.stats.num_cached, self._admitted = self.seq.num_cached, True
        self._since = time.perf_counter()

    def record_round(self, outcome: Outcome) -> None:
        """Record the outcome that a batch round had for this request's sequence."""
        now = time.perf_counter()
        count_round(self.stats, outcome, now - self._since, probabilities=self._probabilities)
        self._since = now
        self.tokens += outcome.tokens
        self.stats.finish = self._finish()
        if self._top is not None:
            self.logprobs += logprobs_of(outcome, self._top)

    def record_unreported(self) -> None:
        """Record the tokens that a round emitted before it failed, with unknown log probabilities."""
        for token in self.seq.tokens[len(self.prompt) + len(self.tokens) :]:
            self.tokens.append(token)
            self.stats.log.append(Round(drafted=0, accepted=0, tokens=1, seconds=0.0))
            self.stats.rounds, self.stats.tokens = self.stats.rounds + 1, self.stats.tokens + 1
            if self._top is not None:
                self.logprobs.append(TokenLogprobs(token, None))
        self.stats.finish = self._finish()

    def end(self, error: SelfspecError | None = None) -> None:
        """Finish the request, with an error if it failed."""
        try:
            self._text.finish()
        except Exception:
            if error is None:  # else the text stays as far as it could be decoded
                raise
        self.error, self.done = error, True


def logprobs_of(outcome: Outcome, top: int) -> list[TokenLogprobs]:
    """Return the log probability of each token that a round emitted, with the `top` most probable alternatives."""
    assert outcome.step.logits is not None
    rows = [0, *(node + 1 for node in outcome.path)][: len(outcome.tokens)]
    return top_logprobs(outcome.step.logits[0, rows], outcome.tokens, top)


def top_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Return the log probability of each of n `tokens` by `logits` `[n, V]`, with the `top` most probable tokens."""
    every = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    best = every.topk(top) if top else None
    logprobs = []
    for i, token in enumerate(tokens):
        pairs = () if best is None else zip(best.indices[i].tolist(), best.values[i].tolist(), strict=True)
        logprobs.append(TokenLogprobs(token, float(every[i, token]), tuple(pairs)))
    return logprobs


LOGITS = 2**24  # most logits in memory at a time


def prompt_logprobs(
    runtime: Runtime, prompt: Sequence[int], top: int, *, reuse: bool | Callable[[], bool] = False
) -> list[TokenLogprobs]:
    """Return each prompt token's log probability given the tokens before it, by one prefill of the prompt.

    The first token has none. `top`: how many of the most probable tokens at each position to return. `reuse`: as of
    `Runtime.session`. Raises `SelfspecError` if no KV cache can be allocated for the prompt.
    """
    scored = [TokenLogprobs(prompt[0], None)]
    chunk = max(1, LOGITS // (runtime.skeleton.identity.vocabulary or LOGITS))
    with runtime.session(len(prompt), reuse=reuse):
        for start in range(0, len(prompt) - 1, chunk):
            tokens = prompt[start : min(start + chunk, len(prompt) - 1)]
            step = runtime.forward(torch.tensor([tokens], device=runtime.device), start)
            assert step.logits is not None
            scored += top_logprobs(step.logits[0], prompt[start + 1 : start + 1 + len(tokens)], top)
    return scored
