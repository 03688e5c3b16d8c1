"""Sampling: `transformers`' logits processors, applied as in plain decoding, and all random numbers.

Drafters and verification draw their random numbers from a sequence's `Sampler` too.
"""

from __future__ import annotations

import math
import operator
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from selfspec.basics.errors import SelfspecError
from selfspec.speculation.drafts import Draft
from selfspec.speculation.host_sync import needs_sync, to_lists
from selfspec.types.methods import LOWEST_TEMPERATURE

_REMEMBERED = 24  # positions whose noise is cached, enough for most drafts; other noise is regenerated identically

# These processors read the scores alone, so all rows of a pass are processed at once.
_PREFIX_FREE = {
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.SuppressTokensLogitsProcessor,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
}


def reads_prefix(processor: hf.LogitsProcessor) -> bool:
    """Return whether a processor may read more than the scores: preceding tokens, or the row index in a batch."""
    return type(processor) not in _PREFIX_FREE


def _capturable(processor: hf.LogitsProcessor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a processor, or for `top_p` a function that gives the same scores and that a CUDA graph can hold.

    `transformers` assigns a number from the host, which cannot be captured.
    """
    if type(processor) is not hf.TopPLogitsWarper:
        return processor  # type: ignore[no-any-return]
    top_p, filtered, least = processor.top_p, processor.filter_value, processor.min_tokens_to_keep

    def warp(_: Tensor, scores: Tensor) -> Tensor:
        logits, order = scores.sort()
        remove = logits.softmax(-1).cumsum(-1) <= 1 - top_p
        remove[..., -least:].fill_(False)
        return scores.masked_fill(remove.scatter(1, order, remove), filtered)

    return warp


NO_TOKEN = (
    "no token can be chosen: the model's probabilities are not finite (try another dtype, or a higher temperature), or "
    "the processors and the guide together allow none"
)


class Sampler:
    """The sampler of one sequence: it applies logits processors and draws tokens.

    `temperature` 0 is greedy decoding. `top_k` and `top_p` are off when None and apply to sampling only, as in
    `transformers`. `processors` are further `transformers` logits processors, applied first, greedy or not.

    `tied`: every draw for a sequence position uses the same noise, determined by the seed and the position alone. Draft
    and target then draw the same token where their distributions agree, and the text does not depend on the drafts.
    Untied, all draws and coins come from one stream of random numbers, of which `numbers_used` have been used. Default:
    tied if there is a seed. Raises `SelfspecError` for a value out of range.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        tied: bool | None = None,
        processors: Sequence[hf.LogitsProcessor] = (),
    ) -> None:
        check_sampling(temperature, top_k, top_p)
        if seed is not None:
            seed = as_integer(seed, "seed", least=0)
        self.greedy = temperature == 0
        self.seeded = seed is not None
        self.tied = not self.greedy and (self.seeded if tied is None else tied)
        self._random = random.Random(seed)
        self._upcoming: deque[float] = deque()
        self.numbers_used = 0
        self._key = random.SystemRandom().getrandbits(64) if seed is None else seed % 2**128
        self._noise: dict[int, Tensor] = {}
        self.processors = list(processors)
        if not self.greedy:
            if temperature != 1:
                self.processors.append(hf.TemperatureLogitsWarper(float(temperature)))
            if top_k is not None:
                self.processors.append(hf.TopKLogitsWarper(top_k))
            if top_p is not None and top_p < 1:
                self.processors.append(hf.TopPLogitsWarper(float(top_p)))
        dependent = [i for i, p in enumerate(self.processors, 1) if reads_prefix(p)]
        self._by_row = self.processors[: max(dependent, default=0)]
        self._at_once = [_capturable(processor) for processor in self.processors[len(self._by_row) :]]

    def scores(self, logits: Tensor, prefixes: Iterable[Sequence[int]]) -> Tensor:
        """Return the processed scores `[n, V]` of `logits` `[n, V]`, at least float32.

        `prefixes` yields, for each row, the tokens before the one that the row predicts. It is read only if a processor
        depends on the prefix.
        """
        scores = _as_scores(logits)
        if self._by_row:
            scores = torch.cat([self._row(row, prefix) for row, prefix in zip(scores, prefixes, strict=True)])
        return self._finished(scores)

    def draft_scores(self, logits: Tensor, draft: Draft, committed: Sequence[int], ends: Set[int]) -> Tensor:
        """Return the processed scores `[1 + m, V]` of a draft's rows `logits` `[1 + m, V]`: its root, then each token.

        `committed`: the tokens up to the root, which is included. Processors that read the prefix only see prefixes
        that plain decoding can reach: not those with one of `ends`, or with a token that they masked. They need not
        allow anything there, and may fail. Such rows, which no rule emits a token from, miss these processors.
        """
        scores = _as_scores(logits)
        if self._by_row:
            root, *prefixes = draft.prefixes(committed)
            rows, reached = [self._row(scores[0], root)], [True]
            for row, token, parent, prefix in zip(scores[1:], draft.tokens, draft.parents, prefixes, strict=True):
                allowed = token not in ends and float(rows[parent + 1][0, token]) != -math.inf
                reached.append(allowed and reached[parent + 1])
                rows.append(self._row(row, prefix) if reached[-1] else row.unsqueeze(0))
            scores = torch.cat(rows)
        return self._finished(scores)

    def _finished(self, scores: Tensor) -> Tensor:
        """Apply the processors that read the scores alone to `scores` `[n, V]`."""
        if self._at_once:
            dummy = torch.zeros((len(scores), 1), dtype=torch.long, device=scores.device)
            for processor in self._at_once:
                scores = processor(dummy, scores)
        return scores

    def _row(self, row: Tensor, prefix: Sequence[int]) -> Tensor:
        """Apply the processors that read the prefix to `row` `[V]`; return `[1, V]`."""
        ids = torch.tensor([list(prefix)], device=row.device)
        scores = row.unsqueeze(0).clone()
        for processor in self._by_row:
            scores = processor(ids, scores)
        return scores

    @property
    def plain_settings(self) -> tuple[object, ...] | None:
        """The processors' settings as numbers, hashable; None if `scores` depends on more than these and the logits."""
        settings = tuple((type(p), *sorted(vars(p).items())) for p in self.processors)
        numbers = all(isinstance(value, (int, float)) for _, *items in settings for _, value in items)
        return settings if numbers and not self._by_row else None

    def noisy_scores(self, scores: Tensor, position: int) -> Tensor:
        """Return the scores `[V]` whose argmax is the token for `position`.

        These are `scores` in greedy decoding, and log p + g with tied noise g.
        """
        if self.greedy:
            return scores
        assert self.tied
        return scores.log_softmax(-1) - self._noise_at(position, scores).log()

    def probs(self, scores: Tensor) -> Tensor:
        """Return the probabilities `[.., V]` of processed scores."""
        return scores.softmax(-1)

    def draw(self, p: Tensor, position: int) -> int:
        """Draw a token from `p` `[V]` (non-negative, any sum) for sequence position `position`.

        Raises `SelfspecError` if the sum is 0 or not finite.
        """
        if self.tied:
            (drawn,) = self.draws(p.unsqueeze(0), [position])
            if drawn < 0:
                raise SelfspecError(NO_TOKEN)
            return drawn
        (index,), (total,) = to_lists(self._drawn(p))
        return _checked(index, total, p)

    def _drawn(self, p: Tensor) -> list[Tensor]:
        """Draw a token from unnormalised `p` `[V]`; return its index `[1]` and the sum of `p` `[1]`."""
        cumulative = p.cumsum(0, dtype=torch.float64)
        total = cumulative[-1:]
        return [torch.searchsorted(cumulative, total * self._number(), right=True), total]

    def draws(self, p: Tensor, positions: Sequence[int]) -> list[int]:
        """Draw one token for each row of `p` `[n, V]` with the noise tied to its position; -1 if none can be drawn.

        Gumbel-max, argmax(log p + g), computed as argmax(p / e) with exponential noise e = exp(-g).
        """
        assert self.tied
        noise = torch.stack([self._noise_at(position, p) for position in positions])
        best, tokens = to_lists((p / noise).max(-1))
        return [int(t) if 0 < value < math.inf else -1 for t, value in zip(tokens, best, strict=True)]

    def noise_of(self, position: int, like: Tensor) -> Tensor:
        """Return the exponential noise `[V]` tied to `position`, without keeping it; V, device: of `like` `[.., V]`."""
        return tied_noise(self._key, position, like)

    def _noise_at(self, position: int, p: Tensor) -> Tensor:
        """Return the exponential noise `[V]` tied to `position`; positions use disjoint random numbers."""
        noise = self._noise.get(position)
        if noise is None:
            noise = self._noise[position] = self.noise_of(position, p)
            if len(self._noise) > _REMEMBERED:
                del self._noise[next(iter(self._noise))]
        return noise

    def take(
        self,
        scores: Tensor,
        position: int,
        *,
        p: Tensor | None = None,
        with_p: bool = False,
        with_gap: bool = False,
        sure: bool = True,
    ) -> DraftedToken | None:
        """Take the token for `position` from a draft's processed scores `[V]`; None if processors mask every token.

        `p`: the probabilities of the scores, if already computed. `with_p`, `with_gap`: whether to return the token's
        probability, and the gap between the two best scores (with tied noise, the two best log p + g). `sure`: the
        caller guarantees a finite score unless a processor that reads the prefix masks every token. All values are read
        from the device at once. Raises `SelfspecError` if no token can be drawn.
        """
        if p is None and (with_p or not self.greedy):
            p = self.probs(scores)
        sure = sure and not self._by_row  # only prefix-reading processors can mask every token
        race = p / self._noise_at(position, p) if self.tied and p is not None else None  # as in `draws`
        if needs_sync(scores):
            return self._taken(scores, p, race, with_p, with_gap, sure)
        if not sure and not float(scores.max()) > -math.inf:
            return None
        if race is not None:
            token = best_of(race)
            if not 0 < float(race[token]) < math.inf:
                raise SelfspecError(NO_TOKEN)
            gap_value = gap(race.log(), token) if with_gap else 0.0
        elif self.greedy:
            token = best_of(scores)
            gap_value = gap(scores, token) if with_gap else 0.0
        else:
            assert p is not None
            token = self.draw(p, position)
            gap_value = gap(scores, best_of(scores)) if with_gap else 0.0
        return DraftedToken(token, float(p[token]) if with_p and p is not None else 0.0, gap_value)

    def _taken(
        self, scores: Tensor, p: Tensor | None, race: Tensor | None, with_p: bool, with_gap: bool, sure: bool
    ) -> DraftedToken | None:
        """Take a token as `take` does, on a device whose reads wait: all values come in one transfer."""
        best, index = scores.max(0, keepdim=True)
        worth = torch.ones_like(best)
        if race is not None:
            worth, index = race.max(0, keepdim=True)
        elif p is not None and not self.greedy:
            index, worth = self._drawn(p)
        tensors = [index, worth, best]
        if with_p and p is not None:
            tensors.append(p.gather(0, index.clamp(max=len(p) - 1)))
        if with_gap:
            tensors.append(gaps(scores if race is None else race.log()).unsqueeze(0))
        token, value, highest, *rest = (number for (number,) in to_lists(tensors))
        if not sure and not highest > -math.inf:
            return None
        probability = rest.pop(0) if with_p else 0.0
        return DraftedToken(_checked(token, value, scores if p is None else p), probability, *rest)

    def coin(self, probability: float) -> bool:
        """Return True with this probability, by the next random number of the sampler's stream."""
        return self._number() < probability

    def _number(self) -> float:
        """Return the next random number, in [0, 1)."""
        self.numbers_used += 1
        return self._upcoming.popleft() if self._upcoming else self._random.random()

    def upcoming(self, count: int) -> list[float]:
        """Return the next `count` random numbers without using them."""
        while len(self._upcoming) < count:
            self._upcoming.append(self._random.random())
        return list(islice(self._upcoming, count))

    def skip(self, count: int) -> None:
        """Use `count` random numbers, which `upcoming` returned and a device used."""
        for _ in range(count):
            self._number()


