"""The KV cache of a replay: a text in each row, with the keys and values that drafts read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.runtime.base import Runtime
from selfspec.speculation.sampling import Sampler
from selfspec.types.draft_path import FULL, DraftPath

from .target_text import TargetText


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
