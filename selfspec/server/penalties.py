"""The API's penalties on tokens that the new text has already. Knows nothing of requests."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor


class Penalties(LogitsProcessor):  # type: ignore[misc]
    """Lowers the logits of tokens by how often the new text has them (`frequency`), and if at all (`presence`).

    A function of the tokens so far, as every processor must be. `prompt`: how many tokens come before the new text.
    """

    def __init__(self, prompt: int, *, presence: float, frequency: float) -> None:
        self._prompt, self._presence, self._frequency = prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`input_ids`: `[B, n]`, `scores`: `[B, V]`."""
        new = input_ids[:, self._prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)
