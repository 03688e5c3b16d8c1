"""Names that people know from other libraries: the `TypeError` says what they are called here."""

from __future__ import annotations

import inspect

import pytest

import selfspec
from selfspec.llm.keyword_hints import EXPLAINED, RENAMED
from selfspec.llm.llm import LLM
from selfspec.llm.options import ManyOptions

PROMPT = "import os\n"


@pytest.mark.parametrize("method", ["generate", "stream", "generate_many"])
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_tokens", r"'max_tokens'; did you mean max_new_tokens\?"),
        ("max_new_token", r"did you mean max_new_tokens\?"),
        ("stop_sequences", r"did you mean stop\?"),
        ("do_sample", "a temperature above 0 samples"),
        ("min_p", r"GenerationConfig is given as settings=\{'min_p': \.\.\.\}"),
        ("no_such_thing", "'no_such_thing'$"),
    ],
)
def test_unknown_keywords_of_generation(llm, method, name, hint):
    with pytest.raises(TypeError, match=rf"^{method}\(\) got an unexpected keyword argument .*{hint}"):
        getattr(llm, method)([PROMPT] if method == "generate_many" else PROMPT, **{name: 1})


def test_several_prompts_in_one_call(llm):
    with pytest.raises(TypeError, match="several prompts are for generate_many"):
        llm.generate(prompts=[PROMPT])
    assert len(llm.generate_many(prompts=[PROMPT], max_new_tokens=2)) == 1


def test_unknown_keywords_of_loading():
    with pytest.raises(
        TypeError, match=r"load\(\) got an unexpected keyword argument 'torch_dtype'; did you mean dtype"
    ):
        selfspec.load("builtin", torch_dtype="float32")
    with pytest.raises(TypeError, match=r"'device_map'; .* device=selfspec.DeviceMap\(\)"):
        selfspec.load("builtin", device_map="auto")


def test_a_missing_request_is_named(llm):
    with pytest.raises(TypeError, match="missing a required argument: 'prompts'"):
        llm.generate_many()


def test_hints_lead_to_names_that_there_are_and_from_names_that_there_are_not():
    known = {name for call in (LLM.generate, selfspec.load, ManyOptions) for name in inspect.signature(call).parameters}
    assert set(RENAMED.values()) <= known
    assert not set(RENAMED) & known
    assert not set(EXPLAINED) & set(inspect.signature(LLM.generate).parameters)
