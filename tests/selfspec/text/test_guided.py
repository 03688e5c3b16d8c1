"""Guided generation: the language of the grammar, whatever was drafted; and drafts are accepted as often as without."""

from __future__ import annotations

import json
import re

import pytest
import torch
from toys import RandomTree, Scripted
from transformers import GenerationConfig
from transformers.generation.logits_process import SequenceBiasLogitsProcessor
from wants import needs

from selfspec.basics.errors import SelfspecError
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.text.guided import Guide, check_guide
from selfspec.types.draft_path import SkipSet
from selfspec.types.stats import Stats

pytestmark = needs("llguidance", "llguidance")
REGEX = r" *[a-z_]+\((self|cls)(, [a-z_]+)*\):\n"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PROMPT = "class Reader:\n    def"
NEW = 24


@pytest.fixture(scope="module")
def layer_skip(llm):
    return llm.layer_skip(SkipSet((5, 9, 11), (4, 7, 10)), "static:threshold=0.3,k_max=6")


def drafters(llm, layer_skip):
    """Layer skip, which drafts under the mask, and two that know nothing of the grammar."""
    return {
        "layer skip": layer_skip,
        "draft vocabulary": llm.layer_skip(layer_skip.path.skip, "fixed:k=3", range(0, 4096, 3)),
        "random tree": RandomTree(4096, (2, 2)),
        "script": Scripted(lambda tokens: llm.encode(" read(self, size):\n")[len(tokens) % 3 :], 4),
    }


