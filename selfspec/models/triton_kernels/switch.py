"""Whether Triton kernels are used: only if `ENV_VAR` is on and triton is installed."""

from __future__ import annotations

import importlib.util
import os

import torch

from selfspec.basics.errors import switched

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ENV_VAR = "SELFSPEC_TRITON"  # environment variable: 1 enables the kernels
ROWS = 64  # most rows of a pass that the kernels take; larger passes use torch's products and attention


def triton_enabled(device: torch.device) -> bool:
    """Return whether passes on `device` use Triton kernels.

    They need a CUDA device, or a CPU under Triton's interpreter (`TRITON_INTERPRET=1`, for tests).
    """
    if not switched(ENV_VAR):
        return False
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == "cuda" or interpreted) and importlib.util.find_spec("triton") is not None
