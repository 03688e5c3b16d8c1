"""Constants and helpers of all Triton kernels: the dtypes of products, and the sizes of blocks.

Triton launches on the thread's current device, whichever device the tensors are on. Kernels are therefore launched
within `torch.cuda.device_of`, which makes a tensor's device the current one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_ROWS = 16  # rows of a program, padded: the fewest that tensor cores multiply, so that all widths run the same way
ROUNDED = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def compute_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of products' operands for rows of `dtype`.

    Triton's interpreter cannot multiply bfloat16: it multiplies the same values in float32.
    """
    return tl.float32 if triton.knobs.runtime.interpret else ROUNDED[dtype]


def power_of_two(n: int, least: int = 16) -> int:
    """Return the smallest power of two that is at least `n` and `least`."""
    return max(triton.next_power_of_2(n), least)
