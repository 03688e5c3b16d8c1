"""`GenerationConfig` means what it means in `transformers`: the same scores, and the same text, drafted or not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from amount import examples
from fields import FIELDS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import CONFIGS, tiny
from transformers import GenerationConfig
from transformers.generation import SynthIDTextWatermarkingConfig
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from selfspec.basics.errors import SelfspecError
from selfspec.drafters import PlainDrafter
from selfspec.llm.llm import LLM
from selfspec.llm.options import Options
from selfspec.llm.sampling_plan import plan
from selfspec.models.loading import read_generation_config
from selfspec.types.draft_path import SkipSet

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NEW = 12


class Tokenizer:
    """Just enough of one for a model without text."""

    def decode(self, ids, **_):
        return "".join(chr(65 + i) for i in ids)


@pytest.fixture(scope="module")
def llm():
    """A model with end tokens that it likes to emit, and a `generation_config` of its own."""
    model = tiny(CONFIGS["llama"], dtype=torch.float32)
    model.generation_config.eos_token_id = [1, 2, 40]
    model.generation_config.pad_token_id = 0
    return LLM(model, Tokenizer())


def drafters(llm):
    return [PlainDrafter(), llm.layer_skip(SkipSet((1,), (1,)), "fixed:k=3")]


def theirs(model, config, **options):
    """What `transformers`' own generate gives: new tokens, and the processed scores and logits of each step."""
    out = model.generate(
        torch.tensor([PROMPT]),
        generation_config=config,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return out.sequences[0, len(PROMPT) :].tolist(), out.scores, out.logits


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_greedy_text_is_transformers(llm, fields):
    config = GenerationConfig(do_sample=False, max_new_tokens=NEW, **fields)
    expected, _, _ = theirs(llm.model, config)
    for drafter in drafters(llm):
        assert llm.generate(PROMPT, config, drafter=drafter).tokens == expected


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_sampled_scores_are_transformers(llm, fields):
    """At every step of a text that `transformers` sampled, our processed scores are its own, and the field's doing."""
    config = GenerationConfig(do_sample=True, max_new_tokens=NEW, **fields)
    torch.manual_seed(0)
    tokens, scores, logits = theirs(llm.model, config)
    sampler = plan(llm.model, Options(config), PROMPT, ends=frozenset()).sampler
    assert not sampler.greedy
    prefixes = [[*PROMPT, *tokens[:i]] for i in range(len(tokens))]
    ours = sampler.scores(torch.cat(logits), prefixes)
    torch.testing.assert_close(ours, torch.cat(scores), atol=1e-6, rtol=1e-6)
    bare = plan(llm.model, Options(GenerationConfig(do_sample=True)), PROMPT, ends=frozenset()).sampler
    assert not torch.equal(ours, bare.scores(torch.cat(logits), prefixes)) or "remove_invalid_values" in fields


def test_invalid_values_are_removed(llm):
    config = GenerationConfig(do_sample=True, top_k=0, remove_invalid_values=True)
    sampler = plan(llm.model, Options(config), PROMPT, ends=frozenset()).sampler
    row = torch.zeros(1, 61)
    row[0, 3], row[0, 4] = float("nan"), float("inf")
    assert sampler.scores(row, [PROMPT]).isfinite().all()


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_with_a_seed_drafting_changes_nothing(llm, fields):
    config = GenerationConfig(do_sample=True, max_new_tokens=NEW, **fields)
    for seed in range(5):
        plain, drafted = (llm.generate(PROMPT, config, seed=seed, drafter=d).tokens for d in drafters(llm))
        assert plain == drafted


def test_what_a_config_leaves_open_comes_from_the_model_then_from_transformers(llm):
    assert plan(llm.model, Options(GenerationConfig()), PROMPT, ends=frozenset()).config.top_k == 50
    own = llm.model.generation_config
    own.repetition_penalty, own.max_new_tokens = 1.7, 9
    try:
        planned = plan(llm.model, Options(GenerationConfig(do_sample=True)), PROMPT, ends=frozenset())
        assert (planned.config.repetition_penalty, planned.max_new_tokens) == (1.7, 9)
        assert [type(p) for p in planned.sampler.processors].count(RepetitionPenaltyLogitsProcessor) == 1
        assert plan(llm.model, Options(own), PROMPT, ends=frozenset()).config.repetition_penalty == 1.7
        bare = plan(llm.model, Options(), PROMPT, ends=frozenset())
        assert (bare.config.repetition_penalty, bare.max_new_tokens, bare.sampler.processors) == (1.0, 128, [])
        for sampled in (Options(temperature=1.0), Options(settings={"do_sample": True})):
            assert plan(llm.model, sampled, PROMPT, ends=frozenset()).sampler.processors == []
    finally:
        own.repetition_penalty = own.max_new_tokens = None


def test_other_options_go_before_the_config(llm):
    config = GenerationConfig(do_sample=True, temperature=0.5, top_k=7, max_new_tokens=30)

    def planned(**options):
        return plan(llm.model, Options(config, **options), PROMPT, ends=frozenset())

    assert planned(temperature=0.0).sampler.greedy
    assert planned(temperature=0.9).config.temperature == 0.9
    assert planned(top_k=3).config.top_k == 3
    assert planned(top_p=0.3).config.top_p == 0.3
    assert planned(max_new_tokens=4).max_new_tokens == 4
    assert planned(settings={"min_p": 0.2}).config.min_p == 0.2
    assert config.min_p is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_new_tokens": 5}, 5),
        ({"max_length": 14}, 6),
        ({"max_length": 14, "max_new_tokens": None}, 6),
        ({"max_new_tokens": 5, "max_length": 99}, 5),
        ({}, 128),
    ],
    ids=str,
)
def test_lengths(llm, config, expected):
    assert plan(llm.model, Options(GenerationConfig(**config)), PROMPT, ends=frozenset()).max_new_tokens == expected
    assert plan(llm.model, Options(settings=config), PROMPT, ends=frozenset()).max_new_tokens == expected


