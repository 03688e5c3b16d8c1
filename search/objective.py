"""The paper's objective (2309.08168, section 3.2): tokens per second of real decoding, prefill included."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.api import LLM
from selfspec.bench import method
from selfspec.drafters import Drafter
from selfspec.stats import Stats
from selfspec.text import Prompt


def wallclock(llm: LLM, drafter: Drafter, prompts: Sequence[Prompt], *, max_new_tokens: int) -> Stats:
    """Decode every prompt greedily with `drafter`; the score is the sum's `tokens_per_second`."""
    run = method(llm, drafter, max_new_tokens=max_new_tokens)
    total = Stats()
    for prompt in prompts:
        total.add(run(prompt))
    return total
