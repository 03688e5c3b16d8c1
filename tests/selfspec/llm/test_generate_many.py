"""`generate_many`: what it takes for prompts, and which prompt an error names."""

from __future__ import annotations

import re

import pytest

from selfspec.basics.errors import SelfspecError

PROMPTS = ["import os\n", "class Reader:\n"]


def test_any_iterable_of_prompts_will_do(llm):
    expected = [llm.generate(prompt, max_new_tokens=4).tokens for prompt in PROMPTS]
    for prompts in (PROMPTS, tuple(PROMPTS), iter(PROMPTS)):
        assert [one.tokens for one in llm.generate_many(prompts, max_new_tokens=4)] == expected
    assert llm.generate_many([]) == []


@pytest.mark.parametrize("prompts", ["import os", b"import", {"prompt": "a"}, None, 7], ids=repr)
def test_one_text_is_not_a_list_of_its_characters(llm, prompts):
    """Nor are a mapping's keys prompts."""
    with pytest.raises(SelfspecError, match=f"^prompts: {re.escape(repr(prompts))}; expected several prompts"):
        llm.generate_many(prompts)


@pytest.mark.parametrize(
    ("wrong", "options", "said"),
    [
        ("x = 1\n" * 400, {}, "outgrow the model's context"),
        ("x = 1\n" * 200, {"memory": 0.003}, "need 803 slots of the KV cache"),
        ("", {}, "the prompt is empty"),
        (None, {}, "got NoneType"),
    ],
)
def test_the_prompt_that_cannot_be_decoded_is_named_before_any_is_decoded(llm, wrong, options, said):
    ended = []
    with pytest.raises(SelfspecError, match=rf"^prompts\[1\]: .*{re.escape(said)}"):
        llm.generate_many([PROMPTS[0], wrong], max_new_tokens=4, ended=lambda *one: ended.append(one), **options)
    assert not ended


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": "2"}, "batch_size 2: expected a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size 0: expected a whole number of at least 1"),
        ({"memory": "1"}, "memory '1' GiB: expected a number of more than 0"),
        ({"memory": float("inf")}, "memory inf GiB: expected a number of more than 0"),
        ({"memory": float("nan")}, "memory nan GiB: expected a number of more than 0"),
    ],
)
def test_sizes_are_numbers(llm, options, said):
    with pytest.raises(SelfspecError, match=f"^{re.escape(said)}"):
        llm.generate_many(PROMPTS, **options)
