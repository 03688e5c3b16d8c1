"""Plots of a benchmark (speedups, sources of tokens, acceptance by draft position) and of training runs."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from selfspec.basics.errors import SelfspecError
from selfspec.show.plots.style import DASHES, MARKS, SERIES, WIDTH, reference, series, styled, subplots

PLAIN = "plain"
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo")


def bench_bars(frame: pd.DataFrame, *, width: float = WIDTH) -> Figure:
    """Plot speedups over plain decoding with 95% intervals: a group of bars per method, with a bar per temperature.

    `frame`: as returned by `tables.bench_frame`. `width`: in inches. Raises `SelfspecError` if only plain decoding was
    measured.
    """
    others = frame[(frame["method"] != PLAIN) & frame["speedup"].notna()]
    methods, temperatures = list(dict.fromkeys(others["method"])), sorted(set(others["temperature"]))
    if not methods:
        raise SelfspecError("the benchmark holds no other method beside plain decoding; see selfspec bench --methods")
    thick = 0.8 / len(temperatures)
    with styled():
        figure, (axes,) = subplots(width=width, height=3.6)
        for number, temperature in enumerate(temperatures):
            group = others[others["temperature"] == temperature]
            places = [methods.index(m) + thick * (number - (len(temperatures) - 1) / 2) for m in group["method"]]
            look = number % len(_HATCHES)
            bars = axes.bar(
                places,
                group["speedup"],
                thick * 0.92,
                yerr=np.abs(np.array([group["speedup"] - group["low"], group["high"] - group["speedup"]])),
                color=SERIES[look],
                hatch=_HATCHES[look],
                edgecolor="white",
                error_kw={"ecolor": "black", "lw": 1, "capsize": 2.5},
                label=f"temperature {temperature:g}",
            )
            for bar, high, value in zip(bars, group["high"], group["speedup"], strict=True):
                middle = bar.get_x() + bar.get_width() / 2
                text = axes.annotate(
                    f"{value:.2f}", (middle, high), (0, 3), textcoords="offset points", ha="center", fontsize=8
                )
                text.set_bbox({"fc": "white", "ec": "none", "pad": 0.6})  # readable over the reference line
        axes.set_xticks(range(len(methods)), methods)
        axes.tick_params(axis="x", length=0)
        axes.margins(x=0.02, y=0.12)
        axes.set_ylabel("times plain decoding's speed\n(95% interval)")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}x"))
        reference(axes, 1, "plain\ndecoding")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, fontsize=8.5, borderaxespad=0.2)
    return figure


def tokens_by_source(frame: pd.DataFrame, *, width: float = WIDTH) -> Figure:
    """Plot the share of each task's tokens by source as stacked bars, in a panel for each method and temperature.

    Tokens without a source, which make up the remainder to 100%, come from the model itself. `frame`: as returned by
    `tables.source_frame`. `width`: in inches. Raises `SelfspecError` if the frame is empty.
    """
    if frame.empty:
        raise SelfspecError(
            "the benchmark does not tell where tokens came from: nothing was drafted, or its file is too old"
        )
    tasks, sources = (list(dict.fromkeys(frame[column])) for column in ("task", "source"))
    groups = list(frame.groupby(["method", "temperature"], sort=False))
    with styled():
        figure, panels = subplots(len(groups), height=0.75 + 0.27 * len(tasks), width=width, sharex=True)
        for axes, ((method, temperature), group) in zip(panels, groups, strict=True):
            before = np.zeros(len(tasks))
            for look, source in enumerate(sources):
                mine = group[group["source"] == source].set_index("task")["share"].reindex(tasks).fillna(0).to_numpy()
                axes.barh(
                    tasks,
                    mine,
                    0.72,
                    left=before,
                    color=SERIES[look % len(SERIES)],
                    hatch=_HATCHES[look % len(_HATCHES)],
                    edgecolor="white",
                    label=source,
                )
                before += mine
            axes.set_title(f"{method}, temperature {temperature:g}", fontsize=9)
            axes.grid(axis="x")
            axes.grid(visible=False, axis="y")
            axes.tick_params(axis="y", length=0)
            axes.invert_yaxis()
            axes.set_xlim(0, 1)
            axes.xaxis.set_major_formatter(PercentFormatter(1))
        panels[-1].set_xlabel("share of tokens by the source that proposed them; the others are the model's own")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=4, fontsize=8.5)
    return figure


def acceptance_by_position(frame: pd.DataFrame, *, width: float = WIDTH) -> Figure:
    """Plot the share of drafted tokens that were accepted by draft position, with a line per method and temperature.

    `frame`: as returned by `tables.position_frame`. `width`: in inches. A single line is annotated with the number of
    drafts at each position, if known. Raises `SelfspecError` if nothing was drafted.
    """
    if frame.empty:
        raise SelfspecError("nothing was drafted, so there is no acceptance to plot")
    groups = list(frame.groupby(["method", "temperature"], sort=False))
    with styled():
        figure, (axes,) = subplots(width=width)
        for number, ((method, temperature), group) in enumerate(groups):
            look = number % len(SERIES)
            label = f"{method}, temperature {temperature:g}"
            axes.plot(
                group["position"],
                group["acceptance"],
                color=SERIES[look],
                marker=MARKS[look],
                ls=DASHES[look],
                label=label,
            )
        if len(groups) == 1 and frame["drafts"].notna().all():
            for place, share, drafts in frame[["position", "acceptance", "drafts"]].itertuples(index=False):
                axes.annotate(
                    f"of {drafts:.0f}", (place, share), (0, 6), textcoords="offset points", ha="center", fontsize=7.5
                )
        axes.set_xlabel("position in the draft (1: the first drafted token)")
        axes.set_ylabel("drafts whose token was accepted")
        axes.set_ylim(-0.02, 1.1)
        axes.set_yticks(np.linspace(0, 1, 6))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=3 if len(groups) < 4 else 2, fontsize=8.5, borderaxespad=0.2
        )
    return figure


def learning_curves(frame: pd.DataFrame, *, width: float = WIDTH) -> Figure:
    """Plot tokens per target pass on held-out texts by minutes of fitting, with a line per kind of trained part.

    `frame`: as returned by `tables.learning_frame`. `width`: in inches.
    """
    with styled():
        figure, axes = _by_kind(frame, "minutes", "tokens_per_pass", width)
        axes.set(xlabel="minutes of fitting", ylabel="held-out tokens a pass,\ngreedy drafts")
        axes.set_ylim(bottom=1)
    return figure


def acceptance_by_place(frame: pd.DataFrame, *, width: float = WIDTH) -> Figure:
    """Plot the share of drafts that match the text up to each draft position, with a line per kind of trained part.

    `frame`: as returned by `tables.place_frame`. `width`: in inches.
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
