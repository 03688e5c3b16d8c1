"""The logits that a model makes of streams that leave its last layer, in float32, as training goes through them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.runtime.forward import Runtime


class LastLogits:
    """A model's last norm and some rows of its head, `head` `[words, D]`, in float32."""

    def __init__(self, runtime: Runtime, head: Tensor) -> None:
        skeleton = runtime.skeleton
        self._norm, self._then = skeleton.norms.in_float32(skeleton.parts.norm), skeleton.parts.logits
        self._head = head

    def __call__(self, streams: Tensor) -> Tensor:
        """Logits of the words, of streams `[.., D]`."""
        return self.of_normed(self._norm(streams))

    def of_normed(self, read: Tensor) -> Tensor:
        """The same of what the head reads. Products are in bfloat16 where autocast asks for it."""
        head = self._head.to(torch.bfloat16) if torch.is_autocast_enabled(read.device.type) else self._head
        logits = F.linear(read, head).float()
        return logits if self._then is None else self._then(logits)
