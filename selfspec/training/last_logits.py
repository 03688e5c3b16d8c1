"""Logits from the hidden states after the model's last layer, in float32 and differentiable."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.runtime.base import Runtime


class LastLogits:
    """A model's last norm and `head` `[words, D]`, the rows of its head's weight for a draft vocabulary, in float32."""

    def __init__(self, runtime: Runtime, head: Tensor) -> None:
        skeleton = runtime.skeleton
        self._norm, self._then = skeleton.norms.in_float32(skeleton.parts.norm), skeleton.parts.logits
        self._head = head

    def __call__(self, streams: Tensor) -> Tensor:
        """Return the logits `[.., words]` for hidden states `[.., D]` before the last norm."""
        return self.of_normed(self._norm(streams))

    def of_normed(self, read: Tensor) -> Tensor:
        """Return the logits `[.., words]` for normed hidden states `[.., D]`; products are bfloat16 under autocast."""
        head = self._head.to(torch.bfloat16) if torch.is_autocast_enabled(read.device.type) else self._head
        logits = F.linear(read, head).float()
        return logits if self._then is None else self._then(logits)
