"""Comparison of each benchmarked method's texts with the texts of plain decoding; tells near-ties from bugs.

Plain decoding is decoding without drafts. Texts are compared by token ids.
"""

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
    """Return the worst verdict on the greedy texts (new token ids) that two methods produced after `prompt`.

    `plain` and `other` are copies of the same model whose weight layouts may differ. `texts`: the texts of all runs of
    plain decoding, on `plain`; `others`: the texts of all runs of the other method, on `other`. Every text is compared
    with the smallest text in `texts`.
    """
    first = min(texts)
    differences = [_difference(plain, other, prompt, first, text) for text in sorted({*texts, *others} - {first})]
    return max((_judged(difference) for difference in differences), key=_VERDICTS.index, default="same")


def count_verdicts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Return the number of prompts with each verdict, as `same`, `near_ties` and `bugs`; one verdict per prompt."""
    count = Counter(verdicts)
    return {"same": count["same"], "near_ties": count["near_tie"], "bugs": count["bug"]}


def _judged(difference: Difference | None) -> Verdict:
    if difference is None:
        return "same"
    return "near_tie" if difference.near_tie else "bug"


def _difference(plain: LLM, other: LLM, prompt: Prompt, text: Tokens, its: Tokens) -> Difference | None:
    """Return the first difference of the text `its` from `text`; None if they are equal.

    The rounding noise is measured by passes of `other` and, if `plain` is a separate copy, by a pass of `plain`.
    """
    ids = plain.encode(prompt)
    reference = None
    if other is not plain:
        prefix = torch.tensor([[*ids, *text[: in_common(text, its)]]], device=plain.runtime.device)
        with torch.no_grad():
            reference = plain.model(prefix, logits_to_keep=1).logits[0, -1]
    return first_difference(other.runtime, ids, text, its, reference=reference)
