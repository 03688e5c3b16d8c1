"""Whether Triton kernels are used."""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache

import torch

from selfspec.basics.errors import reason, switched

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ENV_VAR = "SELFSPEC_TRITON"  # environment variable: 0 disables the kernels
ROWS = 64  # most rows of a pass that the kernels take; larger passes use torch's products and attention

_log = logging.getLogger("selfspec")


def triton_enabled(device: torch.device) -> bool:
    """Return whether passes on `device` use Triton kernels: on an NVIDIA GPU by default, unless `ENV_VAR` is off.

    Compute capability 8.0 is needed, and a C compiler, with which Triton builds what launches a kernel: where none can
    be compiled, a warning is logged once. A CPU has them under Triton's interpreter, for tests, if `ENV_VAR` is on.
    """
    on = switched(ENV_VAR)
    if on is False or importlib.util.find_spec("triton") is None:
        return False
    if device.type == "cpu":
        return bool(on) and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and _compiles(device)


@cache
def _compiles(device: torch.device) -> bool:
    """Return whether a kernel can be compiled for, and runs on, `device`."""
    try:
        from selfspec.models.triton_kernels.elementwise import rms_norm

        ones = torch.ones(1, 64, dtype=torch.bfloat16, device=device)
        rms_norm(ones, ones[0], 0.0, torch.empty_like(ones))
    except Exception as error:  # whatever Triton, compilers and drivers raise
        _log.warning("Triton kernels cannot be compiled here, torch's are used: %s", reason(error))
        return False
    return True
