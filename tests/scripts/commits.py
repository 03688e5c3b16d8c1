"""Two checkouts of selfspec against each other: is the newer one as fast?

    python tests/scripts/commits.py OLD/.venv/bin/python NEW/.venv/bin/python --out commits.json

A worker process of each checkout decodes the same prompts; the two take turns, prompt by prompt, so that both meet the
same machine. Printed are new / old in tokens per second, medians over prompts with 95% bootstrap intervals: plain
decoding, the shipped profile's drafter, the same guarded, and batches of 4, on the built-in model and on that model
widened; and the microseconds of a round on a model that computes next to nothing. The weight layouts are the same in
both. Run it with nothing else running.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

PLACES = ["built-in", "widened"]
METHODS = ["plain", "skip", "guarded", "batched"]
HEAT = [0.0, 0.8]
PROMPTS, NEW_TOKENS, TURNS = (
    {"built-in": 12, "widened": 6},
    {"built-in": 96, "widened": 48},
    {"built-in": 5, "widened": 2},
)

WORKER = """
import json, sys, time
import torch
torch.set_num_threads(1)
import selfspec
from selfspec import builtin
from selfspec.drafters import PlainDrafter
try:
    from selfspec.models import layout as layouts
    from selfspec.models.loading import load_model
except ImportError:  # before the rooms were renamed
    from selfspec.decoding.loop import decode
    from selfspec.facts.skip import SkipSet
    from selfspec.model import layout as layouts
    from selfspec.model.loading import load_model
    from selfspec.model.widen import widen
else:
    try:
        from selfspec.engine.engine import decode
        from selfspec.types.draft_path import SkipSet
    except ImportError:  # before modules were merged
        from selfspec.engine.loop import decode
        from selfspec.types.skip import SkipSet
    try:
        from selfspec.measure.model_copies import widen
    except ImportError:  # before widening stood beside the copies
        from selfspec.models.widen import widen
from selfspec.profile import find_profile_file
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.rules import find_rule
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter
from transformers import AutoModelForCausalLM, LlamaConfig

def llm_of(place, layout):
    model, tokenizer = load_model("builtin", device="cpu", dtype="float32")
    if place == "widened":
        model = widen(model, 8)
    (getattr(layouts, "apply_layout_", None) or layouts.lay_out_)(model, layout, drafting=True)
    return selfspec.wrap(model, tokenizer, profile="none", name="builtin")

def rounds_of(drafter_of):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                         num_key_value_heads=1, max_position_embeddings=8192, eos_token_id=None, bos_token_id=None)
    runtime = LeanRuntime(AutoModelForCausalLM.from_config(config).eval())
    def run(prompt, options):
        sampler = Sampler()
        seq = SequenceState([1, 2], 4000, sampler)
        loop = decode(runtime, drafter_of(runtime), seq, rule=find_rule(None, sampler))
        for _ in range(20):
            next(loop)
        start = time.perf_counter()
        for _ in range(1000):
            next(loop)
        seconds = time.perf_counter() - start
        loop.close()
        return 1000, seconds
    return run

places, prompts = {}, builtin.prompts("heldout")
def methods_at(place, layout, profile):
    llm = llm_of(place, layout)
    described = find_profile_file(profile)
    draft = getattr(llm, "drafter_for", None) or llm.drafts_with
    guard = getattr(llm, "guarded_drafter", None) or llm.guarded
    drafters = {"plain": PlainDrafter(), "skip": draft(described), "guarded": guard(described)}
    def method(drafter):
        def run(prompt, options):
            start = time.perf_counter()
            out = llm.generate(prompts[prompt], drafter=drafter, **options)
            return len(out.tokens), time.perf_counter() - start
        return run
    def batched(prompt, options):
        start = time.perf_counter()
        outs = llm.generate_many(prompts[prompt : prompt + 4], batch_size=4, **options)
        return sum(len(out.tokens) for out in outs), time.perf_counter() - start
    return {**{name: method(drafter) for name, drafter in drafters.items()}, "batched": batched}

