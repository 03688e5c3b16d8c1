"""From logits to tokens, as plain decoding would: `transformers`' own logits processors, and all randomness.

Every random number of a generation, drafters' and verifiers' too, passes through a `Sampler`. Knows nothing of
models, caches and drafts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from selfspec.errors import SelfspecError

LOWEST_TEMPERATURE = 1e-5  # below, float32 scores overflow, and it is greedy decoding anyway

# These read the scores alone, so all rows of a pass can go through them at once.
_PREFIX_FREE = (
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
)


class Sampler:
    """How one sequence's tokens are chosen.

    `temperature` 0 is greedy decoding. `top_k` and `top_p` are off when None and apply to sampling only, as in
    `transformers`. `processors` are further `transformers` logits processors, applied first, greedy or not.
    Raises `SelfspecError` for a value out of range.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        processors: Sequence[hf.LogitsProcessor] = (),
    ) -> None:
        check_sampling(temperature, top_k, top_p)
        if seed is not None and seed < 0:
            raise SelfspecError(f"seed {seed}: want 0 or more")
        self.greedy = temperature == 0
        self.seeded = seed is not None
        self._random = random.Random(seed)
        self.processors = hf.LogitsProcessorList(processors)
        if not self.greedy:
            if temperature != 1:
                self.processors.append(hf.TemperatureLogitsWarper(float(temperature)))
            if top_k is not None:
                self.processors.append(hf.TopKLogitsWarper(top_k))
            if top_p is not None and top_p < 1:
                self.processors.append(hf.TopPLogitsWarper(float(top_p)))
        self._prefix_free = all(type(p) in _PREFIX_FREE for p in self.processors)

    def scores(self, logits: Tensor, prefixes: Iterable[Sequence[int]]) -> Tensor:
        """Processed scores `[n, V]` of `logits` `[n, V]`, at least float32.

        `prefixes` gives, row by row, the tokens before the one that the row predicts; it is read only when a
        processor depends on them.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if not self.processors:
            return scores
        if self._prefix_free:
            dummy = torch.zeros((len(scores), 1), dtype=torch.long, device=scores.device)
            return self.processors(dummy, scores)  # type: ignore[no-any-return]
        rows = [
            self.processors(torch.tensor([list(prefix)], device=scores.device), row.unsqueeze(0).clone())
            for row, prefix in zip(scores, prefixes, strict=True)
        ]
        return torch.cat(rows)

    def probs(self, scores: Tensor) -> Tensor:
        """Probabilities `[.., V]` of processed scores."""
        return scores.softmax(-1)

    def draw(self, p: Tensor, position: int) -> int:
        """A token drawn from `p` `[V]` (non-negative, any sum) for absolute position `position`."""
        del position  # for samplers whose noise is tied to the place of the token
        cumulative = p.cumsum(0, dtype=torch.float64)
        total = float(cumulative[-1])
        if not math.isfinite(total):
            raise SelfspecError("the model's probabilities are not finite; try another dtype, or a higher temperature")
        point = cumulative.new_tensor(total * self._random.random())
        index = int(torch.searchsorted(cumulative, point, right=True))
        return index if index < len(p) else int(p.nonzero()[-1])

    def coin(self, probability: float) -> bool:
        """True with this probability."""
        return self._random.random() < probability


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise `SelfspecError` for a value out of range."""
    if not (math.isfinite(temperature) and (temperature == 0 or temperature >= LOWEST_TEMPERATURE)):
        raise SelfspecError(f"temperature {temperature}: want 0 (greedy), or {LOWEST_TEMPERATURE} or more")
    if top_k is not None and top_k < 1:
        raise SelfspecError(f"top_k {top_k}: want at least 1, or leave it out")
    if top_p is not None and not 0 < top_p <= 1:
        raise SelfspecError(f"top_p {top_p}: want more than 0 and at most 1, or leave it out")
