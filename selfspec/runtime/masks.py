"""Additive attention masks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.models.families.base import Sizes

_ALIGNED = 8  # slots: CUDA's fused attention copies a mask whose rows do not start at multiples


class Masks:
    """Masks of one model on one device, in its dtype: 0 where a slot is visible, -inf where it is hidden.

    The rows of a mask start at multiples of `aligned` slots (None: of 8 on CUDA, of 1 elsewhere).
    """

    def __init__(self, sizes: Sizes, device: torch.device, *, aligned: int | None = None) -> None:
        self._aligned = aligned or (_ALIGNED if device.type == "cuda" else 1)
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
        mask = F.pad(later[:n, :n], (end - n, -end % self._aligned))[:, :end]
        if window is None or end <= window:
            return mask
        return mask.add_(torch.full_like(mask, -torch.inf).tril(end - n - window))

    def additive(self, mask: Tensor) -> Tensor:
        """Convert a boolean mask `[B, n, S]` (true: visible) to an additive mask `[B * H_kv, 1, n, S]`.

        If B is 1, the additive mask is `[1, 1, n, S]`.
        """
        batch, n, slots = mask.shape
        repeats = 1 if batch == 1 else self._kv_heads
        padded = (batch, repeats, n, -(-slots // self._aligned) * self._aligned)
        additive = torch.zeros(padded, dtype=self._dtype, device=self._device)[..., :slots]
        return additive.masked_fill_(mask.logical_not().unsqueeze(1), -torch.inf).flatten(0, 1).unsqueeze(1)

    def grouped(self, additive: Tensor) -> Tensor:
        """Repeat a mask from `chain` or `additive` for the G query heads of a KV head: `[1 or B * H_kv, G * n, S]`."""
        return additive.view(-1, *additive.shape[-2:]).repeat(1, self._group, 1)
