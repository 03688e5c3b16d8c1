"""Everything that is to be known of a GPU, in one run of less than ten minutes, and one JSON.

    python tests/scripts/gpu.py --out gpu.json
    python tests/scripts/gpu.py --out gpu.json --table       # what was found, as the docs have it
    python tests/scripts/gpu.py --device cpu --small --out small.json   # the same in little, to see that it runs

Parts, in this order, each begun while there is time (`--seconds`), and each with what went wrong where something did:
`machine`; `tests` (those marked gpu); `lossless` (float64 against `transformers`' own text, the others through the
audit); `size N` (the built-in model N times as wide, in bfloat16, made on the device, half of whose added weights are
zeros: what steps take by path, rows and context, of what reading the weights takes; texts, interleaved); `search` and
`batches` (of the size before the last); `eagle` (SmolLM2, where it is installed).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from throughput import Ours

import selfspec
from selfspec import builtin
from selfspec.basics.machine import machine, read_bandwidth, synchronise
from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.facts.draft_path import FULL, DraftPath, Mode
from selfspec.llm.llm import LLM
from selfspec.llm.options import Options
from selfspec.measure.audit import audit
from selfspec.measure.cost_fitting import forward_seconds
from selfspec.measure.summary import summary
from selfspec.measure.timing import interleave, method, same_length, transformers_generate
from selfspec.model.layout import weight_bytes
from selfspec.model.loading import load_model
from selfspec.model.widen import widen
from selfspec.runtime.forward import Runtime
from selfspec.speculation.drafter import Limit
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState

CONTEXT = 8192  # positions of a widened model: what far ones take, whatever its text is there


def paths(layers: int) -> dict[str, DraftPath]:
    """What is timed beside the whole model: every second MLP bypassed, all in 8 or 4 bits, and both mixed."""
    half: list[Mode] = ["full" if i < layers or i % 2 else "skip" for i in range(2 * layers)]
    mixed: list[Mode] = ["int8" if i < layers else "int4" for i in range(2 * layers)]
    return {
        "skip": DraftPath.of(half),
        "int8": DraftPath.of(["int8"] * (2 * layers), head="int8"),
        "int4": DraftPath.of(["int4"] * (2 * layers), head="int8"),
        "mixed": DraftPath.of(mixed, head="int8"),
    }


class Session:
    """What all parts share: the device, how much of everything there is, and the models that were made."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.device, self.small, self.factors = given.device, given.small, given.factors
        self.dtype = "bfloat16" if given.device != "cpu" else "float32"
        self.tokens, self.prompts, self.rounds = (12, 1, 1) if given.small else (96, 4, 2)
        self.contexts = (64, 256) if given.small else (256, 1024, 4096)
        self.made: dict[int, LLM] = {}

    def wide(self, factor: int) -> LLM:
        """The built-in model so many times as wide; only the last one is kept."""
        if factor not in self.made:
            self.made.clear()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            model, tokenizer = load_model("builtin", device=self.device, dtype=self.dtype)
            model.config.max_position_embeddings = CONTEXT
            wide = widen(model, factor)
            self.made[factor] = selfspec.wrap(wide, tokenizer, profile="none", name=f"builtin, {factor} times as wide")
        return self.made[factor]


def about_machine(run: Session) -> dict[str, Any]:
    """What it is, and how fast it reads."""
    device = torch.device(run.device)
    return {
        "machine": machine(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "bandwidth": read_bandwidth(2**30 if not run.small else 2**24, device),
    }


def gpu_tests(run: Session) -> dict[str, Any]:
    """The tests marked gpu."""
    if run.device == "cpu":
        return {"skipped": "no GPU"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    return {"rc": done.returncode, "said": done.stdout[-3000:]}


def lossless(run: Session) -> dict[str, Any]:
    """Float64 is `transformers`' greedy text, token for token; elsewhere each difference is a near-tie, or a bug."""
    found: dict[str, Any] = {}
    prompts = builtin.prompts("heldout")[: 2 * run.prompts]
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        llm = selfspec.load("builtin", device=run.device, dtype=dtype, profile="none")
        of = {"skip": paths(llm.runtime.layers)["skip"]}
        if dtype != "float64":
            of["int8"] = paths(llm.runtime.layers)["int8"]
        found[dtype] = {}
        for name, path in of.items():
            drafter = LayerSkipDrafter(llm.runtime, path, FixedK(4), candidates=2)
            for temperature in (0.0, 0.8):
                told = audit(llm, drafter, prompts, max_new_tokens=run.tokens, temperature=temperature).as_dict()
                kept = ("prompts", "tokens", "near_ties", "bugs")
                found[dtype][f"{name}, {temperature}"] = {key: told[key] for key in kept}
            if dtype == "float64":
                found[dtype]["as transformers"] = [same_as_theirs(llm, drafter, prompt, run) for prompt in prompts]
    return found


def same_as_theirs(llm: LLM, drafter: Any, prompt: str, run: Session) -> bool:
    """Whether a drafted text is what `transformers` generates."""
    ids = llm.encode(prompt)
    given = torch.tensor([ids], device=llm.runtime.device)
    how = {"do_sample": False, "max_new_tokens": run.tokens, "pad_token_id": 0}
    theirs = llm.model.generate(given, attention_mask=torch.ones_like(given), **how)[0, len(ids) :].tolist()
    ours = llm.run(ids, Options(max_new_tokens=run.tokens), drafter=drafter).tokens
    return bool(list(ours) == theirs[: len(ours)])


def size(run: Session, factor: int) -> dict[str, Any]:
    """What steps of a model of one size take, and its texts."""
    llm = run.wide(factor)
    runtime, read = llm.runtime, weight_bytes(llm.model)
    bandwidth = read_bandwidth(read, runtime.device)
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in llm.model.parameters()),
        "bytes": read,
        "bandwidth": bandwidth,
        "reading": read / bandwidth,
        "recorded": runtime._graphs is not None,
    }
    repeats, every = 8 if run.small else 32, {"plain": FULL, **paths(runtime.layers)}
    found["steps"] = {}
    for name, path in every.items():
        for context in run.contexts:
            for rows in (1, 8) if name == "plain" else (1,):
                seconds = forward_seconds(runtime, context, rows=rows, repeats=repeats, path=path)
                found["steps"][f"{name}, {context} keys, {rows}"] = seconds
    found["drafted token"] = {name: drafting(llm, path) for name, path in every.items() if name in ("int8", "int4")}
    found["texts"] = texts(llm, run)
    return found


