"""Published skip sets: the files that others publish, and those that ship as profiles."""

from __future__ import annotations

import hashlib
import json

import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from models import run, small

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.drafters import PlainDrafter
from selfspec.profile.published_skip_sets import parse_draft_verify, published_profile
from selfspec.profile.reading import parse_profile, profile_text
from selfspec.profile.schema import Published
from selfspec.profile.shipped import shipped_profiles
from selfspec.speculation.sampling import Sampler
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import SkipSet
from selfspec.types.identity import Identity

layers = st.lists(st.integers(0, 39), unique=True)
sets = st.fixed_dictionaries({"attention": layers, "mlp": layers})
files = st.dictionaries(st.text(max_size=12), sets, min_size=1, max_size=5)


@given(files, st.data())
def test_the_set_under_a_key(file, data):
    key = data.draw(st.sampled_from(sorted(file)))
    expected = SkipSet(tuple(file[key]["attention"]), tuple(file[key]["mlp"]))
    assert parse_draft_verify(json.dumps(file), key, source="f") == (key, expected)
    model = Identity(layers=40, name="org/model")
    profile = published_profile(expected, model, Published(file="f", key=key))
    assert parse_profile(profile_text(profile), source="p") == profile
    assert profile.skip_set == expected


@given(files)
def test_a_key_may_be_left_out_where_there_is_but_one(file):
    if len(file) == 1:
        assert parse_draft_verify(json.dumps(file), source="f")[0] == next(iter(file))
    else:
        with pytest.raises(SelfspecError, match=f"^f holds {len(file)} skip sets; name one with --key: "):
            parse_draft_verify(json.dumps(file), source="f")


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
no_layer = json_like.filter(lambda value: type(value) is not int or value < 0)


@settings(max_examples=examples(200))
@given(files, no_layer | st.integers(10_000), st.sampled_from(["attention", "mlp"]), st.data())
def test_what_is_no_layer_is_refused(file, wrong, part, data):
    key = data.draw(st.sampled_from(sorted(file)))
    listed = file[key][part]
    listed.insert(data.draw(st.integers(0, len(listed))), wrong)
    _is_refused(json.dumps(file), key, part)


@given(files, st.sampled_from(["attention", "mlp"]), st.data())
def test_a_layer_that_is_listed_twice_is_refused(file, part, data):
    key = data.draw(st.sampled_from(sorted(file)))
    listed = file[key][part]
    listed += [7] if 7 in listed else [7, 7]
    _is_refused(json.dumps(file), key, f"{part}: layer 7 is listed twice")


@settings(max_examples=examples(300))
@given(
    st.text(max_size=60) | json_like.map(json.dumps) | st.dictionaries(st.text(max_size=4), json_like).map(json.dumps)
)
def test_anything_else_gives_one_line(text):
    _is_refused(text, None, "")


def _is_refused(text, key, why):
    with pytest.raises(SelfspecError) as refused:
        parse_draft_verify(text, key, source="f.json")
    message = str(refused.value)
    assert message.startswith("f.json")
    assert why in message
    assert "\n" not in message
    assert len(message) < 2000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"f: not valid JSON \(Expecting value: line 1 column 1 \(char 0\)\)"),
        ("[" * 100_000, "f: not valid JSON"),
        ("[]", r"f: expected an object of skip sets by a model's key, got \[\]"),
        ("{}", "f: expected an object of skip sets"),
        ('{"a": [1]}', r"f: 'a': expected two lists of layers, 'attention' and 'mlp', got \[1\]"),
        ('{"a": {"attention": [1]}}', "f: 'a': expected two lists of layers"),
        ('{"a": {"attention": [], "mlp": [], "heads": []}}', "f: 'a': expected two lists of layers"),
        ('{"a": {"attention": 1, "mlp": []}}', "f: 'a': attention: expected a list of layers, got 1"),
        (
            '{"a": {"attention": [true], "mlp": []}}',
            "f: 'a': attention: True is no layer; expected whole numbers from 0",
        ),
        ('{"a": {"attention": [], "mlp": [2.0]}}', "f: 'a': mlp: 2.0 is no layer"),
        ('{"a": {"attention": [1, 1], "mlp": []}}', "f: 'a': skip.attention: layer 1 is listed twice"),
        ('{"a": {"attention": [1], "attention": [2], "mlp": []}}', "f: 'attention' is given twice"),
        (f'{{"a": {{"attention": [{"1" * 5000}], "mlp": []}}}}', "f: not valid JSON"),
    ],
)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(SelfspecError, match=message):
        parse_draft_verify(text, source="f")


def test_a_key_that_is_none():
    with pytest.raises(SelfspecError, match=r"^f holds no skip set 'c'; it holds 'a', 'b'$"):
        parse_draft_verify('{"a": 1, "b": 2}', "c", source="f")


def test_a_layer_that_the_model_lacks():
    with pytest.raises(SelfspecError, match="layer 40 does not exist; the model has 40 layers"):
        published_profile(SkipSet((40,)), Identity(layers=40), Published())