@pytest.mark.parametrize("regex", [REGEX, r"[0-9]{3}-[0-9]{2}", r"(yes|no)"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_changes_nothing_and_the_text_matches(llm, layer_skip, regex, temperature):
    guide = llm.guide(regex=regex)
    for seed in range(3 if temperature else 1):
        options = {"max_new_tokens": NEW, "temperature": temperature, "seed": seed, "guide": guide}
        plain = llm.generate(PROMPT, drafter=PlainDrafter(), **options)
        ended = plain.tokens[-1] in llm.runtime.skeleton.ends
        assert ended == bool(re.fullmatch(regex, plain.text)) or len(plain.tokens) == NEW
        for name, drafter in drafters(llm, layer_skip).items():
            assert llm.generate(PROMPT, drafter=drafter, **options).tokens == plain.tokens, name


@pytest.mark.parametrize("rule", ["token", "block"])
def test_other_rules_keep_to_the_grammar(llm, layer_skip, rule):
    guide = llm.guide(regex=r"[0-9]{3}-[0-9]{2}")
    for drafter in drafters(llm, layer_skip).values():
        text = llm.generate(PROMPT, max_new_tokens=NEW, temperature=1.0, guide=guide, rule=rule, drafter=drafter).text
        assert re.fullmatch(r"[0-9]{3}-[0-9]{2}", text)


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["mapping", "text"])
def test_json(llm, layer_skip, schema):
    guide = llm.guide(json_schema=schema)
    complete = 0
    for seed in range(4):
        options = {"max_new_tokens": 60, "temperature": 0.8, "seed": seed, "guide": guide}
        out = llm.generate(PROMPT, drafter=layer_skip, **options)
        assert out.tokens == llm.generate(PROMPT, drafter=PlainDrafter(), **options).tokens
        if out.tokens[-1] in llm.runtime.skeleton.ends:
            found = json.loads(out.text)
            assert isinstance(found["name"], str)
            assert isinstance(found["n"], int)
            complete += 1
    assert complete > 0


class Unmasked(LayerSkipDrafter):
    """Drafts as if there were no grammar."""

    @staticmethod
    def _scores(chain, logits):
        return logits[0].float()


def rate(llm, drafter, prompts, **options):
    """Acceptance over these prompts, each with a seed: the same texts for every drafter."""
    options = {"max_new_tokens": NEW, "temperature": 1.0, **options}
    return Stats.total(
        llm.generate(prompt, seed=seed, drafter=drafter, **options).stats for seed, prompt in enumerate(prompts)
    ).acceptance_rate


def test_a_grammar_of_everything_changes_nothing(llm, layer_skip, held_out):
    anything = llm.guide(regex=r"(.|\n)*")
    prompts = held_out[:6]
    assert rate(llm, layer_skip, prompts, guide=anything) == rate(llm, layer_skip, prompts)


def test_masking_the_draft_keeps_acceptance_up(llm, layer_skip, held_out):
    """With q masked like p, as much is accepted as without a grammar; with q as it was, much less."""
    guide = llm.guide(regex=r"( *(self|cls)\.[a-z_]+ = [a-z_.]+\n)+")
    unmasked = Unmasked(llm.runtime, layer_skip.path, layer_skip.controller)
    masked, blind = (rate(llm, drafter, held_out[:12], guide=guide) for drafter in (layer_skip, unmasked))
    free = rate(llm, layer_skip, held_out[:12])
    print(f"acceptance {masked:.2f} masked, {blind:.2f} not masked, {free:.2f} without a grammar")
    assert masked > blind + 0.1
    assert masked > free - 0.05


def test_masks_are_a_function_of_the_prefix(llm):
    """Asked in any order, of the grammar's own prefixes and of others, the same answers come."""
    guide = llm.guide(regex=REGEX)
    text = llm.encode(" read(self, size):\n")
    prefixes = [text[:i] for i in range(len(text) + 1)] + [[*text[:2], 9, 9], [7], [*text, 0], [*text, 0, 5]]
    scores = torch.zeros(1, 4096)

    def masks(order):
        processor = guide.processor(2, llm.runtime.skeleton.ends)
        answers = {i: processor(torch.tensor([[5, 6, *prefixes[i]]]), scores)[0] for i in order}
        return [answers[i] for i in range(len(prefixes))]

    forward = masks(range(len(prefixes)))
    for order in (reversed(range(len(prefixes))), torch.randperm(len(prefixes)).tolist() * 2):
        for mine, theirs in zip(masks(list(order)), forward, strict=True):
            assert torch.equal(mine, theirs)
    allowed = forward[len(text)].isfinite().nonzero().flatten().tolist()
    assert allowed == sorted(llm.runtime.skeleton.ends)  # the grammar is complete: only the end may follow
    assert forward[0].isfinite().sum() < 4096


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected one of them"),
        ({"regex": "a", "json_schema": {}}, "expected one of them"),
        ({"regex": "a("}, r"^regular expression 'a\(': unclosed group$"),
        ({"json_schema": "{"}, "JSON schema"),
        ({"json_schema": {"type": "thing"}}, "JSON schema"),
        ({"json_schema": "[1]"}, r"^JSON schema: .*\[1\]; expected an object, such as"),
        ({"regex": "\udcff"}, "regular expression"),
        ({"json_schema": '{"const": "\ud800"}'}, "JSON schema"),
        ({"json_schema": {"enum": {1, 2}}}, "JSON schema"),
    ],
    ids=str,
)
def test_wrong_grammars_are_refused(llm, options, message):
    with pytest.raises(SelfspecError, match=message):
        llm.guide(**options)


def test_a_schema_that_cannot_be_followed_is_refused(llm):
    """And a property that only has the keyword's name is a property."""
    wrong = {"type": "object", "properties": {"a": {"type": "object", "patternProperties": {"^b": {"type": "string"}}}}}
    with pytest.raises(
        SelfspecError, match="patternProperties cannot be followed; expected properties, by their names"
    ):
        llm.guide(json_schema=wrong)
    right = {
        "type": "object",
        "properties": {"patternProperties": {"type": "integer"}},
        "required": ["patternProperties"],
    }
    text = llm.generate(PROMPT, max_new_tokens=NEW, guide=llm.guide(json_schema=right)).text
    assert '"patternProperties"' in text


@pytest.mark.parametrize("name", ["password", "byte", "our-own"])
def test_unknown_formats_constrain_nothing(llm, name):
    schema = {
        **SCHEMA,
        "properties": {**SCHEMA["properties"], "name": {"type": "string", "maxLength": 8, "format": name}},
    }
    guides = [llm.guide(json_schema=schema), llm.guide(json_schema=SCHEMA)]
    text, other = (llm.generate(PROMPT, max_new_tokens=NEW, guide=guide).text for guide in guides)
    assert text == other


