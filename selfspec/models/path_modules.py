"""What training adds to a draft path: bridges over bypassed layers, and changes to weights held in few bits.

The model itself stays as it is. Knows nothing of files and of how either was fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from selfspec.models.families.base import Workspace
from selfspec.models.linears import Call

Run = tuple[int, int]
"""Layers that a draft path bypasses whole, from the first to before the second."""


@dataclass(frozen=True, slots=True, eq=False)
class Bridge:
    """A linear map in the place of bypassed layers: to the stream x is added `onto` (`into` x) + `bias`.

    `into` `[r, D]` and `onto` `[D, r]`; without `into`, `onto` is `[D, D]`. `bias` `[D]`. (ReplaceMe 2505.02819.)
    """

    into: Tensor | None
    onto: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """A change of low rank to the weights `[out, in]` of linears that read one input: `up` @ `down`.

    `down` `[r, in]`, `up` `[out, r]`, the linears' outputs one below the other. (LoRA, Hu et al. 2106.09685.)
    """

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """Bridges by the run that each stands for, and updates by layer and number of the group of linears in it."""

    bridges: Mapping[Run, Bridge] = field(default_factory=dict)
    updates: Mapping[tuple[int, int], Update] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class BridgeModule:
    """A bridge as it runs, in the place of an MLP. `into` None: `onto` reads the stream itself."""

    into: Call | None
    onto: Call

    def run(self, work: Workspace) -> None:
        """Add what it makes of the stream."""
        x = work.stream if self.into is None else self.into(work.stream).to(work.stream.dtype)
        work.stream.add_(self.onto(x).to(work.stream.dtype))
