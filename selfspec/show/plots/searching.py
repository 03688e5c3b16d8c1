"""Plots on searches: progress by strategy, importance of sub-layers, and predictions against measurements."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from selfspec.show.plots.grid import Grid
from selfspec.show.plots.style import BLUE, GREY, MARKS, ORANGE, reference, series, styled, subplots


def races(frame: pd.DataFrame) -> Figure:
    """Plot the best predicted speedup so far against seconds and against trials, with a line per strategy and seed.

    `frame`: as returned by `selfspec.search.analysis.contests.race`.
    """
    with styled():
        figure, axes = subplots(1, 2, height=3.7, sharey=True)
        for number, (name, own) in enumerate(frame.groupby("strategy", sort=False)):
            how = series(number)
            for count, (_, run) in enumerate(own.groupby("seed")):
                run = run[run["best"] > 0]
                label = None if count else name
                axes[0].step(run["seconds"], run["best"], where="post", label=label, **how)
                axes[1].step(run["trial"], run["best"], where="post", **how)
        axes[0].set(xlabel="seconds since the first trial", ylabel="best predicted speedup over plain")
        axes[1].set(xlabel="trials")
        axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
        low, high = frame["best"][frame["best"] > 0].quantile(0.05), frame["best"].max()
        axes[0].set_ylim(low - 0.02, high + 0.01)  # leaves out the first trials, far below the later trials
        if low <= 1 <= high:
            for ax in axes:
                reference(ax, 1, "plain decoding")
        figure.legend(loc="outside lower center", ncols=4, fontsize=8.5)
        return figure


def importances(frame: pd.DataFrame) -> Figure:
    """Plot which share of the variance of the trials' speedups each sub-layer explains, as a grid of layers.

    A sign shows whether skipping the sub-layer correlates with a higher (`+`) or lower speedup. `frame`: as
    returned by `selfspec.search.analysis.contests.importance`.
    """
    layers = int(frame["layer"].max()) + 1
    parts = ["attention", "mlp"]
    values = np.zeros((2, layers))
    with styled():
        grid = Grid(parts, layers, colorbar_width=0.75)
        for row in frame.itertuples():
            values[parts.index(row.part), row.layer] = row.importance
        shown = grid.cells(values, cmap="Greys", vmin=0)
        for axes, (first, last) in zip(grid.axes, grid.blocks(), strict=True):
            for row in frame[frame["layer"].between(first, last - 1)].itertuples():
                sign = "" if row.effect != row.effect else "+" if row.effect > 0 else "\N{MINUS SIGN}"
                colour = "white" if row.importance > 0.6 * values.max() else "black"
                axes.text(row.layer, parts.index(row.part), sign, ha="center", va="center", color=colour, fontsize=8)
        bar = grid.figure.colorbar(shown[0], ax=grid.axes, aspect=8, pad=0.02, format=PercentFormatter(1, decimals=0))
        bar.outline.set_visible(False)
        grid.axes[0].set_title("share of the speedups' variance explained by skipping the sub-layer", fontsize=9.5)
    return grid.figure


def predicted_against_measured(frame: pd.DataFrame) -> Figure:
    """Plot measured against predicted speedups, with 95% intervals, a point for each skip set and temperature.

    `frame`: as returned by `selfspec.search.analysis.contests.predictions`.
    """
    with styled():
        figure, (ax,) = subplots(1, 1, height=3.8, width=4.6)
        low = min(frame["predicted"].min(), frame["low"].min()) - 0.05
        high = max(frame["predicted"].max(), frame["high"].max()) + 0.05
        ax.plot([low, high], [low, high], color=GREY, lw=1, ls=(0, (4, 3)), label="predicted = measured")
        for number, (temperature, own) in enumerate(frame.groupby("temperature", sort=False)):
            spread = [(own["measured"] - own["low"]).clip(lower=0), (own["high"] - own["measured"]).clip(lower=0)]
            ax.errorbar(
                own["predicted"],
                own["measured"],
                yerr=spread,
                fmt=MARKS[number],
                color=(BLUE, ORANGE)[number % 2],
                capsize=2,
                elinewidth=1,
                label=f"temperature {temperature:g}",
            )
        ax.set(
            xlim=(low, high), ylim=(low, high), xlabel="predicted speedup", ylabel="measured speedup", aspect="equal"
        )
        ax.legend(loc="upper left", fontsize=8.5)
        return figure


def costs(fit: pd.DataFrame, verification: pd.DataFrame) -> Figure:
    """Plot timed against predicted costs of draft steps, and the cost of a verification pass by its number of tokens.

    `fit` and `verification`: as returned by `cost_fit` and `verification_costs` of
    `selfspec.search.analysis.contests`.
    """
    with styled():
        figure, (left, right) = subplots(1, 2, height=3.3)
        low, high = (f(getattr(fit[c], n)() for c in ("predicted", "timed")) for f, n in ((min, "min"), (max, "max")))
        left.plot([0.9 * low, 1.1 * high], [0.9 * low, 1.1 * high], color=GREY, lw=1, ls=(0, (4, 3)))
        left.plot(fit["predicted"], fit["timed"], "o", color=BLUE)
        left.set(xlabel="by the cost model", ylabel="timed")
        left.set_title("draft steps of paths left out of the fit, in plain steps")
        right.plot(verification["rows"], verification["share"], "o-", color=BLUE)
        reference(right, 1, "one token")
        right.set(xlabel="tokens of a verification pass", ylabel="cost, in passes over one token")
        right.set_ylim(bottom=0)
        right.xaxis.set_major_locator(MaxNLocator(integer=True))
        return figure
