"""Captions of plots: two or three sentences on how to read each, with its own figures. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from selfspec.profile.schema import Profile
from selfspec.types.draft_path import SIGNS, WORDS
from selfspec.types.draft_work import DRAFT_PATH


def skip_map(profile: Profile) -> str:
    """Return the caption of `plots.profile_plots.skip_map`."""
    layers, skip, path = profile.model.layers, profile.skip_set, profile.path
    columns = f"Each column is one of the model's {layers} layers, counted from 0."
    white = (
        f"White sub-layers are skipped while drafting: {len(skip.attention)} of {layers} attentions and "
        f"{len(skip.mlp)} of {layers} MLPs, {len(skip) / (2 * layers):.0%} of all."
    )
    sentences = [columns, white] if len(skip) or not path.low_precision else [columns]
    few = [
        f"{len(sublayers.attention)} attentions and {len(sublayers.mlp)} MLPs {WORDS[mode]} (marked {SIGNS[mode]})"
        for mode, sublayers in path.quantized_sets
    ]
    if path.head != "full":
        few.append(f"the head {WORDS[path.head]}")
    if few:
        sentences.append(f"With rounded weights run {_listed(few)}; dark sub-layers run in full.")
    if path.cheaper and profile.bits_read is not None:
        sentences.append(f"{profile.bits_read.summary[:1].upper()}{profile.bits_read.summary[1:]}.")
    sentences.append("When the draft is verified everything runs, so that what comes out is what the whole model says.")
    return " ".join(sentences)


def acceptance_by_confidence(profile: Profile) -> str:
    """Return the caption of `plots.profile_plots.acceptance_by_confidence`; the profile must have a curve."""
    curve = profile.acceptance
    assert curve is not None
    low, high = (f"{curve.accepted[i]:.0%} at {curve.confidence[i]:.2g}" for i in (0, -1))
    others = ""
    if curve.candidates:
        others = (
            f" The falling lines are the {len(curve.candidates)} next-best candidates: where the draft is unsure, the "
            f"second is the right one {curve.candidates[0][0]:.0%} of the time, and can be verified in the same pass."
        )
    return (
        "How often drafted tokens were right, by the probability that the draft gave them, on the search's texts: "
        f"{low}, {high}.{others} From these lines a rate-optimal controller decides whether to draft on."
    )


def sensitivity(frame: pd.DataFrame) -> str:
    """Return the caption of `plots.study_plots.sensitivity`."""
    known = frame[frame["gain"].notna()]
    what = (
        f"Each cell is one part of the model, skipped alone while always {frame['draft_tokens'].iloc[0]} tokens are "
        "drafted: by how much that is faster or slower than skipping nothing."
    )
    if known.empty:
        return f"{what} There was no time to measure any."
    worst, best = (known.loc[i] for i in (known["gain"].idxmin(), known["gain"].idxmax()))
    gaining = int((known["gain"] > 0).sum())
    alone = f"{gaining} of {len(known)} pay on their own" if gaining else f"none of {len(known)} pays on its own"
    return (
        f"{what} The model needs {_part(worst)} most ({worst['gain']:+.0%}) and {_part(best)} least "
        f"({best['gain']:+.0%}); {alone}. Skipped together, parts bring more or less than their "
        "sum, which is why sets are searched."
    )


def pareto(frame: pd.DataFrame) -> str:
    """Return the caption of `plots.study_plots.pareto`."""
    front = frame[frame["on_front"]].sort_values("draft_cost")
    if front.empty:
        return "These trials were timed, so that no draft cost is known of them."
    low, high = (front.iloc[i] for i in (0, -1))
    ends = f"{low['acceptance_rate']:.0%} accepted at {low['draft_cost']:.2f} of a plain step"
    if len(front) > 1:
        ends = f"from {ends} to {high['acceptance_rate']:.0%} at {high['draft_cost']:.2f}"
    text = (
        "Each mark is a skip set that was tried: further left its drafts cost less, further up they are right more "
        f"often. {len(front)} of {len(frame)} are beaten by none in both, {ends}."
    )
    best = _fastest(frame)
    if best is None or pd.isna(best["draft_cost"]):
        return text
    right, cost = best["acceptance_rate"], best["draft_cost"]
    return f"{text} The fastest by prediction is accepted at {right:.0%} and costs {cost:.2f}."


def speedup_against_skipped(frame: pd.DataFrame) -> str:
    """Return the caption of `plots.study_plots.speedup_against_skipped`."""
    best = _fastest(frame)
    if best is None:
        return "Every trial was pruned: its figures are of a share of the texts."
    faster = int((frame.loc[~frame["pruned"], "speedup"] > 1).sum())
    return (
        "Bypassing more makes drafts cheaper and wrong more often; the best lies where the two balance: here at "
        f"{best['skipped']} sub-layers ({best['attention']} attentions, {best['mlp']} MLPs), predicted "
        f"{best['speedup']:.2f} times plain decoding. {faster} of {int((~frame['pruned']).sum())} whole trials are "
        "predicted to be faster than plain decoding, which is the line at 1; these are predictions, not measurements."
    )


def progress(frame: pd.DataFrame) -> str:
    """Return the caption of `plots.study_plots.progress`."""
    best = _fastest(frame)
    if best is None:
        return "Every trial was pruned, so that there is no best."
    after = len(frame) - int(best["trial"])
    since = f"the {after} trials after it brought nothing better" if after else "it was the last"
    return (
        f"The line is the best predicted speedup so far, {frame['best'].dropna().iloc[0]:.2f} with the first trial and "
        f"{best['speedup']:.2f} with trial {best['trial']} of {len(frame)}, after {best['seconds']:.3g} of "
        f"{frame['seconds'].iloc[-1]:.3g} seconds of scoring; {since}. A line that still climbs at its end asks for "
        "more trials."
    )


def acceptance_by_position(frame: pd.DataFrame) -> str:
    """Return the caption of `plots.bench_plots.acceptance_by_position`."""
    groups = list(frame.groupby(["method", "temperature"], sort=False))
    firsts = [
        f"{group['acceptance'].iloc[0]:.0%}" + ("" if len(groups) == 1 else f" ({method}, temperature {temperature:g})")
        for (method, temperature), group in groups
    ]
    counted = ""
    if len(groups) == 1 and frame["drafts"].notna().all():
        first, last = frame.iloc[0], frame.iloc[-1]
        counted = f" of {first['drafts']:.0f} drafts"
        if len(frame) > 1:
            counted += f", of which {last['drafts']:.0f} were {last['position']} tokens long or longer"
    return (
        f"The first drafted token was accepted in {_listed(firsts)}{counted}. At each position only drafts that long "
        "count, and a token is accepted only with all before it. The controller drafts on where the draft is "
        "confident, so that the line need not fall; far positions rest on few drafts."
    )


def tokens_by_source(frame: pd.DataFrame) -> str:
    """Return the caption of `plots.bench_plots.tokens_by_source`."""
    (method, temperature), group = next(
        iter(frame[frame["task"] == "all"].groupby(["method", "temperature"], sort=False))
    )
    shares = [f"{row.share:.0%} came from {_named(str(row.source))}" for row in group.itertuples(index=False)]
    return (
        f"Of all tokens of {method} at temperature {temperature:g}, {_listed(shares)}; the others are the model's own. "
        "A token that a proposer had predicted counts as the proposer's, also where the draft path checked it first."
    )


def _named(source: str) -> str:
    return "the draft path" if source == DRAFT_PATH else source


def bench_bars(frame: pd.DataFrame) -> str:
    """Return the caption of `plots.bench_plots.bench_bars`."""
    clauses = []
    for temperature, group in frame[(frame["method"] != "plain") & frame["speedup"].notna()].groupby("temperature"):
        best = group.loc[group["speedup"].idxmax()]
        verdict = "faster than" if best["low"] > 1 else "slower than" if best["high"] < 1 else "not told apart from"
        clauses.append(
            f"at temperature {temperature:g} the fastest beside plain decoding is {best['method']}, "
            f"{best['speedup']:.2f} times its speed ({best['low']:.3g} to {best['high']:.3g}: {verdict} it)"
        )
    text = "; ".join(clauses)
    return (
        "A bar above the line at 1 is faster than this project's plain decoding; the thin line on it is the 95% "
        f"interval of the median over prompts. {text[:1].upper()}{text[1:]}."
    )


def _fastest(frame: pd.DataFrame) -> pd.Series | None:
    completed = frame[~frame["pruned"]]
    return None if completed.empty else completed.loc[completed["tokens_per_second"].idxmax()]


def _part(row: pd.Series) -> str:
    layer = f"layer {row['layer']}"
    return layer if row["part"] == "layer" else f"the {'MLP' if row['part'] == 'mlp' else 'attention'} of {layer}"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
