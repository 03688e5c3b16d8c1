"""Plots of values per sub-layer as a grid with a column per layer, wrapped into blocks of the page's width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from selfspec.show.plots.style import WIDTH, subplots

NAMES = {"attention": "attention", "mlp": "MLP", "layer": "layer"}
_BLOCK, _BLOCKS = 40, 8  # layers per block, and the most blocks; models with more layers have wider blocks
_LABELS, _RULER = 0.95, 0.32  # inches to the left of and below a block


class Grid:
    """The axes of a grid with a row per part (`attention`, `mlp`, `layer`) and a column per layer."""

    def __init__(self, parts: Sequence[str], layers: int, *, width: float = WIDTH, colorbar_width: float = 0.1) -> None:
        """Create the axes. `width`: in inches. `colorbar_width`: inches on the right reserved for a colour bar."""
        self._parts, self._layers = parts, layers
        self._across = min(layers, max(_BLOCK, -(-layers // _BLOCKS)))
        blocks = -(-layers // self._across)
        self.cell = max((width - _LABELS - colorbar_width) / self._across, 0.02)  # inches
        height = len(parts) * min(max(self.cell, 0.2), 0.32) + _RULER
        figure, self.axes = subplots(blocks, height=height + 0.5 / blocks, width=width)
        self.figure: Figure = figure
        for axes, (first, last) in zip(self.axes, self.blocks(), strict=True):
            self._rule(axes, first, last)
        self.axes[-1].set_xlabel("layer")

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the layers of each block as (first, end), with end exclusive."""
        for first in range(0, self._layers, self._across):
            yield first, min(first + self._across, self._layers)

    def cells(self, values: NDArray[Any], **how: Any) -> list[Any]:
        """Draw `values` `[parts, layers]` as coloured cells, and return a mesh for each block.

        `how`: keyword arguments of `pcolormesh`.
        """
        edges = {"edgecolors": "#BBBBBB", "linewidth": 0.6 if self.cell > 0.06 else 0.0}
        rows = np.arange(len(self._parts) + 1) - 0.5
        return [
            axes.pcolormesh(np.arange(first, last + 1) - 0.5, rows, values[:, first:last], **{**edges, **how})
            for axes, (first, last) in zip(self.axes, self.blocks(), strict=True)
        ]

    def _rule(self, axes: Axes, first: int, last: int) -> None:
        axes.set_xlim(first - 0.5, first + self._across - 0.5)
        axes.set_ylim(len(self._parts) - 0.5, -0.5)
        axes.set_yticks(range(len(self._parts)), [NAMES[part] for part in self._parts])
        every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if step * self.cell >= 0.3 or step == 1000)
        axes.set_xticks([layer for layer in range(first, last) if layer % every == 0])
        axes.tick_params(length=0)
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