@torch.inference_mode()
def drafting(llm: LLM, path: DraftPath, tokens: int = 8, repeats: int = 12) -> dict[str, float]:
    """Seconds of a drafted token, and of its pass alone, many of which are asked for before any is waited for."""
    runtime = llm.runtime
    drafter, seq = LayerSkipDrafter(runtime, path, FixedK(tokens)), SequenceState([1] * 200, 500, Sampler())
    drafted, alone = [], []
    way = runtime.compile(path)
    with runtime.session(400):
        drafter.begin(seq, runtime.forward(torch.tensor([seq.tokens[:-1]], device=runtime.device), 0, logits=None))
        for _ in range(repeats):
            start = time.perf_counter()
            (draft,) = drafter.propose([seq], [Limit(tokens)])
            drafted.append((time.perf_counter() - start) / max(len(draft), 1))
        given = torch.tensor([[1]], device=runtime.device)
        for _ in range(repeats):
            synchronise(runtime.device)
            start = time.perf_counter()
            for place in range(tokens):
                runtime.forward(given, 200 + place, path=way)
            synchronise(runtime.device)
            alone.append((time.perf_counter() - start) / tokens)
        drafter.end(seq)
    token, own = statistics.median(drafted[3:]), statistics.median(alone[3:])
    return {"seconds": token, "pass": own, "beside it": token - own}


def texts(llm: LLM, run: Session) -> dict[str, Any]:
    """Plain decoding, `transformers`' own, and drafts along each path, by turns; ratios are of the same prompt."""
    found: dict[str, Any] = {}
    prompts = builtin.prompts("heldout")[: run.prompts]
    for temperature in (0.0, 0.8):
        how = same_length(Options(max_new_tokens=run.tokens, temperature=temperature))
        methods = {"plain": method(llm, PlainDrafter(), how), "hf": transformers_generate(llm, how)}
        for name, path in paths(llm.runtime.layers).items():
            for k in (4, 8) if name in ("int8", "int4") else (4,):
                methods[f"{name}, {k}"] = method(llm, LayerSkipDrafter(llm.runtime, path, FixedK(k)), how)
        runs = interleave(methods, prompts, rounds=run.rounds)
        found[str(temperature)] = {name: summary(runs, name, bases=["plain", "hf"]) for name in methods}
    return found


def search(run: Session) -> dict[str, Any]:
    """A search of the size before the last, as `selfspec search` does it."""
    from selfspec.search import find_profile

    llm, begun = run.wide(run.factors[-2:][0]), time.perf_counter()
    profile = find_profile(llm, minutes=0.2 if run.small else 2, modes="full,int8,int4,skip", keep_best=True)
    told = profile.model_dump(mode="json", exclude_none=True)
    kept = {name: told.get(name) for name in ("draft", "predicted", "measured", "costs")}
    return {"seconds": time.perf_counter() - begun, **kept}


def batches(run: Session) -> dict[str, Any]:
    """Tokens a second by how many are decoded together: plainly, four drafted in 8 bits, and by load."""
    llm, found = run.wide(run.factors[-2:][0]), dict[str, Any]()
    how = Options(max_new_tokens=run.tokens, settings={"eos_token_id": [-1]})
    every = [llm.encode(text)[-256:] for text in builtin.prompts("heldout")]
    path = paths(llm.runtime.layers)["int8"]

    def drafts(runtime: Runtime) -> LayerSkipDrafter:
        return LayerSkipDrafter(runtime, path, FixedK(4))

    for rows in (1, 4) if run.small else (1, 2, 4, 8, 16, 32, 64):
        prompts = [every[i % len(every)] for i in range(max(rows, 4))]
        runs = {
            "plain": Ours(llm, rows, how, adaptive=False, make=lambda runtime: PlainDrafter()),
            "fixed": Ours(llm, rows, how, adaptive=False, make=drafts),
            "by load": Ours(llm, rows, how, adaptive=True, make=drafts),
        }
        speeds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(1 + run.rounds):
            for name, one in runs.items():
                done, seconds, *_ = one(prompts)
                speeds[name].append(sum(map(len, done)) / seconds)
        found[str(rows)] = {name: statistics.median(each[1:]) for name, each in speeds.items()}
        for one in runs.values():
            one.batch.__exit__(None, None, None)
    return found


