"""The common style of all plots, markers that differ in greyscale print, and grids of a value for each sub-layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import write_bytes

# Okabe and Ito (2008), without the yellow, which is hardly visible on white.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#000000",
    "#888888",
)
SERIES = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK, GREY)
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2, 1, 2)))
DIVERGING = "PuOr"
FORMATS = ("png", "svg", "pdf")
WIDTH = 7.2  # inches, the width of a page's column
_RC = {
    "font.family": ["DejaVu Sans", "sans-serif"],  # the second applies to SVGs where the first is not installed
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.5,
    "figure.facecolor": "white",
    "savefig.dpi": 150,
    "svg.fonttype": "none",
    "svg.hashsalt": "selfspec",  # reproducible files
}


@contextmanager
def styled() -> Iterator[None]:
    """Apply the project's matplotlib style within the context; the global settings are restored afterwards."""
    with mpl.rc_context(_RC):
        yield


def subplots(
    rows: int = 1, columns: int = 1, *, height: float = 3.4, width: float = WIDTH, **how: Any
) -> tuple[Figure, list[Axes]]:
    """Return a new figure and its axes, row by row.

    `height`: the height of each row in inches. `width`: the width of the figure in inches. `how`: keyword arguments of
    `Figure.subplots`. The figure is not registered with pyplot and need not be closed.
    """
    figure = Figure(figsize=(width, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **how)
    return figure, list(grid.flat)


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically in the format of its file name: `.png`, `.svg` or `.pdf`.

    Raises `SelfspecError` for other suffixes, and if the file cannot be written.
    """
    check_format(path)
    write_bytes(path, _drawn(figure, path.suffix[1:].lower()))


def _drawn(figure: Figure, form: str) -> bytes:
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    buffer = BytesIO()
    with styled():
        figure.savefig(buffer, format=form, metadata=undated.get(form))
    return buffer.getvalue()


def check_format(path: Path) -> None:
    """Raise `SelfspecError` unless the file name ends with .png, .svg or .pdf."""
    if path.suffix[1:].lower() not in FORMATS:
        raise SelfspecError(f"{path}: expected a name that ends with .{', .'.join(FORMATS[:-1])} or .{FORMATS[-1]}")


def svg(figure: Figure, *, name: str = "", label: str = "") -> str:
    """Return a figure as an `<svg>` element for an HTML page.

    `label`: the text alternative. `name`: a prefix of letters and digits that makes element ids unique within the page.
    """
    text = _drawn(figure, "svg").decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r"\s*<style.*?</style>", "", text, count=1, flags=re.DOTALL)  # would apply to the whole page
    if name:
        text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    aria = f' role="img" aria-label="{escape(label)}"' if label else ""
    return text.replace("<svg ", f'<svg style="stroke-linejoin: round; stroke-linecap: butt"{aria} ', 1)


def series(number: int, *, marked: bool = False) -> dict[str, Any]:
    """Return the colour, the dashes and, if `marked`, the marker of line `number` (from 0), as keyword arguments."""
    how = {"color": SERIES[number % len(SERIES)], "ls": DASHES[number % len(DASHES)]}
    return {**how, "marker": MARKS[number % len(MARKS)]} if marked else how


def reference(axes: Axes, value: float, label: str) -> None:
    """Draw a horizontal reference line at `value`, such as the speed of plain decoding, labelled on the right."""
    axes.axhline(value, color=GREY, lw=1, ls=(0, (4, 3)), zorder=1)
    axes.annotate(
        label,
        (1, value),
        (4, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color="#555555",
    )


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
