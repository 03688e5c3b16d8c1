"""What a round takes beside the model's own passes, from short contexts to long ones.

    python tests/scripts/overhead.py

Decodes one long text of the built-in model, plainly and with four drafted tokens a round (three candidates for each),
and tells the seconds spent in passes from those spent around them, round by round.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import torch

import selfspec
from selfspec import builtin
from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.llm.llm import LLM
from selfspec.llm.options import Options
from selfspec.measure.timing import method
from selfspec.speculation.drafter import Drafter
from selfspec.types.draft_path import SkipSet

DRAFTED, CANDIDATES, START, REPEATS = 4, 3, 100, 3
EDGES = (128, 256, 384, 512, 640, 768, 896, 1000)


class Timed:
    """A runtime's passes over drafts, which adds up their seconds, up to and with each full one."""

    def __init__(self, llm: LLM) -> None:
        self._over = llm.runtime.forward_drafts
        self._spent = 0.0
        self.rounds: list[float] = []

    def __call__(self, *given: Any, **settings: Any) -> Any:
        begun = time.perf_counter()
        steps = self._over(*given, **settings)
        self._spent += time.perf_counter() - begun
        if settings.get("path") is None:
            self.rounds.append(self._spent)
            self._spent = 0.0
        return steps


def rounds(llm: LLM, drafter: Drafter, drafted: int) -> list[tuple[int, float, float]]:
    """Keys in the cache, seconds, and seconds of passes, of every round that drafted so many tokens."""
    prompt = llm.encode("".join(builtin.prompts("heldout")[:20]))[:START]
    timed = llm.runtime.forward_drafts
    assert isinstance(timed, Timed)
    found = []
    for _ in range(REPEATS):
        timed.rounds.clear()
        log, keys = method(llm, drafter, Options(max_new_tokens=1020 - START))(prompt).log, START
        for number, (done, model) in enumerate(zip(log, timed.rounds, strict=True)):
            if number and done.drafted == drafted:
                found.append((keys, done.seconds, model))
            keys += done.tokens
    return found


def main() -> None:
    """A line for each stretch of contexts."""
    torch.set_num_threads(1)
    llm = selfspec.load("builtin", profile="none", drafting=True)
    llm.runtime.forward_drafts = Timed(llm)  # type: ignore[method-assign]
    half = tuple(range(1, 16, 2))
    drafter = LayerSkipDrafter(llm.runtime, SkipSet(half, half), FixedK(DRAFTED), candidates=CANDIDATES)
    seen = {"plain": rounds(llm, PlainDrafter(), 0), "draft": rounds(llm, drafter, DRAFTED)}
    for low, high in itertools.pairwise(EDGES):
        line = f"{low:5} to {high:4} keys:"
        for name, log in seen.items():
            here = [(took, model) for keys, took, model in log if low <= keys < high]
            took, beside = statistics.median(t for t, _ in here), statistics.median(t - m for t, m in here)
            line += f"  {name} round {took * 1e3:6.2f} ms, {beside * 1e3:5.2f} beside the model"
        print(line, flush=True)


if __name__ == "__main__":
    main()
