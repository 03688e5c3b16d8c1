"""Memory and speed of quantised targets, plain and drafted: a table as Markdown.

    taskset -c 0 python tests/scripts/quantised.py --eight smollm2.Q8_0.gguf --rounds 3

Seconds are the process's own (`time.process_time`, one thread), of whole calls, the prompt's pass in; medians over
rounds in which methods take turns. Texts are compared with plain decoding's of the same target.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import selfspec
from selfspec.llm.llm import wrap
from selfspec.models.loading import load_model
from selfspec.types.draft_path import DraftPath, SkipSet

LETTER = (
    "Dear Ms Adler, thank you for your letter of the third of May. The shelves that you ordered left our workshop on "
    "Monday, and the carrier will ring you a day before they arrive. Please check all four boxes for damage."
)
PROMPTS = {
    "questions": ["What does a cache do in a computer?", "Why is the sky blue?"],
    "rewriting": [
        f"Repeat this letter word by word, but to Mr Brown: {LETTER}",
    ],
}
SKIPS = SkipSet(attention=(12, 14, 16, 18), mlp=(13, 15, 17))


def torchao_8() -> Any:
    """The dequantised model with torchao's 8-bit weights."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model, tokenizer = load_model("smollm2-135m", dtype="float32")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    quantize_(model, Int8WeightOnlyConfig())
    return wrap(model, tokenizer, profile="none", name="torchao")


def speeds(llm: Any, ways: dict[str, Callable[..., Any]], rounds: int, new: int) -> None:
    """One target's lines of the table."""
    print(f"\n{llm.name}: {llm.weight_bytes / 1e6:.0f} MB, native passes: {llm.runtime.native}", flush=True)
    for kind, prompts in PROMPTS.items():
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        told: dict[str, list[list[int]]] = {}
        for _ in range(rounds):
            for name, way in ways.items():
                begun = time.process_time()
                found = [way(llm, chat, max_new_tokens=new) for chat in chats]
                seconds[name].append((time.process_time() - begun) / sum(len(one.tokens) for one in found))
                told[name] = [one.tokens for one in found]
        plain = statistics.median(seconds["plain"])
        for name, times in seconds.items():
            median = statistics.median(times)
            same = sum(a == b for a, b in zip(told[name], told["plain"], strict=True))
            print(f"| {kind} | {name} | {1 / median:.1f} | {plain / median:.2f} | {same} of {len(chats)} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eight", metavar="FILE.gguf", help="the model as a Q8_0 file")
    parser.add_argument("--torchao", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    loads: dict[str, Callable[[], Any]] = {
        "Q4_1 kept": partial(selfspec.load, "smollm2-135m", profile="none", dtype="file"),
    }
    if asked.eight:
        loads["Q8_0 kept"] = partial(selfspec.load, asked.eight, profile="none", dtype="file")
    loads["dequantised"] = partial(selfspec.load, "smollm2-135m", profile="none")
    if asked.torchao:
        loads["torchao 8"] = torchao_8
    lookup = selfspec.load("smollm2-135m", profile="none", dtype="file", method="lookup").profile
    assert lookup is not None
    for name, load in loads.items():
        llm = load()
        llm.name = name
        proposals = llm.drafter_for(lookup)
        ways: dict[str, Callable[..., Any]] = {
            "plain": lambda llm, chat, **how: llm.chat(chat, **how),
            "lookup": lambda llm, chat, drafter=proposals, **how: llm.chat(chat, drafter=drafter, **how),
        }
        paths = {"skips": (DraftPath(SKIPS), 2)}
        for bits in ("int8", "int4"):
            if llm.runtime.part_bytes("mlp", 0, bits) is not None:
                paths[bits] = (DraftPath.from_modes([bits] * 60, head=bits), 4)
        for named, (path, k) in paths.items():
            drafter = llm.layer_skip(path, f"fixed:k={k}")
            ways[named] = lambda llm, chat, drafter=drafter, **how: llm.chat(chat, drafter=drafter, **how)
        speeds(llm, ways, asked.rounds, asked.new_tokens)


if __name__ == "__main__":
    main()
