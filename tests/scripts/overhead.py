"""What a round takes beside the model's own passes, from short contexts to long ones.

    python tests/scripts/overhead.py

Decodes one long text of the built-in model, plainly and with four drafted tokens a round, and takes from the seconds of
the rounds those of the bare forwards that they consist of, over as many keys.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch

import selfspec
from selfspec import builtin
from selfspec.api import LLM
from selfspec.bench import method
from selfspec.controllers import FixedK
from selfspec.drafters import Drafter, LayerSkipDrafter, PlainDrafter
from selfspec.options import Options
from selfspec.skip import NOTHING_SKIPPED, SkipSet

DRAFTED, SIBLINGS, START, REPEATS = 4, 3, 100, 3
EDGES = (128, 256, 384, 512, 640, 768, 896, 1000)


def forward(llm: LLM, keys: int, rows: int, skip: SkipSet) -> float:
    """Seconds of a bare forward."""
    tokens = torch.zeros((1, rows), dtype=torch.long)
    times = []
    with llm.runtime.session(keys + rows):
        for _ in range(60):
            begun = time.perf_counter()
            llm.runtime.forward(tokens, keys, skip=skip)
            times.append(time.perf_counter() - begun)
    return statistics.median(times[15:])


def rounds(llm: LLM, drafter: Drafter, drafted: int) -> list[tuple[int, float]]:
    """Keys in the cache, and seconds, of every round that drafted so many tokens."""
    prompt = llm.encode("".join(builtin.prompts("heldout")))[:START]
    found = []
    for _ in range(REPEATS):
        keys = START
        for number, done in enumerate(method(llm, drafter, Options(max_new_tokens=1020 - START))(prompt).log):
            if number and done.drafted == drafted:
                found.append((keys, done.seconds))
            keys += done.tokens
    return found


def main() -> None:
    """A line for each stretch of contexts."""
    torch.set_num_threads(1)
    llm = selfspec.load(profile="none", drafting=True)
    half = tuple(range(1, 16, 2))
    skip = SkipSet(half, half)
    drafter = LayerSkipDrafter(llm.runtime, skip, FixedK(DRAFTED), siblings=SIBLINGS)
    rows = 1 + DRAFTED * SIBLINGS
    own: dict[str, Callable[[int], float]] = {
        "plain": lambda keys: forward(llm, keys, 1, NOTHING_SKIPPED),
        "draft": lambda keys: DRAFTED * forward(llm, keys, 1, skip) + forward(llm, keys, rows, NOTHING_SKIPPED),
    }
    seen = {"plain": rounds(llm, PlainDrafter(), 0), "draft": rounds(llm, drafter, DRAFTED)}
    for low, high in itertools.pairwise(EDGES):
        line = f"{low:5} to {high:4} keys:"
        for name, log in seen.items():
            took = statistics.median(seconds for keys, seconds in log if low <= keys < high)
            model = own[name]((low + high) // 2)
            line += f"  {name} round {took * 1e3:6.2f} ms, model {model * 1e3:6.2f}, beside {(took - model) * 1e3:5.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
