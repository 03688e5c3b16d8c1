"""Reading of tensor values into Python.

Each read waits until an accelerator has finished all queued work, so several values are read in one transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor


def needs_sync(tensor: Tensor) -> bool:
    """Return whether reading a tensor waits for a device."""
    return tensor.device.type != "cpu"


def to_lists(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Return the values of one-dimensional tensors on one device; an accelerator's values come in one transfer.

    That transfer is in float64, which is exact.
    """
    if not needs_sync(tensors[0]):
        return [t.tolist() for t in tensors]
    values: list[float] = torch.cat([t.double() for t in tensors]).tolist()
    ends = accumulate(map(len, tensors), initial=0)
    return [values[a:b] for a, b in pairwise(ends)]
