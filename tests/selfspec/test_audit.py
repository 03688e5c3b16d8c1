from __future__ import annotations

import torch
from models import CONFIGS, plain, tiny

from selfspec.audit import first_difference
from selfspec.runtime import Runtime

PROMPT = [3, 1, 4, 1, 5]


def test_equal_texts_have_no_difference():
    assert first_difference(Runtime(tiny(CONFIGS["llama"])), PROMPT, [1, 2], [1, 2]) is None


def test_another_token_is_a_bug():
    runtime = Runtime(tiny(CONFIGS["llama"], dtype=torch.float32))
    text = plain(runtime, PROMPT, 6)
    wrong = [*text[:3], (text[3] + 1) % 61, *text[4:]]
    difference = first_difference(runtime, PROMPT, text, wrong)
    assert (difference.index, difference.plain, difference.other) == (3, text[3], wrong[3])
    assert not difference.near_tie
    assert "BUG" in str(difference)


def test_a_text_that_goes_on_or_ends_early_is_a_bug():
    runtime = Runtime(tiny(CONFIGS["llama"]))
    assert not first_difference(runtime, PROMPT, [1, 2], [1, 2, 3]).near_tie
    assert not first_difference(runtime, PROMPT, [1, 2], [1]).near_tie


def test_two_equal_logits_are_a_near_tie():
    """Two rows of the head are made equal but for less than rounding moves them."""
    model = tiny(CONFIGS["llama"], dtype=torch.float32)
    runtime = Runtime(model)
    best = plain(runtime, PROMPT, 1)[0]
    twin = (best + 7) % 61
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[best]
    difference = first_difference(runtime, PROMPT, [best], [twin])
    assert difference.gap == 0
    assert difference.near_tie
    assert "near-tie" in str(difference)
