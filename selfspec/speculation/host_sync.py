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


class Transfer:
    """A copy of a tensor to the host that has begun: what the device is asked to do afterwards does not delay it."""

    def __init__(self, values: Tensor) -> None:
        on_cuda = values.device.type == "cuda"
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_cuda)
        self._values.copy_(values, non_blocking=True)
        self._done = torch.cuda.current_stream(values.device).record_event() if on_cuda else None

    def wait(self) -> Tensor:
        """Return the values on the host, once they are there."""
        if self._done is not None:
            self._done.synchronize()
        return self._values


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device, without waiting for work that the device has been asked to do."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def to_lists(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Return the values of one-dimensional tensors on one device; an accelerator's values come in one transfer.

    That transfer is in float64, which is exact.
    """
    if not needs_sync(tensors[0]):
        return [t.tolist() for t in tensors]
    values: list[float] = torch.cat([t.double() for t in tensors]).tolist()
    ends = accumulate(map(len, tensors), initial=0)
    return [values[a:b] for a, b in pairwise(ends)]
