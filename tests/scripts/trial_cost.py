"""What a trial of the search costs: how it grows with layers, width, calibration tokens and draft length.

    python tests/scripts/trial_cost.py   # about a minute; nothing else running

Random models; half of the sub-layers skipped; every start drafts its full length, as the worst trials do.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from selfspec.search.replay import Replay
from selfspec.search.replay_state import TargetText
from transformers import AutoModelForCausalLM, LlamaConfig

from selfspec.basics.machine import machine
from selfspec.controllers import FixedK
from selfspec.types.draft_path import SkipSet

BASE = {"layers": 16, "hidden": 128, "tokens": 512, "k_max": 4}
PROMPT, PROMPTS = 64, 8
CHANGES = {"layers": (8, 16, 32, 64), "hidden": (128, 256, 512), "tokens": (256, 512, 1024), "k_max": (1, 2, 4, 8, 12)}


def seconds(*, layers: int, hidden: int, tokens: int, k_max: int) -> float:
    """A trial's replay, the median of three."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=1024,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    draw = random.Random(0)
    new = tokens // PROMPTS
    texts = [TargetText(tuple(draw.randrange(4096) for _ in range(PROMPT + new)), PROMPT, new) for _ in range(PROMPTS)]
    skip = SkipSet(*(tuple(draw.sample(range(layers), layers // 2)) for _ in range(2)))
    times = []
    with Replay(model, texts, depth=k_max) as replay:
        for _ in range(3):
            start = time.perf_counter()
            replay.trace(skip, [FixedK(k_max)])
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    print(f"{machine(torch.device('cpu'))}; {torch.get_num_threads()} thread(s); float32")
    usual = ", ".join(f"{value} {name}" for name, value in BASE.items())
    print(f"otherwise: {usual}; {PROMPTS} prompts of {PROMPT} tokens")
    print("\n| what changes | seconds of a trial |")
    print("|---|---|")
    for what, values in CHANGES.items():
        cells = ", ".join(f"{value}: {seconds(**{**BASE, what: value}):.2f}" for value in values)
        print(f"| {what} | {cells} |")


if __name__ == "__main__":
    main()
