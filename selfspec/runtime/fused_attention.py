"""The backends of torch's fused attention that passes use on CUDA."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# cuDNN's would come first on Hopper GPUs. It takes 20 to 40 ms to prepare for a new shape, as each decode step has.
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def fused_backends(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which fused attention on `device` uses one of `BACKENDS`; elsewhere than on CUDA, any."""
    return sdpa_kernel([*BACKENDS]) if device.type == "cuda" else nullcontext()
