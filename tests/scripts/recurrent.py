"""Speculation over recurrent layers equals `transformers`' own greedy text: 10,000 tokens of each model type.

    python tests/scripts/recurrent.py --out tests/scripts/recurrent.json

Each tiny model with recurrent layers, in float64 (in float32 where its own code needs it), continues random prompts:
drafts with skipped sub-layers under the adaptive threshold, in int8, in int4 and in mixed modes, lookup tokens, random
chains, and batches whose sequences join and leave. The texts are compared with those of `generate`. A model type that
is in `--out` is not tried again.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import torch
from model_types import model_types, tiny_model
from models import run
from toys import RandomTree

from selfspec.controllers import AdaptiveThreshold, FixedK, StaticThreshold
from selfspec.drafters import Drafter, LayerSkipDrafter, LookupDrafter
from selfspec.engine.engine import Engine
from selfspec.models.low_precision import fake
from selfspec.proposers.lookup import Lookup
from selfspec.runtime import open_runtime
from selfspec.runtime.base import Runtime
from selfspec.runtime.hf_runtime import GenericRuntime
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_path import MODES, DraftPath

GOAL = 10_000  # tokens of each model type
NEW, LONGEST, TEXTS, ROWS = 40, 16, 10, 3  # tokens of a text and of a prompt, texts of one length, rows of a batch


def drafters(runtime: Runtime, draw: random.Random) -> list[tuple[str, Drafter]]:
    """A drafter of each kind, with random modes."""
    layers = runtime.layers

    def low(*modes: str) -> Drafter:
        path = DraftPath.from_modes(draw.choices(modes, k=2 * layers), head="full" if "skip" in modes else "int8")
        return LayerSkipDrafter(runtime, path, FixedK(draw.randrange(1, 7)))

    skipping = DraftPath.from_modes(draw.choices(("full", "skip"), k=2 * layers))
    return [
        ("skip", LayerSkipDrafter(runtime, skipping, AdaptiveThreshold(k_max=6), candidates=2)),
        ("int8", low("int8")),
        ("int4", low("int4")),
        ("mixed", low(*MODES)),
        ("lookup", LookupDrafter([Lookup()], StaticThreshold(0.0, 5))),
        ("random", RandomTree(runtime.skeleton.identity.vocabulary or 61, (1, 1, 1))),
    ]


def generated(model: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    """The texts of `generate`, one by one: padding or a batch would change a recurrent model's sums."""
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]


def together(rows: Runtime, drafter: Drafter, prompts: Sequence[list[int]], draw: random.Random) -> list[list[int]]:
    """All texts in a batch of `ROWS` rows; each joins when a row is free, and at random."""
    seqs = [SequenceState(list(prompt), NEW, Sampler()) for prompt in prompts]
    waiting = list(seqs)
    with Engine(rows, drafter) as engine:
        while waiting or engine.running:
            while waiting and len(engine.running) < ROWS and (not engine.running or draw.random() < 0.7):
                engine.join(waiting.pop(0))
            engine.step()
    return [seq.tokens[len(prompt) :] for seq, prompt in zip(seqs, prompts, strict=True)]


def tried(model_type: str) -> dict[str, Any]:
    """The tokens compared and those that differ, by how they were decoded."""
    draw, model = random.Random(model_type), tiny_model(model_type)
    # The user's model stays as it is while the runtime drafts with it, which is tested elsewhere.
    runtime = GenericRuntime(model, kernel=fake)
    rows = runtime.with_new_cache(rows=ROWS)
    compared: dict[str, int] = {}
    different = 0
    while sum(compared.values()) < GOAL:
        prompts = [[draw.randrange(1, 60) for _ in range(draw.randrange(1, LONGEST))] for _ in range(TEXTS)]
        texts = generated(model, prompts)
        for (name, drafter), (_, of_rows) in zip(drafters(runtime, draw), drafters(rows, draw), strict=True):
            if draw.random() < 0.5:
                ours, how = [run(runtime, drafter, prompt, NEW)[0] for prompt in prompts], name
            else:
                ours, how = together(rows, of_rows, prompts, draw), f"{name}, batch"
            compared[how] = compared.get(how, 0) + sum(map(len, texts))
            different += sum(
                a != b for mine, text in zip(ours, texts, strict=True) for a, b in zip(mine, text, strict=True)
            )
    return {"tokens": sum(compared.values()), "different": different, "by": compared}


def recurrent(model_type: str) -> bool:
    """Whether the type runs, and its layers have states."""
    try:
        return open_runtime(tiny_model(model_type)).stateful
    except Exception:  # whatever a model raises without selfspec
        return False


def main() -> None:
    """Try each model type that is not yet in `--out`; exit code 1 when any token differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--types", nargs="*", help="by default all of the installed transformers")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    for model_type in given.types or [name for name in model_types() if recurrent(name)]:
        if model_type not in found:
            found[model_type] = tried(model_type)
            print(model_type, found[model_type], flush=True)
            given.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(any(result["different"] for result in found.values()))


if __name__ == "__main__":
    main()
