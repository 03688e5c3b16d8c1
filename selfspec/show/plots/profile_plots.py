"""Plots of a profile: how sub-layers run while drafting, and acceptance by the draft's confidence."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from selfspec.basics.errors import SelfspecError
from selfspec.profile.schema import Profile
from selfspec.show.plots.grid import Grid
from selfspec.show.plots.style import BLUE, DASHES, MARKS, SERIES, SKY, WIDTH, styled, subplots
from selfspec.types.draft_path import MODES, SIGNS, WORDS, DraftPath, Mode

COLOURS: dict[Mode, str] = {"full": BLUE, "int8": SKY, "int4": "#F0E442", "skip": "#FFFFFF"}  # also lighter in print
_MODE_LABELS: dict[Mode, str] = {"full": "in full", "int8": "8: int8", "int4": "4: int4", "skip": "skipped"}
_FURTHER = 4  # candidates whose acceptance is plotted
_LEGIBLE = 0.09  # width in inches of the smallest cell that is marked with a digit


def skip_map(profile: Profile, *, width: float = WIDTH) -> Figure:
    """Plot how each sub-layer runs while drafting, as a grid of layers with attention above and MLP below.

    The fewer bytes a draft step reads of a sub-layer, the lighter is its cell. Sub-layers in int8 or int4 are marked
    with a digit if it fits. `width`: in inches.
    """
    layers, path = profile.model.layers, profile.path
    modes = np.array([MODES.index(mode) for mode in path.modes(layers)]).reshape(2, layers)
    with styled():
        grid = Grid(("attention", "mlp"), layers, width=width)
        grid.cells(modes / (len(MODES) - 1), cmap=ListedColormap([*COLOURS.values()]), vmin=0, vmax=1)
        if grid.cell >= _LEGIBLE:
            _signs(grid, modes)
        handles = _legend(path, {MODES[mode] for mode in modes.flat})
        grid.figure.legend(handles=handles, loc="outside upper left", ncols=max(2, int(width / 1.4)), fontsize=8.5)
    return grid.figure


def _signs(grid: Grid, modes: NDArray[Any]) -> None:
    size = min(8.5, grid.cell * 60)
    for axes, (first, last) in zip(grid.axes, grid.blocks(), strict=True):
        for row, layer in np.argwhere(np.isin(modes[:, first:last], [MODES.index("int8"), MODES.index("int4")])):
            sign = SIGNS[MODES[modes[row, first + layer]]]
            axes.text(first + layer, row, sign, ha="center", va="center_baseline", fontsize=size)


def _legend(path: DraftPath, used: set[Mode]) -> list[Patch]:
    """Return the legend's patches: the modes in `used`; for a path without quantised modes, always both colours."""
    words: dict[Mode, str] = {"full": "runs", "skip": "skipped while drafting"}
    head: dict[Mode, str] = {}
    if path.low_precision:
        words = {mode: label for mode, label in _MODE_LABELS.items() if mode in used}
        head = {path.head: f"the head: {WORDS[path.head]}"}
    entries = [*words.items(), *head.items()]
    return [Patch(fc=COLOURS[mode], ec="#888888", label=label) for mode, label in entries]


def acceptance_by_confidence(profile: Profile, *, width: float = WIDTH) -> Figure:
    """Plot the profile's acceptance curve: how often drafted tokens are accepted, by the draft's confidence.

    Further lines show the next drafted token, and the other candidates for the position. `width`: in inches. Raises
    `SelfspecError` if the profile has no acceptance curve.
    """
    curve = profile.acceptance
    if curve is None:
        raise SelfspecError(
            "the profile holds no acceptance curve; expected a profile of selfspec search with candidates"
        )
    lines = {"the drafted token is right": curve.accepted, "the next token is right, too": curve.following}
    for rank, chances in enumerate(curve.candidates[:_FURTHER], 2):
        lines[f"candidate {rank} is right instead"] = chances
    with styled():
        figure, (axes,) = subplots(width=width)
        for (label, chances), colour, mark, dash in zip(lines.items(), SERIES, MARKS, DASHES, strict=False):
            axes.plot(curve.confidence, chances, color=colour, marker=mark, ls=dash, label=label)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.03)
        axes.set_xlabel("confidence: the draft's probability of the token that it drafts")
        axes.set_ylabel("share of drafted positions")
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
    return figure
