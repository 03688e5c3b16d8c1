"""Plots of a profile, and of the study that found it: draft modes, acceptance, and the scores of trials.

The frames are as returned by the functions of `selfspec.search.trial_tables`; widths are in inches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from selfspec.basics.errors import SelfspecError
from selfspec.profile.schema import Profile
from selfspec.show.plots.style import (
    BLUE,
    DASHES,
    DIVERGING,
    GREY,
    MARKS,
    ORANGE,
    SERIES,
    SKY,
    WIDTH,
    Grid,
    reference,
    styled,
    subplots,
)
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
            axes.plot(curve.confidence, chances, color=colour, marker=mark, ls=dash, label=label, clip_on=False)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.03)
        axes.set_xlabel("the draft's confidence in the drafted token")
        axes.set_ylabel("share of drafted positions")
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
    return figure


PLAIN = "plain\ndecoding"
_WRITTEN = 0.3  # width in inches of the smallest cell in which the value is written


def sensitivity(frame: pd.DataFrame, *, width: float = WIDTH) -> Figure:
    """Plot a heat map of the relative gain in speedup from skipping one sub-layer or layer alone; grey if unknown.

    `frame`: of `sensitivity_frame`.
    """
    layers = int(frame["layer"].max()) + 1
    parts = [part for part in ("layer", "attention", "mlp") if part in set(frame["part"])]
    gains = np.full((len(parts), layers), np.nan)
    for layer, part, gain in frame[["layer", "part", "gain"]].itertuples(index=False):
        gains[parts.index(part), layer] = gain
    limit = float(np.nanmax(np.abs(gains))) if np.isfinite(gains).any() else 0.0
    with styled():
        grid = Grid(parts, layers, width=width, colorbar_width=0.75)
        norm = CenteredNorm(0, limit or 0.01)
        shown = grid.cells(np.ma.masked_invalid(gains), cmap=DIVERGING, norm=norm)
        for axes in grid.axes:
            axes.set_facecolor("#DDDDDD")
        bar = grid.figure.colorbar(shown[0], ax=grid.axes, aspect=8, pad=0.02, format=FuncFormatter(_percent))
        grid.axes[0].set_title("gain in speedup with one part alone skipped, against none", fontsize=9.5)
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=8)
        for axes, (first, last) in zip(grid.axes, grid.blocks(), strict=True):
            _write(axes, gains, first, last, limit, values=grid.cell >= _WRITTEN)
    return grid.figure


def _write(axes: Axes, gains: np.ndarray, first: int, last: int, limit: float, *, values: bool) -> None:
    """Write the value in each cell, or in small cells a dot for gains above 0, which greyscale print cannot show."""
    for row, layer in zip(*np.nonzero(np.isfinite(gains[:, first:last])), strict=True):
        gain = float(gains[row, first + layer])
        text = _percent(gain, 0) if values else "•" if gain > 0 else ""
        colour = "white" if abs(gain) > 0.6 * limit else "black"
        if text:
            axes.text(first + layer, row, text, ha="center", va="center", fontsize=6.5 if values else 6, color=colour)


def pareto(frame: pd.DataFrame, *, width: float = WIDTH) -> Figure:
    """Plot acceptance rate against draft cost: the trials, the Pareto front as a line, and the fastest trial.

    The draft cost is the time of a draft step in plain decode steps. `frame`: of `trials_frame`.
    """
    known = frame[frame["draft_cost"].notna()]
    front = known[known["on_front"]].sort_values("draft_cost")
    with styled():
        figure, (axes,) = subplots(width=width)
        _trials_and_line(axes, known, "draft_cost", "acceptance_rate", front, "Pareto front")
        axes.set_xlabel("draft cost: a draft step, in plain decode steps")
        axes.set_ylabel("drafted tokens accepted")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g}%"))
        _legend_above(axes)
    return figure


def speedup_against_skipped(frame: pd.DataFrame, *, width: float = WIDTH) -> Figure:
    """Plot the predicted speedup of trials against the number of skipped sub-layers.

    A line joins the best trial of each number. `frame`: of `trials_frame`.
    """
    completed = frame[~frame["pruned"]]
    best = completed.loc[completed.groupby("skipped")["speedup"].idxmax()].sort_values("skipped")
    with styled():
        figure, (axes,) = subplots(width=width)
        _trials_and_line(axes, frame, "skipped", "speedup", best, "best by number skipped")
        axes.set_xlabel("sub-layers skipped while drafting")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _speedup(axes)
        _legend_above(axes)
    return figure


def progress(frame: pd.DataFrame, *, width: float = WIDTH) -> Figure:
    """Plot the best predicted speedup so far, and all trials, against the seconds spent on scoring trials.

    `frame`: of `trials_frame`.
    """
    with styled():
        figure, (axes,) = subplots(width=width)
        _trials(axes, frame, "seconds", "speedup")
        best = frame[frame["best"].notna()]
        axes.step(best["seconds"], best["best"], where="post", color=BLUE, label="best so far")
        _fastest(axes, frame, "seconds", "speedup")
        axes.set_xlabel("seconds of scoring, summed over workers")
        axes.set_xlim(left=0)
        _speedup(axes)
        _legend_above(axes)
    return figure


def _trials_and_line(axes: Axes, frame: pd.DataFrame, x: str, y: str, line: pd.DataFrame, label: str) -> None:
    """Plot column `y` against column `x`: all trials of `frame`, those in `line` joined, and the fastest trial."""
    _trials(axes, frame, x, y)
    axes.plot(line[x], line[y], color=BLUE, marker="o", label=label)
    _fastest(axes, frame, x, y)


def _trials(axes: Axes, frame: pd.DataFrame, x: str, y: str) -> None:
    for pruned, mark, label in ((False, "o", "trial"), (True, "x", "pruned: on a part of the texts")):
        group = frame[frame["pruned"] == pruned]
        if len(group):
            face, edge = (GREY, None) if pruned else ("white", GREY)
            axes.scatter(group[x], group[y], s=22, marker=mark, lw=1, c=face, edgecolors=edge, label=label)


def _fastest(axes: Axes, frame: pd.DataFrame, x: str, y: str) -> None:
    completed = frame[~frame["pruned"]]
    if len(completed):
        best = completed.loc[completed["tokens_per_second"].idxmax()]
        axes.scatter(
            [best[x]], [best[y]], s=130, marker="*", color=ORANGE, ec="black", lw=0.7, zorder=4, label="fastest"
        )


def _speedup(axes: Axes) -> None:
    axes.set_ylabel("predicted speedup over plain decoding")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}x"))
    reference(axes, 1, PLAIN)


def _legend_above(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=8.5, borderaxespad=0.2, columnspacing=1.2)


def _percent(share: float, _: float) -> str:
    return f"{100 * share:+.0f}%" if round(100 * share) else "0%"