def eagle(run: Session) -> dict[str, Any]:
    """A head for SmolLM2, fitted in the minutes that there are."""
    from selfspec.training.fit import fit
    from selfspec.training.options import TrainOptions

    name = "builtin" if run.small else "smollm2-135m"
    llm = selfspec.load(name, device=run.device, dtype="bfloat16" if run.device != "cpu" else "float32")
    how = TrainOptions(texts=20, steps=4, max_new_tokens=24, rows=8) if run.small else TrainOptions(minutes=1.5)
    with tempfile.TemporaryDirectory() as folder:
        fitted = fit(llm, part="eagle", out=Path(folder), options=how)
    return {"steps": fitted.progress.steps, "best": fitted.progress.best, "history": fitted.progress.history}


def table(found: dict[str, Any]) -> str:
    """What was found, as the docs have it."""
    at = found.get("machine", {})
    lines = [f"{at.get('machine')}, torch {at.get('torch')}, transformers {at.get('transformers')}.", ""]
    lines += [
        "| parameters | path | keys | a step, ms | / reading the weights | over 8 tokens / over 1 |",
        "|" + "---|" * 6,
    ]
    speeds = [
        "| parameters | temperature | method | tokens/s | / plain | / `transformers` | tokens a round |",
        "|" + "---|" * 7,
    ]
    for name, of in found.items():
        if not name.startswith("size") or "steps" not in of:
            continue
        billions = f"{of['parameters'] / 1e9:.2g}B"
        for step, seconds in of["steps"].items():
            path, keys, rows = step.split(", ")
            if rows == "1":
                wide = of["steps"].get(f"{path}, {keys}, 8")
                more = "" if wide is None else f"{wide / seconds:.2f}"
                share = f"{seconds / of['reading']:.2f}" if path == "plain" else ""
                lines.append(f"| {billions} | {path} | {keys.split()[0]} | {1e3 * seconds:.2f} | {share} | {more} |")
        for temperature, methods in of["texts"].items():
            for way, told in methods.items():
                plain, theirs = (told["ratio"].get(base, {}).get("median") for base in ("plain", "hf"))
                cells = [billions, temperature, way, f"{told['tokens_per_second']:.1f}"]
                cells += ["" if ratio is None else f"{ratio:.2f}" for ratio in (plain, theirs)]
                speeds.append(f"| {' | '.join(cells)} | {told['tokens_per_round']:.2f} |")
    together = ["| together | plain, tokens/s | fixed | by load |", "|" + "---|" * 4]
    for rows, told in found.get("batches", {}).items():
        if isinstance(told, dict):
            ratios = [f"{told[name] / told['plain']:.2f}" for name in ("fixed", "by load")]
            together.append(f"| {rows} | {told['plain']:.0f} | {' | '.join(ratios)} |")
    return "\n".join([*lines, "", *speeds, "", *together])


def main() -> None:
    """A line for each part, and all of it in one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print what --out holds, as the docs have it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--factors", type=lambda text: [int(one) for one in text.split(",")], default=[20, 48, 64])
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--small", action="store_true", help="one text of a few tokens, nearby contexts")
    parser.add_argument("--only", type=lambda text: text.split(","), help="parts, by the beginnings of their names")
    given = parser.parse_args()
    if given.table:
        print(table(json.loads(given.out.read_text())))
        return
    run, begun = Session(given), time.perf_counter()
    sizes: dict[str, Callable[[Session], dict[str, Any]]] = {
        f"size {factor}": partial(size, factor=factor) for factor in given.factors
    }
    *smaller, last = sizes.items()
    parts = {"machine": about_machine, "tests": gpu_tests, "lossless": lossless, **dict(smaller)}
    parts |= {"search": search, "batches": batches, **dict([last]), "eagle": eagle}
    found: dict[str, Any] = {}
    for name, part in parts.items():
        if given.only and not name.startswith(tuple(given.only)):
            continue
        start = time.perf_counter()
        if start - begun > given.seconds:
            found[name] = {"skipped": "no time was left"}
        else:
            try:
                found[name] = part(run)
            except Exception as error:  # one part's failure is not the others'
                found[name] = {"failed": repr(error), "where": traceback.format_exc()[-2000:]}
        seconds = time.perf_counter() - start
        print(f"{name}: {seconds:.0f} s, {str(found[name])[:300]}", flush=True)
        given.out.write_text(
            json.dumps({**found, "seconds": time.perf_counter() - begun}, indent=1, default=str) + "\n"
        )


if __name__ == "__main__":
    main()