def _as_scores(logits: Tensor) -> Tensor:
    """Return logits in float32, or in float64 if they are."""
    return logits if logits.dtype == torch.float64 else logits.float()


class DraftedToken(NamedTuple):
    """A token taken by a drafter, its probability, and the gap between the two best scores; 0 where not requested."""

    token: int
    probability: float = 0.0
    gap: float = 0.0


def _checked(token: float, worth: float, p: Tensor) -> int:
    """Return `token` as an int, or the last token with p > 0 if rounding put it beyond `p`.

    Raises `SelfspecError` unless `worth`, the token's score or the total mass, is positive and finite.
    """
    if not 0 < worth < math.inf:
        raise SelfspecError(NO_TOKEN)
    return int(token) if token < len(p) else int(p.nonzero()[-1])


def best_and_share(logits: Tensor) -> tuple[int, float]:
    """Return the argmax of logits `[V]` and its probability; the probability is NaN if no logit is finite."""
    if not needs_sync(logits):
        argmax = best_of(logits)
        return argmax, float((logits - logits[argmax]).exp().sum().reciprocal())
    best, index = logits.max(0, keepdim=True)
    (token,), (share,) = to_lists([index, (logits - best).exp().sum(0, keepdim=True).reciprocal()])
    return int(token), share


def best_of(merits: Tensor) -> int:
    """Return the argmax of `merits` `[V]`, on a CPU by numpy, which takes a twentieth of torch's time."""
    return int((merits if needs_sync(merits) else merits.numpy()).argmax())


