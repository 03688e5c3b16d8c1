"""The API's presence and frequency penalties on tokens that the new text contains already."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor


class Penalties(LogitsProcessor):  # type: ignore[misc]
    """Logits processor that subtracts `frequency` per occurrence of a token in the new text, and `presence` if any.

    It depends on the tokens so far alone, as every processor must. `prompt`: the number of tokens before the new text.
    """

    def __init__(self, prompt: int, *, presence: float, frequency: float) -> None:
        self._prompt, self._presence, self._frequency = prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the penalised scores. `input_ids`: `[B, n]`, `scores`: `[B, V]`."""
        new = input_ids[:, self._prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)