for line in sys.stdin:
    ask = json.loads(line)
    if ask["do"] == "load":
        places[ask["place"]] = methods_at(ask["place"], ask["layout"], ask["profile"])
        answer = {}
    elif ask["do"] == "rounds":
        places["rounds"] = {
            "plain": rounds_of(lambda runtime: PlainDrafter()),
            "skip": rounds_of(lambda runtime: LayerSkipDrafter(runtime, SkipSet((0,), ()), FixedK(2))),
        }
        answer = {}
    else:
        tokens, seconds = places[ask["place"]][ask["method"]](ask["prompt"], ask["options"])
        answer = {"tokens": tokens, "seconds": seconds}
    print("ANSWER " + json.dumps(answer), flush=True)
"""


class Worker:
    """A checkout's process, asked one thing after the other."""

    def __init__(self, python: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}
        self.root = Path(python).absolute().parents[2]
        self._process = subprocess.Popen(
            [python, "-P", "-c", WORKER],  # -P: not what lies in the working directory
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, **ask: Any) -> dict[str, Any]:
        """What it answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(ask) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
                return answer
        raise SystemExit(f"the worker of {self.root} ended")


def ratios(workers: list[Worker], place: str, method: str, temperature: float) -> list[float]:
    """New / old for each prompt: tokens per second, the median over turns."""
    options = {"max_new_tokens": NEW_TOKENS[place], "temperature": temperature, "seed": 1 if temperature else None}
    found: dict[int, list[float]] = defaultdict(list)
    for turn in range(TURNS[place] + 1):  # the first warms up
        for prompt in range(PROMPTS[place]):
            order = workers if (turn + prompt) % 2 else workers[::-1]
            ask = {"do": "run", "place": place, "method": method, "prompt": prompt, "options": options}
            speeds = {
                worker: answer["tokens"] / answer["seconds"] for worker in order for answer in [worker.ask(**ask)]
            }
            if turn:
                found[prompt].append(speeds[workers[1]] / speeds[workers[0]])
    return [statistics.median(of) for of in found.values()]


def round_times(workers: list[Worker], method: str) -> dict[str, Any]:
    """Microseconds of a round of each, and new / old in rounds per second, over pairs of a thousand rounds."""
    ask = {"do": "run", "place": "rounds", "method": method, "prompt": 0, "options": {}}
    took: list[list[float]] = [[], []]
    for turn in range(13):
        for number in (0, 1) if turn % 2 else (1, 0):
            answer = workers[number].ask(**ask)
            if turn:
                took[number].append(answer["seconds"] / answer["tokens"] * 1e6)
    pairs = [old / new for old, new in zip(*took, strict=True)]
    return {"old": statistics.median(took[0]), "new": statistics.median(took[1]), **summary(pairs)}


def summary(values: list[float]) -> dict[str, float]:
    """The median and its 95% bootstrap interval."""
    from selfspec.measure.timing import interval

    low, high = interval(values)
    return {"ratio": statistics.median(values), "low": low, "high": high}


def main() -> None:
    """A line for each comparison; everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--layouts", default="columns,rows", help="how weights lie: built-in, widened")
    parser.add_argument("--only", default="", help="comparisons whose name has this in it, such as 'widened'")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    workers = [Worker(given.old), Worker(given.new)]
    found: dict[str, Any] = {}
    for worker in workers:
        worker.ask(do="rounds")
    for method in ("plain", "skip"):
        found[f"a round, {method}"] = round_times(workers, method)
        print(f"a round of next to nothing, {method}: {json.dumps(found[f'a round, {method}'])}", flush=True)
    for place, layout in zip(PLACES, given.layouts.split(","), strict=True):
        names = [f"{place}, temperature {temperature:g}, {method}" for temperature in HEAT for method in METHODS]
        if not any(given.only in name for name in names):
            continue
        for worker in workers:
            wide = str(worker.root / "tests/scripts/widened-8.yaml")
            worker.ask(
                do="load", place=place, layout=layout, profile=wide if place == "widened" else "stdlib-llama-3.7m"
            )
        for temperature in HEAT:
            for method in METHODS:
                what = f"{place}, temperature {temperature:g}, {method}"
                if given.only not in what:
                    continue
                found[what] = summary(ratios(workers, place, method, temperature))
                print(f"{what}: new / old {found[what]}", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    slower = [what for what, of in found.items() if of["high"] < 0.98]
    print(f"wholly below 0.98: {slower or 'none'}")
    sys.exit(bool(slower))


if __name__ == "__main__":
    main()
