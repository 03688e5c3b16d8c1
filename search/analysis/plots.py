"""Plots of the notebooks: a search's progress, predictions, skipped sub-layers, thresholds, draft lengths, acceptance.

Frames come from `trials` and `sweep`, the modules beside this one. A family is a rule that yields skip sets of growing
size, such as random sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from selfspec.show.plots.style import (
    BLACK,
    BLUE,
    GREY,
    MARKS,
    ORANGE,
    SERIES,
    Grid,
    reference,
    series,
    styled,
    subplots,
)
from selfspec.types.acceptance import AcceptanceCurve


def races(frame: pd.DataFrame) -> Figure:
    """Plot the best predicted speedup so far against seconds and against trials, with a line per strategy and seed.

    `frame`: as returned by `trials.race`.
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

    A sign shows whether skipping the sub-layer correlates with a higher (`+`) or lower speedup. `frame`: as returned by
    `trials.importance`.
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

    `frame`: as returned by `trials.predictions`.
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

    `fit` and `verification`: as returned by `cost_fit` and `verification_costs` of `trials`.
    """
    with styled():
        figure, (left, right) = subplots(1, 2, height=3.3)
        low, high = (f(getattr(fit[c], n)() for c in ("predicted", "timed")) for f, n in ((min, "min"), (max, "max")))
        left.plot([0.9 * low, 1.1 * high], [0.9 * low, 1.1 * high], color=GREY, lw=1, ls=(0, (4, 3)))
        left.plot(fit["predicted"], fit["timed"], "o", color=BLUE)
        left.set(xlabel="cost by the cost model, in plain steps", ylabel="timed cost, in plain steps")
        left.set_title("draft steps left out of the fit")
        right.set_title("verification")
        right.plot(verification["rows"], verification["share"], "o-", color=BLUE)
        reference(right, 1, "one token")
        right.set(xlabel="tokens of a verification pass", ylabel="cost, in passes over one token")
        right.set_ylim(bottom=0)
        right.xaxis.set_major_locator(MaxNLocator(integer=True))
        return figure


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

    `rows`: as returned by `sweep.sweep`. The columns `measured`, `low` and `high`, if present, are drawn as open
    markers with 95% intervals, and the column `bound` as a line. `families`: the families to draw, in order
    (None: all). `title`: the title of a panel, a format string for the value of `by`.
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


FEWEST = 8  # draft positions with fewer tokens are not plotted


def trajectories(runs: Mapping[str, pd.DataFrame]) -> Figure:
    """Plot the confidence threshold and the accepted share of drafts, round by round, with a line per controller.

    `runs`: for each controller's name, a frame as returned by `trials.rounds_frame`.
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
        name, first = next((name, rounds.reset_index(drop=True)) for name, rounds in runs.items())
        for start in first.index[first["round"] == 1]:
            for ax in (above, below):
                ax.axvline(start + 1, color="#DDDDDD", lw=0.8, zorder=0)
        above.set(ylabel="threshold", title=f"threshold, round by round (vertical lines: new texts of {name})")
        above.set_ylim(0, 1)
        below.set(
            ylabel="accepted share", xlabel="round", title="accepted share of a draft, mean of the last 12 drafts"
        )
        below.set_ylim(0, 1.02)
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

    `frame`: as returned by `trials.best_lengths`.
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

    The frames are as returned by `trials.acceptance_by`. `curve`: the acceptance curve of a profile,
    plotted for comparison (None: not plotted).
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
        right.set(xlabel="the draft's confidence in its token", xlim=(0, 1), ylim=(0, 1.02))
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
    `trials.compare_controllers`.
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
                    f"{speedup:.2f}",
                    (x_position, speedup),
                    above,
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                    bbox={"fc": "white", "ec": "none", "pad": 0.5},  # legible on the line of plain decoding
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

    `frame`: as returned by `trials.compare_controllers`.
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