def gaps(merits: Tensor) -> Tensor:
    """Return the difference of the two largest values in `merits` `[.., V]`, `[..]`; infinite if only one is finite."""
    best, index = merits.max(-1, keepdim=True)
    return (best - merits.scatter(-1, index, -torch.inf).amax(-1, keepdim=True)).squeeze(-1)


def gap(merits: Tensor, token: int) -> float:
    """Return the difference between `merits` `[V]` at `token`, the known argmax, and the largest other value."""
    others = merits.index_fill(0, torch.tensor(token, device=merits.device), -torch.inf)
    return float(merits[token] - others.max())


def tied_noise(seed: int, position: int, like: Tensor) -> Tensor:
    """Return the exponential noise `[V]` tied to a seed and a position; V and device are those of `like` `[.., V]`."""
    generator = np.random.Generator(np.random.Philox(key=seed % 2**128, counter=position << 64))
    drawn = np.maximum(generator.standard_exponential(like.shape[-1]), np.finfo(np.float64).tiny)
    return torch.from_numpy(drawn).to(like.device)


def as_integer(value: object, name: str, *, least: int) -> int:
    """Return `value` as an integer; `name`: its name in errors.

    Raises `SelfspecError` if the value is not an integer, or is below `least`.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise SelfspecError(f"{name} {value}: expected a whole number of at least {least}")
    return number


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise `SelfspecError` for a temperature, `top_k` or `top_p` out of range."""
    if not (math.isfinite(temperature) and (temperature == 0 or temperature >= LOWEST_TEMPERATURE)):
        raise SelfspecError(f"temperature {temperature}: expected 0 (greedy), or {LOWEST_TEMPERATURE} or more")
    if top_k is not None and top_k < 1:
        raise SelfspecError(f"top_k {top_k}: expected at least 1, or leave it out")
    if top_p is not None and not 0 < top_p <= 1:
        raise SelfspecError(f"top_p {top_p}: expected more than 0 and at most 1, or leave it out")
