"""The common style of all plots: colour-blind-safe colours, and markers that differ in greyscale print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
DIVERGING, SEQUENTIAL = "PuOr", "cividis"
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