def test_a_number_of_new_tokens_goes_before_a_length_wherever_it_comes_from(llm):
    own = llm.model.generation_config
    own.max_new_tokens = 9
    try:
        config = GenerationConfig(max_length=14, do_sample=False)
        assert plan(llm.model, Options(config), PROMPT, ends=frozenset()).max_new_tokens == 9
        assert llm.generate(PROMPT, config).tokens == theirs(llm.model, config)[0]
    finally:
        own.max_new_tokens = None


def test_numbers_of_any_kind(llm):
    options = Options(max_new_tokens=np.int64(5), seed=torch.tensor(3), temperature=1.0)
    assert len(llm.run(PROMPT, options).tokens) <= 5
    assert llm.run(PROMPT, options).tokens == llm.generate(PROMPT, max_new_tokens=5, seed=3, temperature=1.0).tokens


def test_a_longer_run_than_the_prompt_has_is_never_repeated(llm):
    """However long: `transformers` would take memory for as many lists."""
    huge = Options(settings={"encoder_no_repeat_ngram_size": 10**12}, max_new_tokens=NEW)
    assert llm.run(PROMPT, huge).tokens == llm.generate(PROMPT, max_new_tokens=NEW).tokens


def test_a_watermark_as_a_mapping(llm):
    """As `--set` gives it."""
    config = plan(llm.model, Options(settings={"watermarking_config": {"bias": 2.5}}), PROMPT, ends=frozenset()).config
    assert config.watermarking_config.bias == 2.5


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(sorted(name for name in vars(GenerationConfig()) if not name.startswith("_")))


@settings(max_examples=examples(1500), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(fields, json_like, min_size=1, max_size=2), st.booleans())
def test_any_value_in_any_field_is_used_or_refused(llm, given_fields, sampled):
    """What is not refused beforehand decodes; nothing else is ever raised."""
    options = Options(settings={"max_new_tokens": 3, **given_fields}, temperature=float(sampled), seed=1)
    try:
        planned = llm.plan(PROMPT, options)
    except SelfspecError as error:
        assert str(error)
        return
    if planned.max_new_tokens <= 4 and planned.sampler.greedy != sampled:
        try:
            assert len(llm.run(PROMPT, options).tokens) <= planned.max_new_tokens
        except SelfspecError as error:
            assert "no token can be chosen" in str(error)


def test_end_tokens_are_the_configs_then_the_models(llm):
    def ends(config):
        return plan(llm.model, Options(config), PROMPT, ends=frozenset([9])).ends

    assert ends(None) == {9}
    assert ends(GenerationConfig()) == {1, 2, 40}
    assert ends(GenerationConfig(eos_token_id=5)) == {5}


def test_stop_strings_end_the_text(llm):
    config = GenerationConfig(max_new_tokens=NEW)
    whole = llm.generate(PROMPT, config)
    config.stop_strings = whole.text[3:5]
    assert llm.generate(PROMPT, config).text == whole.text[: whole.text.index(whole.text[3:5])]


def test_time_runs_out(llm, monkeypatch):
    ticks = iter(range(10**6))
    monkeypatch.setattr("selfspec.llm.sampling_plan.time.perf_counter", lambda: float(next(ticks)))
    config = GenerationConfig(max_time=12.0, max_new_tokens=60, eos_token_id=None)
    assert 1 <= len(llm.generate(PROMPT, config, drafter=PlainDrafter()).tokens) < 15


