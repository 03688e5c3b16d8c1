"""The state of a replay: the texts and their KV cache, the unfinished drafts, and the record of all drafts.

A start is a position of a text that a draft begins at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from selfspec.runtime.base import Runtime
from selfspec.speculation.sampling import Sampler
from selfspec.types.acceptance import Confidence
from selfspec.types.draft_path import FULL, DraftPath

from .conditional_sampling import SeededNoise


@dataclass(frozen=True, slots=True)
class TargetText:
    """A prompt of the first `prompt_length` tokens of `tokens`, and the target's own continuation of it.

    `remaining`: the number of tokens that the continuation was allowed; a text that reached an end token is shorter.
    `seed`: the seed that the continuation was sampled with (None: without a seed).
    """

    tokens: tuple[int, ...]
    prompt_length: int
    remaining: int
    seed: int | None = None

    @property
    def num_new_tokens(self) -> int:
        """The number of tokens in the continuation."""
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True, slots=True)
class Streams:
    """The whole model's residual streams `[B, n, D]` at n positions of B texts, and a function to run sub-layers.

    `entering[l]` is the input of layer l (the last is the model's output), `between[l]` is between the layer's
    attention and its MLP. `branch(layer, part, x)` returns the output that a sub-layer adds to any residual stream `x`
    at these positions. Its attention reads keys made from `x`, and the target's keys of all tokens before the first of
    these positions.
    """

    real: Tensor  # [B, n]: not padding
    entering: list[Tensor]
    between: list[Tensor]
    branch: Callable[[int, Literal["attention", "mlp"], Tensor], Tensor]


class PrefilledTexts:
    """The texts of a replay, prefilled into its KV cache, where a token's slot is its position.

    `tokens`: token ids `[texts, longest]`, padded with 0; `lengths`: `[texts, 1]`. The cached keys and values are those
    of the path last passed to `fill`; before the first call the cache is empty.
    """

    def __init__(self, runtime: Runtime, texts: Sequence[TargetText]) -> None:
        self._runtime, self._texts = runtime, texts
        self.longest = max(len(text.tokens) for text in texts)
        self.tokens = torch.zeros((len(texts), self.longest), dtype=torch.long)
        for row, text in enumerate(texts):
            self.tokens[row, : len(text.tokens)] = torch.tensor(text.tokens)
        self.tokens = self.tokens.to(runtime.device)
        self.lengths = torch.tensor([len(text.tokens) for text in texts], device=runtime.device)[:, None]
        self._cached_path: DraftPath | None = None

    def fill(self, path: DraftPath) -> None:
        """Fill the cache by a causal pass over each text along `path`, unless it holds the keys of `path` already."""
        if path == self._cached_path:
            return
        self.invalidate()
        compiled = self._runtime.compile(path)
        for row, text in enumerate(self._texts):
            own, end = slice(row, row + 1), len(text.tokens) - 1  # no query reads the last token's keys
            if end:
                self._runtime.forward(self.tokens[own, :end], 0, path=compiled, rows=own, logits=None)
        self._cached_path = path

    def invalidate(self) -> None:
        """Declare the cached keys invalid, because a pass overwrites their slots; the next `fill` makes new keys."""
        self._cached_path = None

    def targets(self, sampler: Sampler) -> Tensor | None:
        """Return the target's distribution at each start `[starts, V]`; None if there are no starts.

        The pass fills the cache along the full path.
        """
        self.invalidate()
        distributions = []
        for row, text in enumerate(self._texts):
            own, first = slice(row, row + 1), text.prompt_length - 1  # the first start
            if first:
                self._runtime.forward(self.tokens[own, :first], 0, rows=own, logits=None)
            if text.num_new_tokens:
                step = self._runtime.forward(self.tokens[own, first : len(text.tokens) - 1], first, rows=own)
                assert step.logits is not None
                prefixes = (text.tokens[:end] for end in range(text.prompt_length, len(text.tokens)))
                distributions.append(sampler.probs(sampler.scores(step.logits[0], prefixes)))
        self._cached_path = FULL
        return torch.cat(distributions) if distributions else None


@dataclass(slots=True)
class ReplayState:
    """The unfinished drafts: n drafts of each of B texts, padded, in tensors `[B, n]`."""

    ids: Tensor  # index of the draft's start among the starts of all texts
    start: Tensor  # position of the last committed token
    token: Tensor  # next input token
    matched: Tensor  # whether all tokens drafted so far match the text
    weight: Tensor  # the acceptance weight P of rule `block`
    real: Tensor  # whether the entry is a draft, not padding
    own: Tensor  # [B, n, scratch]: which scratch slots of the KV cache hold this draft's keys
    drafted: Tensor  # [B, n, depth]: the tokens drafted so far

    def pick(self, index: Tensor, real: Tensor) -> None:
        """Keep the drafts at `index` `[B, m]` of each text; `real` `[B, m]`: which of these are not padding."""
        for name in ("ids", "start", "token", "matched", "weight"):
            setattr(self, name, getattr(self, name).gather(1, index))
        self.real = real
        for name in ("own", "drafted"):
            t = getattr(self, name)
            setattr(self, name, t.gather(1, index.unsqueeze(-1).expand(-1, -1, t.shape[-1])))


@dataclass(frozen=True, slots=True)
class DraftedTokens:
    """The tokens that one draft step adds to n drafts of each of B texts, in tensors `[B, n]`."""

    token: Tensor
    confidence: Tensor
    match: Tensor  # whether the token and all tokens before it match the text
    rank: Tensor  # at a draft's first wrong token, which candidate is the text's (1: the second); 0: none, or elsewhere


class Record:
    """The results of the drafts from all starts.

    `token` and `confidence`, `[starts, depth]`: the drafted tokens. `depth`, `run`, `rank` and `unfinished`,
    `[starts]`: the draft length, and `runs`, `ranks` and `unfinished` of `Trace`.
    """

    def __init__(self, starts: int, depth: int) -> None:
        self.token = torch.zeros((starts, depth), dtype=torch.long)
        self.confidence = torch.zeros((starts, depth), dtype=torch.float64)
        self.depth = torch.zeros(starts, dtype=torch.long)
        self.run = torch.zeros(starts, dtype=torch.long)
        self.rank = torch.zeros(starts, dtype=torch.long)
        self.unfinished = torch.zeros(starts, dtype=torch.bool)


def confident(confidence: Confidence, probability: Tensor, logit_gap: Tensor | None) -> Tensor:
    """Return `Confidence.estimate` for each `probability` `[B, n]` and gap `logit_gap` `[B, n]` (None: zeros)."""
    if confidence.plain:
        return probability
    each = zip(
        probability.flatten().tolist(),
        (torch.zeros_like(probability) if logit_gap is None else logit_gap).flatten().tolist(),
        strict=True,
    )
    values = torch.tensor([confidence.estimate(p, g) for p, g in each], dtype=torch.float64, device=probability.device)
    return values.view(probability.shape)


def with_ties(q: Tensor, position: Tensor, tied: Sequence[SeededNoise]) -> Tensor:
    """Return `q` `[B, n, V]` over the noise of each draft's text and position; its largest value is drafted."""
    noise = [ties.noise(p, q) for ties, positions in zip(tied, position.tolist(), strict=True) for p in positions]
    return q / torch.stack(noise).view(q.shape)
