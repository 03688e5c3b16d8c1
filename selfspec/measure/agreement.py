"""Comparison of the methods' texts with plain decoding's in a benchmark, by token ids; tells near-ties from bugs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch

from selfspec.measure.audit import Difference, first_difference, in_common

if TYPE_CHECKING:
    from selfspec.llm.llm import LLM
    from selfspec.text.prompt import Prompt

Verdict = Literal["same", "near_tie", "bug"]
_VERDICTS: tuple[Verdict, ...] = get_args(Verdict)  # from best to worst
Tokens = tuple[int, ...]


def verdict(plain: LLM, other: LLM, prompt: Prompt, texts: Collection[Tokens], others: Collection[Tokens]) -> Verdict:
    """Return the worst difference between the greedy texts (new token ids) of two copies of one model.

    The copies may differ in their weight layouts. `texts`: plain decoding's, of all its runs; `others`: the texts of
    another method, which runs on `other`.
    """
    first = min(texts)
    differences = [_difference(plain, other, prompt, first, text) for text in sorted({*texts, *others} - {first})]
    return max((_judged(difference) for difference in differences), key=_VERDICTS.index, default="same")


def count_verdicts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Count the prompts with each verdict."""
    count = Counter(verdicts)
    return {"same": count["same"], "near_ties": count["near_tie"], "bugs": count["bug"]}


def _judged(difference: Difference | None) -> Verdict:
    if difference is None:
        return "same"
    return "near_tie" if difference.near_tie else "bug"


def _difference(plain: LLM, other: LLM, prompt: Prompt, text: Tokens, its: Tokens) -> Difference | None:
    """Compare two texts; passes of `other` give its rounding noise, and a pass of `plain` the layouts' difference."""
    ids = plain.encode(prompt)
    reference = None
    if other is not plain:
        prefix = torch.tensor([[*ids, *text[: in_common(text, its)]]], device=plain.runtime.device)
        with torch.no_grad():
            reference = plain.model(prefix, logits_to_keep=1).logits[0, -1]
    return first_difference(other.runtime, ids, text, its, reference=reference)
