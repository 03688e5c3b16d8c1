"""Plots of a search's study: the scores of its trials, and the effect of skipping each sub-layer alone.

The frames are as returned by the functions of `selfspec.search.trial_tables`; widths are in inches.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from selfspec.show.plots.grid import Grid
from selfspec.show.plots.style import BLUE, DIVERGING, GREY, ORANGE, WIDTH, reference, styled, subplots

PLAIN = "plain\ndecoding"
_WRITTEN = 0.3  # width in inches of the smallest cell in which the value is written


def sensitivity(frame: pd.DataFrame, *, width: float = WIDTH) -> Figure:
    """Plot a heat map of the `gain` in speedup from skipping one sub-layer or layer alone; grey if unknown."""
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
    """Plot acceptance against draft cost: the trials, the Pareto front as a line, and the trial of highest speed."""
    known = frame[frame["draft_cost"].notna()]
    front = known[known["on_front"]].sort_values("draft_cost")
    with styled():
        figure, (axes,) = subplots(width=width)
        _trials(axes, known, "draft_cost", "acceptance_rate")
        axes.plot(front["draft_cost"], front["acceptance_rate"], color=BLUE, marker="o", label="Pareto front")
        _fastest(axes, known, "draft_cost", "acceptance_rate")
        axes.set_xlabel("draft cost: a draft step, in plain decode steps")
        axes.set_ylabel("drafted tokens accepted")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g}%"))
        _legend(axes)
    return figure


def speedup_against_skipped(frame: pd.DataFrame, *, width: float = WIDTH) -> Figure:
    """Plot the predicted speedup of trials against the number of skipped sub-layers; a line joins the best trials."""
    completed = frame[~frame["pruned"]]
    best = completed.loc[completed.groupby("skipped")["speedup"].idxmax()].sort_values("skipped")
    with styled():
        figure, (axes,) = subplots(width=width)
        _trials(axes, frame, "skipped", "speedup")
        axes.plot(best["skipped"], best["speedup"], color=BLUE, marker="o", label="best by number skipped")
        _fastest(axes, frame, "skipped", "speedup")
        axes.set_xlabel("sub-layers skipped while drafting")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _speedup(axes)
        _legend(axes)
    return figure


def progress(frame: pd.DataFrame, *, width: float = WIDTH) -> Figure:
    """Plot the best predicted speedup so far, and all trials, against the seconds spent on scoring trials."""
    with styled():
        figure, (axes,) = subplots(width=width)
        _trials(axes, frame, "seconds", "speedup")
        best = frame[frame["best"].notna()]
        axes.step(best["seconds"], best["best"], where="post", color=BLUE, label="best so far")
        _fastest(axes, frame, "seconds", "speedup")
        axes.set_xlabel("seconds of scoring, summed over workers")
        axes.set_xlim(left=0)
        _speedup(axes)
        _legend(axes)
    return figure


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


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=8.5, borderaxespad=0.2, columnspacing=1.2)


def _percent(share: float, _: float) -> str:
    return f"{100 * share:+.0f}%" if round(100 * share) else "0%"
