"""The API's presence and frequency penalties on tokens that the new text contains already."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor


class Penalties(LogitsProcessor):  # type: ignore[misc]
    """Logits processor that penalises tokens which the new text contains already.

    It subtracts `frequency` for each occurrence of a token, and `presence` once if the token occurs. The result depends
    only on the tokens so far, as it must for every processor. `prompt`: the number of tokens before the new text.
    """

    def __init__(self, prompt: int, *, presence: float, frequency: float) -> None:
        self._prompt, self._presence, self._frequency = prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the penalised scores. `input_ids`: `[B, n]`, `scores`: `[B, V]`."""
        new = input_ids[:, self._prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)
