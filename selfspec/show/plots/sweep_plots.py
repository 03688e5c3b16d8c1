"""Plots of the speedup against the number of skipped sub-layers, for several families of skip sets.

A family is a rule that yields skip sets of growing size, such as random sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from selfspec.show.plots.style import BLACK, GREY, MARKS, SERIES, reference, series, styled, subplots

SCATTERED = ("random sets",)  # families whose points are not joined by a line
SINGLE = ("chosen profile",)  # families drawn as large stars above all lines


def speedup_curves(
    rows: pd.DataFrame,
    *,
    families: Sequence[str] | None = None,
    by: str = "temperature",
    title: str = "temperature {}",
) -> Figure:
    """Plot the speedup over plain decoding by the number of skipped sub-layers, in a panel for each value of `by`.

    `rows`: as returned by `search.analysis.sweep.sweep`. The columns `measured`, `low` and `high`, if present, are
    drawn as open markers with 95% intervals, and the column `bound` as a line. `families`: the families to draw, in
    order (None: all). `title`: the title of a panel, a format string for the value of `by`.
    """
    values, known = list(dict.fromkeys(rows[by])), list(dict.fromkeys(rows["family"]))
    numbers = {family: known.index(family) for family in families or known if family in known}
    with styled():
        figure, axes = subplots(1, len(values), height=4.1, width=max(5.2, 4.4 * len(values)), sharey=True)
        for ax, value in zip(axes, values, strict=True):
            _curves(ax, rows[rows[by] == value], numbers)
            ax.set_title(title.format(value))
            ax.set_xlabel("sub-layers skipped")
        axes[0].set_ylabel(f"{'speedup' if 'measured' in rows else 'predicted speedup'} over plain decoding")
        reference(axes[-1], 1, "plain\ndecoding")
        handles = {label: h for ax in axes for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8.5)
        return figure


def _curves(ax: Axes, rows: pd.DataFrame, numbers: Mapping[str, int]) -> None:
    """Draw the curves of the families in `numbers`, which maps a family to the number that selects its style."""
    ax.axhline(1, color=GREY, lw=1, ls=(0, (4, 3)), zorder=1)
    bounded = rows.dropna(subset=["bound"]) if "bound" in rows else rows[:0]
    if len(curve := bounded[~bounded["family"].isin([*SCATTERED, *SINGLE])].sort_values("skipped")):
        ax.plot(curve["skipped"], curve["bound"], color=BLACK, lw=1, ls=":", label="bound: perfect stopping")
    unlabelled = True
    for family, number in numbers.items():
        own = rows[rows["family"] == family].sort_values("skipped")
        if not len(own):
            continue
        colour, mark = SERIES[number % len(SERIES)], MARKS[number % len(MARKS)]
        if family in SCATTERED:
            ax.plot(own["skipped"], own["speedup"], mark, color=GREY, ms=3.5, alpha=0.8, label=family)
            colour = GREY
        elif family in SINGLE:
            ax.plot(own["skipped"], own["speedup"], "*", color=BLACK, ms=13, zorder=5, label=family)
            colour = BLACK
        else:
            ax.plot(own["skipped"], own["speedup"], label=family, **series(number, marked=True))
        if "measured" in own and len(own := own.dropna(subset=["measured"])):
            below, above = own["measured"] - own["low"], own["high"] - own["measured"]
            ax.errorbar(
                own["skipped"] + 0.13 * (number - 3),  # shifted, so that families do not overlap
                own["measured"],
                yerr=[below.clip(lower=0), above.clip(lower=0)],
                fmt=mark,
                color=colour,
                mfc="white",
                ms=6,
                lw=1,
                capsize=2.5,
                zorder=4,
                label="measured (open marks, 95%)" if unlabelled else None,
            )
            unlabelled = False
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
