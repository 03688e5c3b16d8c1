"""Parts of a draft path beside the model: bridges, low-rank updates of quantised weights, int4 weights made before.

The model itself is not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from selfspec.models.families.base import Workspace
from selfspec.models.linears import Call
from selfspec.models.low_precision import QuantizedWeight

Run = tuple[int, int]
"""A run `(first, end)` of layers that a draft path skips entirely, from `first` up to, not including, `end`."""


@dataclass(frozen=True, slots=True, eq=False)
class Bridge:
    """A linear map that replaces skipped layers: it adds `onto` (`into` x) + `bias` to the residual stream x.

    `into` is `[r, D]`, `onto` `[D, r]` and `bias` `[D]`; without `into`, `onto` is `[D, D]`. (ReplaceMe 2505.02819.)
    """

    into: Tensor | None
    onto: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """A low-rank update `up` @ `down` of the weights `[out, in]` of linears that read the same input.

    `down` is `[r, in]`, and `up` `[out, r]` over the linears' concatenated outputs. (LoRA, Hu et al. 2106.09685.)
    """

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """Bridges by the run of layers that they replace, and updates by (layer, index of the group in `Layer.groups`)."""

    bridges: Mapping[Run, Bridge] = field(default_factory=dict)
    updates: Mapping[tuple[int, int], Update] = field(default_factory=dict)


class Int4Weights(Protocol):
    """The int4 weights of some groups of linears, over their concatenated outputs, quantised before.

    A group is named by its layer and its index in `Layer.groups`.
    """

    def get(self, layer: int, group: int) -> QuantizedWeight | None:
        """Return a group's weight `[out, in]`; None if the group is not among them."""

    def bytes(self, layer: int, group: int) -> int | None:
        """Return the bytes of a group's weight; None if the group is not among them."""


@dataclass(frozen=True, slots=True, eq=False)
class BridgeModule:
    """A bridge that runs as an `Mlp`. `into` None: `onto` reads the residual stream itself."""

    into: Call | None
    onto: Call

    def run(self, work: Workspace) -> None:
        """Add the bridge's output to the residual stream."""
        x = work.stream if self.into is None else self.into(work.stream).to(work.stream.dtype)
        work.stream.add_(self.onto(x).to(work.stream.dtype))