def test_one_of_is_followed_as_any_of(llm):
    """As pydantic writes unions of models whose fields have defaults."""
    kinds = [
        {"type": "object", "properties": {key: {"type": "boolean"}, "c": {"type": "boolean"}}, "required": [key]}
        for key in ("a", "b")
    ]
    with pytest.warns(UserWarning, match="oneOf is followed as anyOf"):
        guide = llm.guide(json_schema={"oneOf": kinds, "x-guidance": {"whitespace_flexible": False}})
    text = llm.generate(PROMPT, max_new_tokens=NEW, guide=guide).text
    assert re.match(r'{"[abc]":(true|false)', text)


def test_only_what_ends_the_generation_ends_the_text(llm):
    """Of several end tokens that the guide knows, those that the config does not name are no way out."""
    guide = Guide(llm.tokenizer, ends=frozenset([0, 7, 9]), regex="(yes|no)")
    likes_7 = SequenceBiasLogitsProcessor([[[7], 50.0]])
    config = GenerationConfig(eos_token_id=0, max_new_tokens=8)
    out = llm.generate(PROMPT, config, guide=guide, logits_processor=[likes_7])
    assert out.tokens[-1] == 0
    assert out.text in ("yes", "no")
    with pytest.raises(SelfspecError, match=r"the guide ends with token \[0, 7, 9\], generation with \[5\]"):
        llm.generate(PROMPT, GenerationConfig(eos_token_id=5), guide=guide)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", [None, 1])
def test_a_guide_and_processors_that_allow_nothing_are_an_error(llm, layer_skip, temperature, seed):
    """`yes` and `no` end before the fewest tokens asked for: said where it happens, drafted or not."""
    config = GenerationConfig(min_new_tokens=6, max_new_tokens=9)
    guide = llm.guide(regex="(yes|no)")
    for drafter in (PlainDrafter(), layer_skip, RandomTree(4096, (2, 1, 1))):
        with pytest.raises(SelfspecError, match="no token can be chosen: .* the guide together allow none"):
            llm.generate(PROMPT, config, temperature=temperature, seed=seed, guide=guide, drafter=drafter)


def test_a_model_without_an_end_cannot_be_guided(llm):
    with pytest.raises(SelfspecError, match="end-of-sequence"):
        Guide(llm.tokenizer, ends=frozenset(), regex="a")


def test_without_llguidance_it_says_what_to_install(llm, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(SelfspecError, match=r"pip install llguidance"):
        llm.guide(regex="a")


@pytest.mark.parametrize(
    "schema",
    ['{"properties":{"a":' * 3000 + "{}" + "}}" * 3000, "[" * 100_000],
    ids=["objects", "lists"],
)
def test_a_schema_nested_too_deeply_is_told(schema):
    """It comes from clients of a server."""
    with pytest.raises(SelfspecError, match="^JSON schema: nested too deeply$"):
        check_guide(json_schema=schema)
    if schema.startswith("{"):
        parsed: dict[str, object] = {}
        for _ in range(3000):
            parsed = {"properties": {"a": parsed}}
        with pytest.raises(SelfspecError, match="^JSON schema: nested too deeply$"):
            check_guide(json_schema=parsed)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (dict, "<class 'dict'>; expected an object, such as a pydantic class's model_json_schema()"),
        ("[1]", "[1]; expected an object"),
        ("true", "True; expected an object"),
        ({"enum": []}, "Unsatisfiable schema: anyOf is empty"),
        ({"$ref": "#/$defs/a"}, "Pointer '/$defs/a' does not exist"),
        ({"$ref": "file:///etc/passwd"}, "Resource 'file:///etc/passwd' is not present in a registry"),
    ],
)
def test_a_schema_that_is_none_is_told_once(schema, said):
    with pytest.raises(SelfspecError, match=f"^JSON schema: {re.escape(said)}"):
        check_guide(json_schema=schema)