DRAFT_VERIFY = {
    "paper": "arXiv:2309.08168",
    "repository": "dilab-zju/self-speculative-decoding",
    "commit": "688db8b74a782af21777b7ad5aeb399d7eb26faf",
}
SWIFT = {
    "paper": "arXiv:2410.06916",
    "repository": "hemingkx/SWIFT",
    "commit": "88caed753c601a718c8ac39bb48c52fd6ef62025",
}
SHIPPED = [  # name, model, layers, attention and MLP sub-layers, checksum of their lists, key, text searched on
    (
        "llama-2-13b-draft-verify",
        "meta-llama/Llama-2-13b-hf",
        40,
        24,
        10,
        "5d0966458ee7",
        "llama-2-13b",
        "cnn_dailymail + xsum",
    ),
    (
        "llama-2-13b-chat-draft-verify",
        "meta-llama/Llama-2-13b-chat-hf",
        40,
        24,
        10,
        "e132ee8f867f",
        "llama-2-13b-chat",
        "cnn_dailymail + xsum",
    ),
    (
        "codellama-13b-draft-verify",
        "codellama/CodeLlama-13b-hf",
        40,
        22,
        12,
        "07c0bdbe096c",
        "codellama-13b",
        "cnn_dailymail + xsum",
    ),
    (
        "llama-2-70b-draft-verify",
        "meta-llama/Llama-2-70b-hf",
        80,
        47,
        37,
        "40b69faa4007",
        "llama-2-70b",
        "cnn_dailymail + xsum",
    ),
    ("llama-2-13b-swift-cnndm", "meta-llama/Llama-2-13b-hf", 40, 20, 14, "f00e06b1465b", "llama-2-13b_cnndm", "cnndm"),
    ("llama-2-70b-swift-cnndm", "meta-llama/Llama-2-70b-hf", 80, 41, 37, "1a11fd7b6a40", "llama-2-70b_cnndm", "cnndm"),
    (
        "llama-2-13b-chat-swift-cnndm",
        "meta-llama/Llama-2-13b-chat-hf",
        40,
        18,
        16,
        "f540b554f995",
        "llama-2-13b_chat_cnndm",
        "cnndm",
    ),
    (
        "codellama-13b-swift-humaneval",
        "codellama/CodeLlama-13b-hf",
        40,
        14,
        20,
        "2befc79f49c2",
        "codellama-13b_humaneval",
        "humaneval",
    ),
    (
        "codellama-34b-swift-humaneval",
        "codellama/CodeLlama-34b-hf",
        48,
        22,
        24,
        "3d899ca1dbae",
        "codellama-34b_humaneval",
        "humaneval",
    ),
]


def test_all_that_ship_are_here():
    assert [name for name, p in shipped_profiles().items() if p.published] == sorted(name for name, *_ in SHIPPED)


@pytest.mark.parametrize(("name", "model", "n", "attention", "mlp", "checksum", "key", "calibration"), SHIPPED)
def test_a_shipped_set_is_the_published_one(name, model, n, attention, mlp, checksum, key, calibration):
    profile = shipped_profiles()[name]
    skip = profile.draft.skip
    assert profile.model == Identity(name=model, layers=n)
    assert (len(skip.attention), len(skip.mlp)) == (attention, mlp)
    assert hashlib.sha256(f"{skip.attention}{skip.mlp}".encode()).hexdigest()[:12] == checksum
    origin = DRAFT_VERIFY if name.endswith("draft-verify") else SWIFT
    assert profile.published == Published(**origin, file="skip_layers.json", key=key, calibration=calibration)
    assert profile.draft.controller == ControllerSpec(name="adaptive")
    assert "not measured here" in profile.note
    untold = (profile.calibration, profile.search, profile.costs, profile.acceptance, profile.predicted)
    assert (untold, profile.measured) == ((None,) * 5, [])


@pytest.mark.parametrize("n", [40, 48, 80])
def test_drafting_with_it_is_lossless(n):
    """On a random model with as many layers: greedy, and sampled with a seed."""
    model = small(vocabulary=61, layers=n, seed=n)
    prompt, room = [3, 1, 4], 16
    for name, *_ in (facts for facts in SHIPPED if facts[2] == n):
        llm = selfspec.wrap(model, None, profile=name)
        for temperature in (0.0, 1.5):
            samplers = [Sampler(temperature=temperature, seed=1) for _ in range(2)]
            tokens, outcomes = run(llm.runtime, llm.drafter_for(llm.profile), prompt, room, sampler=samplers[0])
            assert tokens == run(llm.runtime, PlainDrafter(), prompt, room, sampler=samplers[1])[0]
            assert sum(len(outcome.draft) for outcome in outcomes) > 0
        assert len(set(tokens)) > 3


def test_auto_never_takes_one_that_was_not_measured_on_these_weights():
    model = small(layers=40)
    llm = selfspec.wrap(model, None, name="meta-llama/Llama-2-13b-hf")
    assert llm.known_profile is None
    with pytest.raises(
        SelfspecError, match=r"another model \(.*CodeLlama-34b-hf\): layers 48 in the profile, 40 in the model;"
    ):
        selfspec.wrap(model, None, profile="codellama-34b-swift-humaneval")
