"""Plots of trainings: held-out acceptance by minutes of fitting and by draft position."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from selfspec.show.plots.style import WIDTH, series, styled, subplots


def learning_curves(frame: pd.DataFrame, *, width: float = WIDTH) -> Figure:
    """Plot tokens per target pass on held-out texts by minutes of fitting, with a line per kind of trained part.

    `frame`: as returned by `trainings.learning_frame`. `width`: in inches.
    """
    with styled():
        figure, axes = _by_kind(frame, "minutes", "tokens_per_pass", width)
        axes.set(xlabel="minutes of fitting", ylabel="held-out tokens a pass,\ngreedy drafts")
        axes.set_ylim(bottom=1)
    return figure


def acceptance_by_place(frame: pd.DataFrame, *, width: float = WIDTH) -> Figure:
    """Plot the share of drafts that match the text up to each draft position, with a line per kind of trained part.

    `frame`: as returned by `trainings.place_frame`. `width`: in inches.
    """
    with styled():
        figure, axes = _by_kind(frame, "place", "acceptance", width)
        axes.set(xlabel="position in the draft", ylabel="drafts right up to there")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_ylim(bottom=0)
    return figure


def _by_kind(frame: pd.DataFrame, x: str, y: str, width: float) -> tuple[Figure, Axes]:
    """Plot column `y` against column `x`, with a line per kind of trained part."""
    figure, (axes,) = subplots(width=width, height=3.2)
    for number, (kind, group) in enumerate(frame.groupby("kind", sort=False)):
        axes.plot(group[x], group[y], label=kind, **series(number))
    axes.legend(fontsize=8.5)
    return figure, axes
