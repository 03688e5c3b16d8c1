"""Additive attention masks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.models.sizes import Sizes


class Masks:
    """Masks of one model on one device, in its dtype: 0 where a slot is visible, -inf where it is hidden."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self._kv_heads, self._group = sizes.kv_heads, sizes.heads // sizes.kv_heads
        self._dtype, self._device = sizes.dtype, device
        self._later = self._triangle(64)

    def _triangle(self, n: int) -> Tensor:
        return torch.full((n, n), -torch.inf, dtype=self._dtype, device=self._device).triu(1)

    def chain(self, n: int, end: int, window: int | None = None) -> Tensor:
        """Return the causal mask `[n, end]` of n consecutive tokens in the last n of `end` slots.

        With `window`, each token attends to only the last `window` slots, which include its own slot.
        """
        later = self._later if n <= len(self._later) else self._triangle(n)
        mask = F.pad(later[:n, :n], (end - n, 0))
        if window is None or end <= window:
            return mask
        return mask + torch.full_like(mask, -torch.inf).tril(end - n - window)

    def additive(self, mask: Tensor) -> Tensor:
        """Convert a boolean mask `[B, n, S]` (true: visible) to an additive mask `[B * H_kv, 1, n, S]`.

        If B is 1, the additive mask is `[1, 1, n, S]`.
        """
        zeros = torch.zeros(mask.shape, dtype=self._dtype, device=self._device)
        additive = zeros.masked_fill_(mask.logical_not(), -torch.inf)
        return (additive if len(mask) == 1 else additive.repeat_interleave(self._kv_heads, dim=0)).unsqueeze(1)

    def grouped(self, additive: Tensor) -> Tensor:
        """Repeat a mask from `chain` or `additive` for the G query heads of a KV head: `[1 or B * H_kv, G * n, S]`."""
        return additive.view(-1, *additive.shape[-2:]).repeat(1, self._group, 1)
