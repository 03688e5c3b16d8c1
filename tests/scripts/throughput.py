"""Tokens a second by how many prompts are decoded together: plainly, with fixed drafts, with drafts by load; theirs.

    python tests/scripts/throughput.py --model smollm2-135m --prompts prompts.jsonl --chat --out throughput.json

Every prompt gets `--new-tokens` tokens, end-of-sequence left out, so that all do the same work; methods by turns,
ratios are medians over rounds. A text's latency is from when it is given a row to its end, prompt included; its median.
`rows` is plain decoding with keys and values in contiguous rows, not in blocks. `hf` is `transformers`' continuous
batching (`generate_batch`), `--server URL` an OpenAI server that runs already (llama.cpp's, for one), which gets as
many requests at a time. Texts are compared with plain decoding's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import selfspec
from selfspec.basics.machine import machine
from selfspec.controllers import FixedK
from selfspec.drafters import Drafter, LayerSkipDrafter, PlainDrafter
from selfspec.llm.batch import Batch
from selfspec.llm.llm import LLM
from selfspec.llm.options import Options
from selfspec.llm.prompt_encoding import encode
from selfspec.runtime.base import Runtime
from selfspec.text.prompt_files import read_prompts

Done = tuple[list[list[int]], float, list[float], str]  # texts, seconds, each text's, and what is said of it
Run = Callable[[list[list[int]]], Done]


class Ours:
    """A batch that stays, so that what rounds take is measured once."""

    def __init__(
        self, llm: LLM, rows: int, how: Options, *, adaptive: bool, make: Callable[[Runtime], Drafter] | None
    ) -> None:
        self.batch = Batch(llm, rows=rows, adaptive=adaptive, make=make).__enter__()
        self.how = how

    def __call__(self, prompts: list[list[int]]) -> Done:
        counters = self.batch.counters
        drafted, accepted, rounds, before = counters.drafted, counters.accepted, counters.rounds, counters.tokens
        start = time.perf_counter()
        requests = [self.batch.add(prompt, self.how) for prompt in prompts]
        begun, latencies = dict.fromkeys(map(id, self.batch.running), start), list[float]()
        while not self.batch.idle:
            waited = time.perf_counter()
            self.batch.step()
            running, now = {id(request) for request in self.batch.running}, time.perf_counter()
            latencies += [now - begun.pop(one) for one in set(begun) - running]
            begun |= dict.fromkeys(running - set(begun), waited)
        seconds = time.perf_counter() - start
        tried = counters.drafted - drafted
        said = f"{(counters.tokens - before) / (counters.rounds - rounds):.2f} tokens a round, {tried} drafted, "
        said += f"{counters.accepted - accepted} accepted"
        return [list(request.tokens) for request in requests], seconds, latencies, said


def theirs(model: Any, how: Options, rows: int) -> Run:
    """`transformers`' continuous batching."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    def run(prompts: list[list[int]]) -> Done:
        config = GenerationConfig(max_new_tokens=how.max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        settings = ContinuousBatchingConfig(max_batch_tokens=256, num_blocks=512, use_cuda_graph=False)
        start = time.perf_counter()
        found = model.generate_batch(
            inputs=prompts,
            generation_config=config,
            continuous_batching_config=settings,
            progress_bar=False,
        )
        seconds = time.perf_counter() - start
        order = sorted(found, key=lambda name: int(name.split("_")[-1]))
        return [list(found[key].generated_tokens) for key in order], seconds, [], ""

    return run


def served(url: str, how: Options, rows: int) -> Run:
    """An OpenAI server's completions, so many at a time; tokens are counted by its usage."""

    def ask(prompt: list[int]) -> tuple[int, float]:
        start = time.perf_counter()
        body = {"prompt": prompt, "max_tokens": how.max_new_tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            count = int(json.load(answer)["usage"]["completion_tokens"])
        return count, time.perf_counter() - start

    def run(prompts: list[list[int]]) -> Done:
        start = time.perf_counter()
        with ThreadPoolExecutor(rows) as pool:
            found = list(pool.map(ask, prompts))
        seconds = time.perf_counter() - start
        return [[0] * count for count, _ in found], seconds, [latency for _, latency in found], ""

    return run


def main() -> None:
    """A line for each size and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--profile", default="auto")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--sizes", default="1,2,4,8,16,32")
    parser.add_argument("--methods", default="plain,fixed,adaptive,hf")
    parser.add_argument("--server")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--least", type=int, default=8, help="prompts, and as many as are decoded together")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    llm = selfspec.load(given.model, profile=given.profile)
    llm.runtime.skeleton = replace(llm.runtime.skeleton, ends=frozenset())
    seed = 0 if given.temperature else None
    how = Options(max_new_tokens=given.new_tokens, temperature=given.temperature, seed=seed)
    how = replace(how, settings={"eos_token_id": [-1]})
    read = read_prompts(given.prompts)
    every = [encode(llm, text, chat=given.chat)[-1024:] for text in read.texts]
    hf = selfspec.load(given.model, profile="none", layout="rows").model if "hf" in given.methods else None
    where = {"machine": machine(torch.device("cpu")), "threads": given.threads, "model": given.model}
    print(f"{where}, {str(llm.runtime.dtype).removeprefix('torch.')}, {len(every)} prompts", flush=True)
    path = llm.profile.path if llm.profile is not None else None
    fixed = None if path is None else (lambda runtime: LayerSkipDrafter(runtime, path, FixedK(4)))
    contiguous = patch("selfspec.llm.batch.reads_blocks", lambda drafter: False)
    table = []
    for size in map(int, given.sizes.split(",")):
        prompts = every[: max(size, given.least)]
        runs: dict[str, Run] = {}
        for name in given.methods.split(","):
            if name in ("plain", "rows"):
                with contiguous if name == "rows" else nullcontext():
                    runs[name] = Ours(llm, size, how, adaptive=False, make=lambda runtime: PlainDrafter())
            elif name == "fixed":
                runs[name] = Ours(llm, size, how, adaptive=False, make=fixed)
            elif name == "adaptive":
                runs[name] = Ours(llm, size, how, adaptive=True, make=None)
            elif name == "hf":
                runs[name] = theirs(hf, how, size)
        if given.server:
            runs["server"] = served(given.server, how, size)
        speeds: dict[str, list[float]] = {name: [] for name in runs}
        said: dict[str, str] = {}
        texts: dict[str, list[list[int]]] = {}
        latencies: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(given.rounds):
            order = list(runs) if number % 2 == 0 else list(reversed(runs))
            for name in order:
                texts[name], seconds, each, said[name] = runs[name](prompts)
                latencies[name] += each
                speeds[name].append(sum(map(len, texts[name])) / seconds)
        for name in runs:
            ratio = statistics.median(a / b for a, b in zip(speeds[name], speeds["plain"], strict=True))
            same = sum(a == b for a, b in zip(texts[name], texts["plain"], strict=True))
            speed = statistics.median(speeds[name])
            table.append({"size": size, "method": name, "tokens_per_second": speed, "ratio": ratio})
            latency = statistics.median(latencies[name] or [float("nan")])
            table[-1] |= {"same": same, "prompts": len(prompts), "said": said[name], "each": speeds[name]}
            table[-1]["latency"] = latency
            print(
                f"{size:3d} {name:9s} {speed:8.1f} tokens/s {ratio:6.2f} of plain, {latency:6.2f} s a text, {same} of "
                f"{len(prompts)} texts the same; {said[name]}",
                flush=True,
            )
        for one in runs.values():
            if isinstance(one, Ours):
                one.batch.__exit__(None, None, None)
    if given.out is not None:
        given.out.write_text(json.dumps({**where, "table": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
