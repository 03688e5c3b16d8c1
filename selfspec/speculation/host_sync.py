"""Numbers read from tensors.

Each reading waits until an accelerator has done all that it was told, so several numbers are read in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor


def waits(tensor: Tensor) -> bool:
    """Whether reading a tensor waits for a device."""
    return tensor.device.type != "cpu"


def lists(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The numbers of tensors `[n]` of one device, exact in float64, in one reading where that waits."""
    if not waits(tensors[0]):
        return [t.tolist() for t in tensors]
    whole: list[float] = torch.cat([t.double() for t in tensors]).tolist()
    ends = accumulate(map(len, tensors), initial=0)
    return [whole[a:b] for a, b in pairwise(ends)]