def test_our_own_processors_take_their_kinds_place(llm):
    """As in `transformers`, a processor that is given replaces the one that the config asks for."""
    config = GenerationConfig(max_new_tokens=NEW, repetition_penalty=1.1)
    mine = [RepetitionPenaltyLogitsProcessor(3.0)]
    expected, _, _ = theirs(llm.model, config, logits_processor=mine)
    assert llm.generate(PROMPT, config, logits_processor=mine).tokens == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_beams": 4}, "num_beams 4 is not served; selfspec decodes one sequence"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences 2 is not served"),
        ({"guidance_scale": 1.5}, "guidance_scale 1.5 is not served"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens 3 is not served"),
        ({"watermarking_config": SynthIDTextWatermarkingConfig(5, [1, 2])}, "SynthIDTextWatermarkingConfig keeps a"),
        ({"max_length": 8}, "max_length 8 leaves no room after a prompt of 8 tokens"),
        ({"max_new_tokens": 122}, "outgrow"),
        ({"do_sample": "maybe"}, "do_sample maybe: expected true or false"),
        ({"num_beams": "many"}, "num_beams many is not served"),
        ({"do_sample": True, "min_p": 7.0}, "generation config: `min_p` has to be"),
        ({"do_sample": True, "temperature": -1.0}, "generation config: .*temperature"),
        ({"bad_words_ids": "no"}, "generation config: "),
        ({"eos_token_id": "no"}, "generation config: "),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_refused(llm, config, message):
    made = GenerationConfig()
    for name, value in config.items():
        setattr(made, name, value)
    with pytest.raises(SelfspecError, match=message):
        llm.generate(PROMPT, made)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"top_k": 3}}, "expected a transformers GenerationConfig, got dict"),
        ({"settings": {"minp": 0.1}}, "GenerationConfig has no field 'minp'; did you mean min_p?"),
        ({"settings": {"_original_object_hash": 1}}, "no field"),
        ({"rule": "other"}, "verification rule 'other' is not known"),
        ({"rule": "token"}, "does not fit temperature 0"),
        ({"rule": "greedy", "temperature": 1.0}, "does not fit sampling; expected match"),
        ({"temperature": -1.0}, "temperature -1.0: expected 0"),
        ({"max_new_tokens": 0}, "max_new_tokens 0: expected"),
        ({"max_new_tokens": True}, "max_new_tokens True: expected"),
        ({"seed": -3, "temperature": 1.0}, "seed -3: expected"),
        ({"temperature": 0.8, "settings": {"do_sample": False}}, "0.8 and do_sample False contradict each other"),
        ({"settings": {"temperature": float("nan")}}, "temperature nan: expected a number"),
        ({"settings": {"min_p": "abc"}}, "min_p abc: expected a number"),
        ({"settings": {"min_p": float("nan"), "do_sample": True}}, "min_p nan: expected a number"),
        ({"settings": {"eos_token_id": -5}}, "eos_token_id: token -5 is not in the vocabulary"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(llm, options, message):
    with pytest.raises(SelfspecError, match=message):
        llm.run(PROMPT, Options(**options))


def test_a_rule_can_be_chosen(llm):
    """All rules give text; with a seed, `token` and `block` repeat it, and `match` gives plain decoding's."""
    drafter = drafters(llm)[1]
    for rule in ("token", "block", "match"):
        texts = [
            llm.generate(PROMPT, max_new_tokens=8, temperature=1.0, seed=2, rule=rule, drafter=drafter).tokens
            for _ in range(2)
        ]
        assert texts[0] == texts[1]
    assert texts[0] == llm.generate(PROMPT, max_new_tokens=8, temperature=1.0, seed=2, drafter=PlainDrafter()).tokens


def test_a_file_of_options(tmp_path):
    GenerationConfig(do_sample=True, min_p=0.25).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "generation_config.json"):
        config = read_generation_config(path)
        assert (config.do_sample, config.min_p) == (True, 0.25)
    with pytest.raises(SelfspecError, match="no such file"):
        read_generation_config(tmp_path / "other.json")
    for text in ("{", "[]", "\xff"):
        (tmp_path / "wrong.json").write_text(text, encoding="latin-1")
        with pytest.raises(SelfspecError, match="generation config"):
            read_generation_config(tmp_path / "wrong.json")


def test_equivalent_values_are_one_value(llm):
    """As clients send them: greedy by a tiny temperature or no top_p, no seed, no stop, whole numbers as floats."""
    assert Options(max_new_tokens=64.0, top_k=5.0, seed=3.0) == Options(max_new_tokens=64, top_k=5, seed=3)
    assert Options(seed=-1, stop="") == Options(stop=["", ""]) == Options()
    assert Options(stop=["a", ""]).stop == ("a",)
    for options in (Options(temperature=1e-7), Options(temperature=0.8, top_p=0), Options(temperature=0.8, top_p=0.0)):
        assert llm.plan(PROMPT, replace(options, max_new_tokens=5)).sampler.greedy
    assert llm.generate(PROMPT, max_new_tokens=5.0, temperature=0.7, top_p=0, seed=-1).tokens == (
        llm.generate(PROMPT, max_new_tokens=5).tokens
    )
    with pytest.raises(SelfspecError, match="temperature -1e-07"):
        llm.generate(PROMPT, temperature=-1e-7)
