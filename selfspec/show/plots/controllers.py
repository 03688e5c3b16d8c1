"""Plots that compare controllers: thresholds, draft lengths, acceptance, and speedups."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from selfspec.show.plots.style import BLACK, BLUE, GREY, MARKS, ORANGE, SERIES, reference, series, styled, subplots
from selfspec.types.acceptance import AcceptanceCurve

FEWEST = 8  # draft positions with fewer tokens are not plotted


def trajectories(runs: Mapping[str, pd.DataFrame]) -> Figure:
    """Plot the confidence threshold and the accepted share of drafts, round by round, with a line per controller.

    `runs`: for each controller's name, a frame as returned by `selfspec.search.analysis.drafted.rounds_frame`.
    """
    with styled():
        figure, (above, below) = subplots(2, 1, height=2.3, sharex=True)
        for number, (name, rounds) in enumerate(runs.items()):
            rounds = rounds.reset_index(drop=True)
            how = series(number)
            above.plot(rounds.index + 1, rounds["threshold"], label=name, **how)
            drafts = rounds[rounds["drafted"] > 0]
            share = (drafts["accepted"] / drafts["drafted"]).rolling(12, min_periods=1).mean()
            below.plot(drafts.index + 1, share, **how)
        first = next(iter(runs.values())).reset_index(drop=True)
        for start in first.index[first["round"] == 1]:
            for ax in (above, below):
                ax.axvline(start + 1, color="#DDDDDD", lw=0.8, zorder=0)
        above.set(ylabel="threshold", title="the threshold, round by round (vertical lines: a new text)", ylim=(0, 1))
        below.set(ylabel="accepted share", xlabel="round", title="of each draft, mean of 12 drafts", ylim=(0, 1.02))
        below.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        above.legend(ncols=2, fontsize=8.5)
        return figure


def draft_lengths(runs: Mapping[str, pd.DataFrame]) -> Figure:
    """Plot the distribution of draft lengths over rounds, in a panel per controller; `runs`: as in `trajectories`."""
    with styled():
        figure, axes = subplots(1, len(runs), height=2.7, sharey=True)
        longest = max(int(rounds["drafted"].max()) for rounds in runs.values())
        for number, (ax, (name, rounds)) in enumerate(zip(axes, runs.items(), strict=True)):
            shares = rounds["drafted"].value_counts(normalize=True).reindex(range(longest + 1), fill_value=0.0)
            ax.bar(shares.index, shares, color=SERIES[number % len(SERIES)], width=0.75)
            acceptance_rate = rounds["accepted"].sum() / max(rounds["drafted"].sum(), 1)
            ax.set_title(f"{name}\nmean {rounds['drafted'].mean():.2f}, {acceptance_rate:.0%} accepted", fontsize=9)
            ax.set_xlabel("tokens drafted")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0].set_ylabel("share of the rounds")
        axes[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        return figure


def best_lengths(frame: pd.DataFrame) -> Figure:
    """Plot the best fixed draft length, and its speedup, against the acceptance rate, by theory and on traces.

    `frame`: as returned by `selfspec.search.analysis.drafted.best_lengths`.
    """
    theory, traces = (frame[frame["source"] == source] for source in ("theory", "trace"))
    with styled():
        figure, (left, right) = subplots(1, 2, height=3.2)
        left.step(theory["acceptance"], theory["k"], where="mid", color=BLUE, label="theory: i.i.d. acceptance")
        left.plot(traces["acceptance"], traces["k"], "s", color=ORANGE, mec="black", mew=0.5, label="traces")
        left.set(ylabel="best number of drafted tokens, K")
        left.yaxis.set_major_locator(MaxNLocator(integer=True))
        left.legend(loc="upper left", fontsize=8.5)
        reference(right, 1, "plain decoding")
        right.plot(theory["acceptance"], theory["speedup"], color=BLUE)
        right.plot(traces["acceptance"], traces["speedup"], "s", color=ORANGE, mec="black", mew=0.5)
        right.set(ylabel="speedup over plain decoding at that K")
        for ax in (left, right):
            ax.set_xlabel("acceptance (all before accepted)")
            ax.set_xlim(0, 1)
            ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        return figure


def acceptance(by_place: pd.DataFrame, by_confidence: pd.DataFrame, curve: AcceptanceCurve | None = None) -> Figure:
    """Plot acceptance by draft position and by the draft's confidence, with 95% intervals.

    The frames are as returned by `selfspec.search.analysis.drafted.acceptance_by`. `curve`: the acceptance curve of a
    profile, plotted for comparison (None: not plotted).
    """
    with styled():
        figure, (left, right) = subplots(1, 2, height=3.2, sharey=True)
        by_place = by_place[by_place["tokens"] >= FEWEST]
        _with_intervals(left, by_place, "place")
        left.set(xlabel="position in the draft", ylabel="accepted, if all before were")
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
        for row in by_place.itertuples():
            left.annotate(
                f"{row.tokens}", (row.place, 0.02), ha="center", fontsize=7, color="#666666", rotation=90, va="bottom"
            )
        right.plot([0, 1], [0, 1], color=GREY, lw=1, ls=(0, (4, 3)), label="confidence = acceptance")
        _with_intervals(right, by_confidence, "confidence")
        if curve is not None:
            right.plot(curve.confidence, curve.accepted, color=ORANGE, label="the profile's curve")
        right.set(xlabel="the draft's probability of its token", xlim=(0, 1), ylim=(0, 1.02))
        right.legend(loc="upper left", fontsize=8.5)
        left.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        left.set_title("by position (number of tokens below)")
        right.set_title("by confidence")
        return figure


def _with_intervals(ax: Axes, frame: pd.DataFrame, x: str) -> None:
    spread = [(frame["accepted"] - frame["low"]).clip(lower=0), (frame["high"] - frame["accepted"]).clip(lower=0)]
    ax.errorbar(frame[x], frame["accepted"], yerr=spread, fmt="o-", color=BLUE, lw=1.4, elinewidth=1, capsize=2)


def controllers(frame: pd.DataFrame) -> Figure:
    """Plot the predicted speedups of controllers, with one and with the largest number of candidates per position.

    Dotted lines show the bounds, the speedups of perfect stopping. `frame`: as returned by
    `selfspec.search.analysis.drafted.compare_controllers`.
    """
    kinds = list(dict.fromkeys(frame["controller"]))
    most = int(frame["candidates"].max())
    with styled():
        figure, (ax,) = subplots(1, 1, height=3.2, width=5.6)
        for number, (candidates, label) in enumerate({1: "chains", most: f"up to {most} candidates each"}.items()):
            own = frame[frame["candidates"] == candidates].set_index("controller").loc[kinds]
            colour = (BLUE, ORANGE)[number]
            x = np.arange(len(kinds)) + (number - 0.5) * 0.2
            ax.plot(x, own["speedup"], MARKS[number], color=colour, ms=8, mec="black", mew=0.5, label=label)
            for x_position, speedup in zip(x, own["speedup"], strict=True):
                above = (0, 7) if number else (0, -15)
                ax.annotate(
                    f"{speedup:.2f}", (x_position, speedup), above, textcoords="offset points", ha="center", fontsize=8
                )
            bound = own["bound"].iloc[0]
            ax.axhline(bound, color=colour, lw=1, ls=":", label=f"perfect stopping, {label}")
        reference(ax, 1, "plain decoding")
        ax.set_xticks(range(len(kinds)), kinds)
        ax.set(xlim=(-0.6, len(kinds) - 0.4), ylabel="predicted speedup over plain")
        ax.margins(y=0.12)
        figure.legend(loc="outside lower center", ncols=2, fontsize=8.5)
        return figure


def candidates(frame: pd.DataFrame) -> Figure:
    """Plot speedup and tokens per pass against the number of candidates per draft position, a line per controller.

    `frame`: as returned by `selfspec.search.analysis.drafted.compare_controllers`.
    """
    with styled():
        figure, (left, right) = subplots(1, 2, height=3.2)
        reference(left, 1, "plain decoding")
        for number, (kind, own) in enumerate(frame.groupby("controller", sort=False)):
            how = series(number, marked=True)
            left.plot(own["candidates"], own["speedup"], label=kind, **how)
            right.plot(own["candidates"], own["tokens_per_round"], **how)
        bound = frame.groupby("candidates")["bound"].first()
        left.plot(bound.index, bound, color=BLACK, lw=1, ls=":", label="perfect stopping")
        left.set(ylabel="predicted speedup over plain")
        right.set(ylabel="tokens a pass")
        for ax in (left, right):
            ax.set_xlabel("candidates per position, at most")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside lower center", ncols=5, fontsize=8.5)
        return figure
