"""Captions of plots: a few sentences on how to read a plot, with figures from its data. Does not import torch."""

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
        sentences.append(f"With quantised weights run {_listed(few)}; dark sub-layers run in full.")
    if path.cheaper and profile.bits_read is not None:
        sentences.append(f"{profile.bits_read.summary[:1].upper()}{profile.bits_read.summary[1:]}.")
    sentences.append("Verification passes run the full model, so that skipping does not change the output.")
    return " ".join(sentences)


def acceptance_by_confidence(profile: Profile) -> str:
    """Return the caption of `plots.profile_plots.acceptance_by_confidence`; `profile.acceptance` must not be None."""
    curve = profile.acceptance
    assert curve is not None
    low, high = (f"{curve.accepted[i]:.0%} at {curve.confidence[i]:.2g}" for i in (0, -1))
    others = ""
    if curve.candidates:
        others = (
            f" The falling lines are the {len(curve.candidates)} next-best candidates: at the lowest confidence, the "
            f"second candidate is right {curve.candidates[0][0]:.0%} of the time; one pass verifies all candidates."
        )
    return (
        "How often drafted tokens were accepted, by the draft's confidence in the token, on the search's texts: "
        f"{low}, {high}.{others} The rate-optimal controller decides by these lines whether to draft another token."
    )


def sensitivity(frame: pd.DataFrame) -> str:
    """Return the caption of `plots.profile_plots.sensitivity`."""
    known = frame[frame["gain"].notna()]
    what = (
        "Each cell shows by how much decoding is faster or slower if that part alone is skipped while drafting than if "
        f"nothing is skipped; drafts have always {frame['draft_tokens'].iloc[0]} tokens."
    )
    if known.empty:
        return f"{what} No part was measured in the time of the search."
    worst, best = (known.loc[i] for i in (known["gain"].idxmin(), known["gain"].idxmax()))
    gaining = int((known["gain"] > 0).sum())
    alone = f"{gaining} of {len(known)} parts gain alone" if gaining else f"none of {len(known)} parts gains alone"
    return (
        f"{what} The model needs {_part(worst)} most ({worst['gain']:+.0%}) and {_part(best)} least "
        f"({best['gain']:+.0%}); {alone}. Parts skipped together gain more or less than the sum of "
        "their gains, which is why the search tries sets of parts."
    )


def pareto(frame: pd.DataFrame) -> str:
    """Return the caption of `plots.profile_plots.pareto`."""
    front = frame[frame["on_front"]].sort_values("draft_cost")
    if front.empty:
        return "The draft costs of these trials are unknown, because the trials were timed as a whole."
    low, high = (front.iloc[i] for i in (0, -1))
    ends = f"{low['acceptance_rate']:.0%} accepted at {low['draft_cost']:.2f} of a plain decode step"
    if len(front) > 1:
        ends = f"from {ends} to {high['acceptance_rate']:.0%} at {high['draft_cost']:.2f}"
    text = (
        "Each mark is a skip set that was tried: drafts cost less to the left, and are accepted more often to the top. "
        f"{len(front)} of {len(frame)} skip sets are on the Pareto front, where no other is better in both: {ends}."
    )
    best = _fastest(frame)
    if best is None or pd.isna(best["draft_cost"]):
        return text
    right, cost = best["acceptance_rate"], best["draft_cost"]
    return f"{text} The skip set with the highest predicted speed has {right:.0%} accepted at a cost of {cost:.2f}."


def speedup_against_skipped(frame: pd.DataFrame) -> str:
    """Return the caption of `plots.profile_plots.speedup_against_skipped`."""
    best = _fastest(frame)
    if best is None:
        return "Every trial was pruned, so that all figures are from a part of the texts only."
    faster = int((frame.loc[~frame["pruned"], "speedup"] > 1).sum())
    return (
        "Skipping more makes drafts cheaper and wrong more often; the best balance here is at "
        f"{best['skipped']} sub-layers ({best['attention']} attentions, {best['mlp']} MLPs), predicted "
        f"{best['speedup']:.2f} times plain decoding. {faster} of {int((~frame['pruned']).sum())} unpruned trials are "
        "predicted to be faster than plain decoding, which is the line at 1; these are predictions, not measurements."
    )


def progress(frame: pd.DataFrame) -> str:
    """Return the caption of `plots.profile_plots.progress`."""
    best = _fastest(frame)
    if best is None:
        return "Every trial was pruned, so that there is no best trial."
    after = len(frame) - int(best["trial"])
    since = f"the {after} trials after it were not better" if after else "it was the last trial"
    return (
        f"The line is the best predicted speedup so far, {frame['best'].dropna().iloc[0]:.2f} with the first trial and "
        f"{best['speedup']:.2f} with trial {best['trial']} of {len(frame)}, after {best['seconds']:.3g} of "
        f"{frame['seconds'].iloc[-1]:.3g} seconds of scoring; {since}. If the line still rises at its end, more "
        "trials may find a faster set."
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
        f"The first drafted token was accepted in {_listed(firsts)}{counted}. At each position only drafts of at least "
        "that length count, and a token is accepted only if all tokens before it are. The controller continues a draft "
        "while its confidence is high, so the line need not fall; late positions have few drafts."
    )


def tokens_by_source(frame: pd.DataFrame) -> str:
    """Return the caption of `plots.bench_plots.tokens_by_source`."""
    (method, temperature), group = next(
        iter(frame[frame["task"] == "all"].groupby(["method", "temperature"], sort=False))
    )
    shares = [f"{row.share:.0%} came from {_named(str(row.source))}" for row in group.itertuples(index=False)]
    return (
        f"Of all tokens of {method} at temperature {temperature:g}, {_listed(shares)}; the others are the model's own. "
        "A token that a proposer had proposed counts as the proposer's, even if the draft path drafted it as well."
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
            f"at temperature {temperature:g} the fastest method besides plain decoding is {best['method']}, "
            f"{best['speedup']:.2f} times its speed ({best['low']:.3g} to {best['high']:.3g}: {verdict} it)"
        )
    text = "; ".join(clauses)
    return (
        "A bar above the line at 1 is faster than selfspec's plain decoding, without drafts; its thin line is the 95% "
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
