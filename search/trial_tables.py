"""Tidy data frames of a study: its trials, and the effect of skipping each sub-layer alone."""

from __future__ import annotations

from typing import Any

import pandas as pd

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import make_controller
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import FULL

from .controller_grid import deepest
from .front_pick import pareto
from .ledger import Ledger, reads_study
from .objective import ALONE
from .space import Space


@reads_study
def trials_frame(ledger: Ledger) -> pd.DataFrame:
    """Return a row for each trial of a study, in the order in which they were kept.

    Columns: `seconds` (the scoring time up to and including this trial, summed over all workers), `speedup` (predicted,
    over plain decoding), `best` (the highest speedup so far, without pruned trials, which cover a share of the texts
    only), `skipped`, `attention` and `mlp` (numbers of skipped sub-layers), `int8` and `int4` (numbers of quantised
    sub-layers), `draft_cost` (a draft step as a share of a plain step; NaN if decoding was timed), `on_front` (no other
    trial is better in both acceptance and draft cost); further columns are fields of `Score`. Raises `SelfspecError` if
    the study has no trials.
    """
    front = {id(entry) for entry in pareto(ledger.entries)}
    rows = []
    for number, entry in enumerate(ledger.entries, 1):
        score = entry.score
        rows.append(
            {
                "trial": number,
                "seconds": entry.seconds,
                "speedup": score.speedup,
                "tokens_per_second": score.tokens_per_second,
                "acceptance_rate": score.acceptance_rate,
                "tokens_per_round": score.tokens_per_round,
                "draft_cost": entry.draft_cost,
                "skipped": len(score.skip),
                "int8": len(score.path.int8),
                "int4": len(score.path.int4),
                "attention": len(score.skip.attention),
                "mlp": len(score.skip.mlp),
                "pruned": score.pruned,
                "controller": score.controller.name,
                "candidates": score.candidates,
                "on_front": id(entry) in front,
            }
        )
    if not rows:
        raise SelfspecError(f"{ledger.description}: holds no trials yet")
    frame = pd.DataFrame(rows).astype({"draft_cost": float})
    frame["seconds"] = frame["seconds"].cumsum()
    best = frame["speedup"].where(~frame["pruned"]).cummax().ffill()
    frame.insert(3, "best", best)
    return frame


@reads_study
def sensitivity_frame(ledger: Ledger) -> pd.DataFrame:
    """Return a row for each part that may be skipped: a layer's `attention`, its `mlp`, or both as a `layer`.

    `speedup`: the predicted speedup over plain decoding if drafts always have `draft_tokens` tokens, only this part is
    skipped, and all other parts run in the base mode (`Space.base`). `gain`: the relative change of the speedup against
    skipping nothing, negative for a loss. Both are NaN if the speedup is not known. Raises `SelfspecError` if the study
    has no gains of single changes or no cost model.
    """
    costs, gains = ledger.costs, ledger.gains
    if gains is None or costs is None:
        raise SelfspecError(
            f"{ledger.description}: holds no gains of single sub-layers; "
            "expected a search with --objective replay and warm starts"
        )
    space = _space(ledger)
    if len(space) != len(gains):
        raise SelfspecError(f"{ledger.description} is damaged ({len(gains)} gains for {len(space)} parts)")
    drafted = _drafted(ledger.settings)
    round_seconds = costs.round + drafted * costs.draft(FULL, space.layers) + costs.verification(drafted + 1)
    nothing = (drafted + 1) * costs.plain / round_seconds  # with nothing skipped, every drafted token is right
    rows = []
    for name, modes, values, start in zip(space.names, space.choices, gains, space.start, strict=True):
        part, _, layer = name.partition(" ")
        if "skip" in modes:
            speedup = values[modes.index("skip")] or float("nan")
            rows.append((int(layer), part, speedup, speedup / (values[start] or nothing) - 1, drafted))
    return pd.DataFrame(rows, columns=["layer", "part", "speedup", "gain", "draft_tokens"])


def _space(ledger: Ledger) -> Space:
    settings = ledger.settings
    space = Space(settings["model"]["layers"], tuple(settings["keep"]), settings["granularity"])
    return space if ledger.choices is None else ledger.choices.narrow(space)


def _drafted(settings: dict[str, Any]) -> int:
    """Return the draft length of the drafts that skipped each part alone."""
    spec = settings.get("controller")
    return ALONE if spec is None else min(ALONE, deepest([make_controller(ControllerSpec.model_validate(spec))]))
