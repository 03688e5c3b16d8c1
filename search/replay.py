"""Parallel replay: compute what speculation would do on a text, without decoding it.

A draft begins at every position of a text (a *start*), and all drafts take their next step in one batched forward. With
greedy decoding, and under rule `match`, the trace equals that of real decoding. Under `token` and `block`, text and
drafts follow the same joint distribution as in real decoding, except for the tokens that `block` drafts after the first
wrong token; none of these tokens is emitted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor

from selfspec.basics.errors import UnsupportedModelError
from selfspec.controllers import Controller
from selfspec.runtime import open_runtime
from selfspec.runtime.base import Runtime
from selfspec.runtime.compiled_path import CompiledPath
from selfspec.speculation.sampling import Sampler, gaps
from selfspec.types.acceptance import PROBABILITY
from selfspec.types.draft_path import FULL, DraftPath, SkipSet, as_path

from .conditional_sampling import Noise, SeededNoise, Uniforms, draft_given_text
from .replay_state import DraftedTokens, PrefilledTexts, Record, ReplayState, Streams, TargetText, confident, with_ties
from .trace import Trace

CHUNK = 192  # starts in one forward
CANDIDATES = 4  # largest number of candidate tokens for each position, the drafted token included
OWN_PLACES = 32  # tokens of each text whose hidden states are read if drafts have a separate KV cache


def check_replayable(runtime: Runtime) -> None:
    """Raise `UnsupportedModelError` if the model takes no attention mask per token, which replays need."""
    if not runtime.trees:
        raise UnsupportedModelError(
            f"{type(runtime.model).__name__} takes no attention mask per token, with which the search replays "
            "many drafts in one pass; expected another model, or objective wallclock"
        )


class Opened(ABC):
    """Base of context managers over the resources that `_open` enters into `_resources`."""

    def __init__(self) -> None:
        self._resources = ExitStack()

    @abstractmethod
    def _open(self) -> None:
        """Enter all resources."""

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.close()


class Replay(Opened):
    """Texts of one model, ready to be replayed along any path; a context manager that holds their KV cache.

    `sampler`: how the texts were decoded, greedily or sampled. `rule`: how sampled drafts are verified; for `match`
    every text must have its seed. `candidates`: the largest number of candidates for each position, the drafted token
    included, for which a sampled trace records the outcome (a greedy trace records it for any number). `depth`: the
    longest draft, in tokens. `chunk`: the number of starts in one forward; counts do not depend on it.
    `noise(ids, depth)` replaces the random choices of sampled drafts, which otherwise follow `seed`. `base_runtime`: a
    runtime of the model, whose quantised weights are reused (None: a new runtime). The attribute `confidence`, which
    may be changed later, says how traces estimate the confidence of each drafted token.

    Drafts read the target's keys and values of all committed tokens, as selfspec's drafters do. With `own_keys` drafts
    read keys and values that the draft path computes, prompt included, as a draft model exported to another engine
    does; every path costs one more pass over the texts.
    """

    def __init__(
        self,
        model: Any,
        texts: Sequence[TargetText],
        *,
        sampler: Sampler | None = None,
        rule: str = "block",
        depth: int = 12,
        candidates: int = CANDIDATES,
        chunk: int = CHUNK,
        seed: int = 0,
        own_keys: bool = False,
        noise: Callable[[Tensor, int], Noise] | None = None,
        base_runtime: Runtime | None = None,
    ) -> None:
        self.texts = tuple(texts)
        self.sampler = sampler or Sampler()
        self._block = rule == "block"
        self._seeded_noise = None
        if rule == "match" and not self.sampler.greedy:
            self._seeded_noise = [SeededNoise(text.seed) for text in self.texts]
        self.depth = depth
        self.candidates = candidates
        self.own_keys = own_keys
        self._group = min(len(self.texts), chunk)  # texts in one forward
        self._each = max(1, chunk // self._group)  # starts of each text in one forward
        self.seed = seed
        self.confidence = PROBABILITY
        self._noise = noise or self._uniforms
        own_runtime = base_runtime or open_runtime(model)
        check_replayable(own_runtime)
        self._runtime = own_runtime.with_new_cache(rows=len(self.texts))
        self.ends = self._runtime.skeleton.ends
        self._longest = max(len(text.tokens) for text in self.texts)
        self._first = [0]  # index of each text's first start among all starts
        for text in self.texts:
            self._first.append(self._first[-1] + text.num_new_tokens)
        self._numbers: dict[int, Tensor] = {}
        self._targets: Tensor | None = None
        super().__init__()

    def _open(self) -> None:
        self._resources.enter_context(self._runtime.session(self._longest + self._each * self.depth))
        self._read_texts()

    def _read_texts(self) -> None:
        """Prefill the KV cache with each text; for sampling, also compute the target's distribution at each start."""
        device = self._runtime.device
        self._prefilled = PrefilledTexts(self._runtime, self.texts)
        if self.sampler.greedy or self._seeded_noise is not None:
            self._prefilled.fill(FULL)
        else:
            self._targets = self._prefilled.targets(self.sampler)
        ends = [text.prompt_length + text.remaining for text in self.texts for _ in range(text.num_new_tokens)]
        self._end_positions = torch.tensor(ends, device=device)
        self._eos_ids = torch.tensor(sorted(self.ends), dtype=torch.long, device=device)

    def pin_weights(self, path: DraftPath) -> None:
        """Keep the quantised weights of `path` in memory until the replay is closed, so that other paths reuse them."""
        self._pinned_path = self._runtime.compile(path)

    @property
    def seeded(self) -> bool:
        """Whether the texts were decoded with seeds, so that controllers start each text afresh."""
        return self.sampler.seeded or self._seeded_noise is not None

    @property
    def layers(self) -> int:
        """The number of layers of the model."""
        return self._runtime.layers

    @property
    def vocabulary(self) -> int:
        """The vocabulary size of the model; 0 if unknown."""
        return self._runtime.skeleton.identity.vocabulary or 0

    def streams(self, starts: int) -> Streams:
        """Return the whole model's residual streams at the first starts of every text, at most `starts` of each.

        With `own_keys`, the positions are the first `OWN_PLACES` tokens of every text, so that attention reads only
        keys made from these residual streams.
        """
        positions: int | Tensor = 0
        layers, slots, mask = range(self.layers), 0, None
        if self.own_keys:
            self._prefilled.invalidate()
            tokens = self._prefilled.tokens[:, :OWN_PLACES]
            real = torch.arange(tokens.shape[1], device=tokens.device) < self._prefilled.lengths
        else:
            each = min(starts, self._each)
            live = self._new_state(
                slice(0, len(self.texts)), [(0, min(each, text.num_new_tokens)) for text in self.texts]
            )
            tokens, positions, slots, mask, real = (
                live.token,
                live.start,
                self._longest,
                self._attention_mask(live),
                live.real,
            )
        step = self._runtime.forward(
            tokens, positions, slots=slots, mask=mask, logits=None, hidden=range(self.layers + 1), between=layers
        )

        def branch(layer: int, part: Literal["attention", "mlp"], x: Tensor) -> Tensor:
            if self.own_keys:
                self._prefilled.invalidate()  # the sub-layer writes to the same cache slots
            return self._runtime.branch(layer, part, x, positions, slots=slots, mask=mask)

        return Streams(
            real=real,
            entering=[step.hidden[i] for i in range(self.layers + 1)],
            between=[step.between[i] for i in layers],
            branch=branch,
        )

    def trace(
        self,
        path: DraftPath | SkipSet,
        controllers: Sequence[Controller],
        *,
        share: float = 1.0,
        known: Sequence[Trace] = (),
    ) -> list[Trace]:
        """Draft along `path` from the first `share` of every text's starts, until all `controllers` would stop.

        Returns a trace for each text. `known`: traces of a smaller share with the same path, controllers and
        confidence, which the returned traces extend.
        """
        path = as_path(path)
        compiled = self._runtime.compile(path)
        if self.own_keys:
            self._prefilled.fill(replace(path, vocabulary=None))
        low = [len(trace.runs) for trace in known] or [0] * len(self.texts)
        high = [-(-text.num_new_tokens * share // 1) for text in self.texts]
        record = Record(self._first[-1], self.depth)
        for first in range(0, len(self.texts), self._group):
            group = range(first, min(first + self._group, len(self.texts)))
            for step in range(0, max(int(high[i]) - low[i] for i in group), self._each):
                window = [(low[i] + step, min(low[i] + step + self._each, int(high[i]))) for i in group]
                self._replay(compiled, controllers, slice(group.start, group.stop), window, record)
        fresh = [self._read(record, i, low[i], int(high[i])) for i in range(len(self.texts))]
        return [a.then(b) for a, b in zip(known, fresh, strict=True)] if known else fresh

    def _replay(
        self,
        path: CompiledPath,
        controllers: Sequence[Controller],
        group: slice,
        window: Sequence[tuple[int, int]],
        record: Record,
    ) -> None:
        """Draft along `path` from the starts in the `window` of each text in `group`; write the results to `record`."""
        live = self._new_state(group, window)
        used = self._longest
        for step in range(self.depth if live.real.any() else 0):
            scores, used = self._forward(live, path, group, used, step)
            drafted = self._choose(live, scores, group, step)
            going = self._record_step(live, record, controllers, step, drafted)
            width = int(going.sum(1).max())
            if not width:
                return
            index = going.logical_not().int().argsort(dim=1, stable=True)[:, :width]
            live.token, live.matched = drafted.token, drafted.match
            live.drafted = torch.cat((live.drafted, drafted.token.unsqueeze(-1)), dim=-1)
            live.pick(index, going.gather(1, index))

    def _new_state(self, group: slice, window: Sequence[tuple[int, int]]) -> ReplayState:
        """Return the drafts that begin in `window`, before their first step.

        `window`: for each text in `group`, the first start and the end (exclusive). A start where only one more token
        is allowed does not draft, because verification itself emits one token.
        """
        device = self._runtime.device
        texts = self.texts[group]
        low, high = (torch.tensor(side, device=device)[:, None] for side in zip(*window, strict=True))
        remaining = torch.tensor([text.remaining - 1 for text in texts], device=device)[:, None]
        offset = low + torch.arange(max(b - a for a, b in window), device=device)
        real = offset < torch.minimum(high, remaining)
        offset = offset * real  # padding repeats the text's first start
        position = offset + torch.tensor([text.prompt_length - 1 for text in texts], device=device)[:, None]
        return ReplayState(
            ids=offset + torch.tensor(self._first[group.start : group.stop], device=device)[:, None],
            start=position,
            token=self._prefilled.tokens[group].gather(1, position),
            matched=torch.ones_like(real),
            weight=torch.ones(real.shape, dtype=torch.float64, device=device),
            real=real,
            own=torch.zeros((*real.shape, 0), dtype=torch.bool, device=device),
            drafted=torch.zeros((*real.shape, 0), dtype=torch.long, device=device),
        )

    def _forward(self, live: ReplayState, path: CompiledPath, group: slice, used: int, step: int) -> tuple[Tensor, int]:
        """Return the processed scores `[B, n, V]` of one draft step, and the number of cache slots used so far."""
        width = live.real.shape[1]
        mask = self._attention_mask(live)
        positions = (live.start + step).clamp(max=self._runtime.skeleton.context - 1)  # padding may run past the end
        out = self._runtime.forward(live.token, positions, path=path, slots=used, mask=mask, rows=group)
        assert out.logits is not None
        scores = self.sampler.scores(out.logits.flatten(0, 1), self._prefixes(live, group))
        return scores.view(*live.start.shape, -1), used + width

    def _attention_mask(self, live: ReplayState) -> Tensor:
        """Return the attention mask `[B, n, S]` of the next draft step.

        A draft reads the keys of the text's tokens before its start, and of the tokens that the draft itself has read.
        """
        width = live.real.shape[1]
        columns = torch.arange(self._longest, device=live.start.device)
        itself = torch.eye(width, dtype=torch.bool, device=live.start.device).expand(len(live.start), -1, -1)
        live.own = torch.cat((live.own, itself), dim=-1)
        return torch.cat((columns < live.start.unsqueeze(-1), live.own), dim=-1)

    def _prefixes(self, live: ReplayState, group: slice) -> Iterator[list[int]]:
        for row, text in enumerate(self.texts[group]):
            for position, drafted in zip(live.start[row].tolist(), live.drafted[row].tolist(), strict=True):
                yield [*text.tokens[: position + 1], *drafted]

    def _choose(self, live: ReplayState, scores: Tensor, group: slice, step: int) -> DraftedTokens:
        """Return the tokens that are drafted by their processed scores `[B, n, V]`."""
        position = live.start + step + 1
        inside = live.matched & (position < self._prefilled.lengths[group])
        following = self._prefilled.tokens[group].gather(1, position.clamp(max=self._longest - 1))
        q = self.sampler.probs(scores)
        if self.sampler.greedy or self._seeded_noise is not None:
            merits = scores if self._seeded_noise is None else with_ties(q, position, self._seeded_noise[group])
            token = merits.argmax(-1)
            match = inside & (token == following)
            missed = inside & ~match
            rank = torch.zeros_like(token)
            left = merits[missed]
            rank[missed] = (left > left.gather(-1, following[missed].unsqueeze(-1))).sum(-1)
        else:
            assert self._targets is not None
            merits = scores
            ids = (live.ids + step).clamp(max=len(self._targets) - 1).flatten()
            p, flat = self._targets[ids], q.flatten(0, 1)
            weight = live.weight.flatten().unsqueeze(-1).to(p.dtype) if self._block else 1.0
            chosen = draft_given_text(
                p * weight,
                flat,
                following.flatten(),
                inside.flatten(),
                self._noise(live.ids.flatten(), step),
                self.candidates,
            )
            token, match, rank = (t.view(position.shape) for t in chosen)
            if self._block:
                p_x, q_x = (t.gather(-1, token.flatten().unsqueeze(-1)).view(position.shape) for t in (p, flat))
                ratio = p_x / q_x.clamp(min=torch.finfo(q_x.dtype).tiny)
                live.weight = torch.where(match, (live.weight * ratio).clamp(max=1.0), live.weight)
        logit_gap = gaps(merits if self._seeded_noise is None else merits.log()) if self.confidence.gap else None
        confidence = confident(self.confidence, q.gather(-1, token.unsqueeze(-1)).squeeze(-1), logit_gap)
        return DraftedTokens(token, confidence, match, torch.where(inside & ~match, rank, 0))

    def _uniforms(self, ids: Tensor, step: int) -> Uniforms:
        """Return the random numbers of these starts at this depth; all paths share them, so that scores are paired."""
        if step not in self._numbers:
            generator = torch.Generator().manual_seed(self.seed * 1009 + step)
            shape = (self._first[-1], 2 * self.candidates)
            self._numbers[step] = torch.rand(shape, generator=generator, dtype=torch.float64).to(ids.device)
        return Uniforms(self._numbers[step][ids])

    def _record_step(
        self,
        live: ReplayState,
        record: Record,
        controllers: Sequence[Controller],
        step: int,
        drafted: DraftedTokens,
    ) -> Tensor:
        """Record one step of the unfinished drafts, and return which drafts continue, `[B, n]`."""
        may = live.start + step + 3 < self._end_positions[live.ids]
        may &= torch.isin(drafted.token, self._eos_ids).logical_not()
        going = may & (drafted.confidence.double() >= min(c.min_confidence(step + 1) for c in controllers))
        real = live.real
        ids = live.ids[real].cpu()
        record.token[ids, step] = drafted.token[real].cpu()
        record.confidence[ids, step] = drafted.confidence[real].double().cpu()
        record.depth[ids] += 1
        record.run[ids] += drafted.match[real].cpu()
        record.rank[ids] += drafted.rank[real].cpu()
        record.unfinished[ids] = (may & ~going)[real].cpu()
        return going & real

    def _read(self, record: Record, text: int, low: int, high: int) -> Trace:
        """Return the trace of a text's starts from `low` to `high`."""
        own = slice(self._first[text] + low, self._first[text] + high)
        depth = record.depth[own].tolist()
        confidences, drafted = (
            [row[:n] for row, n in zip(column[own].tolist(), depth, strict=True)]
            for column in (record.confidence, record.token)
        )
        runs, ranks, unfinished = (column[own].tolist() for column in (record.run, record.rank, record.unfinished))
        return Trace(
            self.texts[text].num_new_tokens, self.texts[text].remaining, confidences, runs, ranks, unfinished, drafted
        )
