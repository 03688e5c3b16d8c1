"""What each part of drafting brings, on one set of texts and one cost model: modes, head, candidates, confidence.

    python tests/scripts/ablations.py --model smollm2-135m --profile found.yaml --threads 2 --out ablations.json

The whole model continues prompts that come with selfspec; each path is replayed on all of it, its controller tuned on
the trace, as the search does, and priced by costs measured once. So the speedups are predictions that can be compared
with each other, over plain decoding on the same weights. Beside them is how well probability, and the gap of the two
best logits, tell right drafts from wrong ones: the area under the ROC curve.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import built_in
import numpy as np
import torch
from selfspec.search.continuations import DecodingSettings, continue_prompts
from selfspec.search.fits import GAP, choose_confidence, features
from selfspec.search.objective import ReplayObjective
from selfspec.search.replay import Replay

import selfspec
from selfspec.basics.machine import machine
from selfspec.controllers import FixedK
from selfspec.measure.cost_fitting import measure_costs
from selfspec.profile.draft_spec import ProposerSpec
from selfspec.profile.reading import read_profile
from selfspec.text.detokenizer import frequent
from selfspec.types.acceptance import PROBABILITY
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import MODES, DraftPath, SkipSet


def paths(layers: int, vocabulary: tuple[int, ...], found: DraftPath | None) -> dict[str, DraftPath]:
    """The paths that are compared."""
    all_layers = tuple(range(layers))
    everything = SkipSet(all_layers, all_layers)
    some = SkipSet(tuple(all_layers[2 : layers // 2 : 3]), ())
    rest = SkipSet(tuple(i for i in all_layers if i not in some.attention), all_layers)
    half = SkipSet(all_layers[: layers // 2], all_layers[: layers // 2])
    other = SkipSet(all_layers[layers // 2 :], all_layers[layers // 2 :])
    int8 = DraftPath(int8=everything, head="int8")
    named = {
        "every fourth layer skipped": DraftPath(SkipSet(all_layers[1:-1:4], all_layers[1:-1:4])),
        "8 bits": int8,
        "8 bits, the head in full": replace(int8, head="full"),
        "8 bits, a quarter of the vocabulary": replace(int8, vocabulary=vocabulary),
        "4 bits, the head in 8": DraftPath(int4=everything, head="int8"),
        f"8 bits, {len(some)} attention skipped": DraftPath(some, int8=rest, head="int8"),
        "first half in int4, the rest in 8": DraftPath(int4=half, int8=other, head="int8"),
    }
    return named if found is None else named | {"the profile's": found}


def area(score: np.ndarray, right: np.ndarray) -> float:
    """Under the ROC curve: how often a right token scores above a wrong one."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(right, score)) if 0 < right.sum() < len(right) else float("nan")


def rows(
    replay: Replay, costs: CostModel, named: dict[str, DraftPath], confidences: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A row of figures for each path."""
    for name, path in named.items():
        traces = {}
        for told in (PROBABILITY, GAP):
            replay.confidence = told
            traces[told] = replay.trace(path, [FixedK(6)], share=0.5)
        odds, gap, right = features(traces[PROBABILITY], traces[GAP])
        best = choose_confidence(odds, gap, right)
        row: dict[str, Any] = {"path": name, "auc": {"probability": area(odds, right), "gap": area(gap, right)}}
        row["right"] = float(right.mean())
        row["reads"] = best.inputs
        for kind in confidences:
            replay.confidence = PROBABILITY if kind == "probability" else best
            for candidates in (1, replay.candidates):
                score = ReplayObjective(replay, costs, candidates=candidates).score(path)
                row[f"{kind}, {candidates} candidates"] = round(score.speedup, 3)
        with_lookup = ReplayObjective(replay, costs, proposers=[ProposerSpec()]).score(path)
        row |= {"with lookup tokens": round(with_lookup.speedup, 3), "spared": with_lookup.spared}
        row |= {"acceptance": round(score.acceptance_rate, 3), "tokens a pass": round(score.tokens_per_round, 2)}
        draft = costs.draft(path, replay.layers, vocabulary=path.share(replay.vocabulary))
        row["draft step"] = round(draft / costs.plain, 3)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    llm = selfspec.load(given.model, profile="none", drafting=True, quantized_drafts=True)
    decoding = DecodingSettings(64, given.temperature)
    size = llm.identity.vocabulary or 0
    made = continue_prompts(llm, built_in.prompts(llm, "calibration", given.prompts), decoding)
    costs = measure_costs(llm.runtime, context=128, modes=MODES, sampler=decoding.sampler(), seconds=20.0)
    others = continue_prompts(llm, built_in.prompts(llm, "heldout", given.prompts), decoding)
    tokens = tuple(frequent([text.tokens for text in others], size // 4, size))
    found = None if given.profile is None else read_profile(given.profile).path
    print(f"{machine(llm.runtime.device)}, {given.threads} threads, {llm.runtime.dtype}, weights by {llm.layout}")
    print(f"plain step {costs.plain * 1e3:.1f} ms, v(4) {costs.verification(4) / costs.plain:.2f}, error {costs.error}")
    told = []
    with Replay(llm.model, made, sampler=decoding.sampler(), base_runtime=llm.runtime) as replay:
        for row in rows(replay, costs, paths(llm.runtime.layers, tokens, found), ("probability", "best")):
            told.append(row)
            print(json.dumps(row), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps({"costs": costs.model_dump(mode="json"), "rows": told}, indent=1))


if __name__ == "__main__":
    main()
