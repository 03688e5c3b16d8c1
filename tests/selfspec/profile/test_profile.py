from __future__ import annotations

import jsonschema
import pytest
import yaml
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.basics.errors import SelfspecError
from selfspec.profile.draft_spec import LayerSkipSpec, PlainSpec, Skip
from selfspec.profile.drafter_specs import MergedSpec, ModelSpec
from selfspec.profile.module_files_spec import ModuleFile, sha256_of
from selfspec.profile.reading import parse_profile, profile_schema, profile_text, read_profile, write_profile
from selfspec.profile.schema import Calibration, Profile, Published, SearchRecord
from selfspec.profile.shipped import find_profile_file, shipped_profiles
from selfspec.types.acceptance import Confidence
from selfspec.types.controller import ControllerSpec
from selfspec.types.costs import WIDER, CostModel
from selfspec.types.draft_path import FULL, MODES, DraftPath, SkipSet
from selfspec.types.identity import Identity

indices = st.lists(st.integers(0, 9), unique=True).map(sorted)
names = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=20)
controllers = st.builds(
    ControllerSpec,
    name=names,
    options=st.dictionaries(names, st.integers(0, 64) | st.floats(allow_nan=False, allow_infinity=False)),
)
vocabularies = st.none() | st.lists(st.integers(0, 10**6), min_size=1, unique=True, max_size=200)
layer_skips = st.builds(
    LayerSkipSpec,
    skip=st.builds(Skip, attention=indices, mlp=indices),
    controller=controllers,
    candidates=st.integers(1, 64),
    vocabulary=vocabularies,
)
confidences = st.builds(Confidence, bias=st.floats(-9, 9), probability=st.floats(0, 9), gap=st.floats(0, 9))
in_modes = st.builds(
    LayerSkipSpec.from_path,
    st.builds(
        DraftPath.from_modes,
        st.lists(st.sampled_from(MODES), min_size=20, max_size=20),
        head=st.sampled_from(MODES[:-1]),
        vocabulary=vocabularies.map(lambda tokens: tokens and tuple(tokens)),
    ),
    controllers,
    candidates=st.integers(1, 64),
    confidence=st.none() | confidences,
)
parts = st.builds(
    ModuleFile,
    file=st.from_regex(r"[a-z0-9 ]{1,8}(/[a-z]{1,4})?\.safetensors", fullmatch=True),
    sha256=st.from_regex("[0-9a-f]{64}", fullmatch=True),
)
profiles = st.builds(
    Profile,
    model=st.builds(Identity, layers=st.integers(10, 99), name=names, hidden=st.none() | st.integers(1, 9999)),
    draft=st.just(PlainSpec()) | layer_skips | in_modes,
    parts=st.dictionaries(names, parts, max_size=2),
    published=st.none() | st.builds(Published, **{name: st.none() | names for name in Published.model_fields}),
    calibration=st.none()
    | st.builds(
        Calibration,
        source=names,
        column=st.none() | names,
        template=st.none() | names,
        chat=st.booleans(),
        drawn_from=st.none() | st.integers(1, 9999),
        prompts=st.just(8),
        tokens=st.just(99),
        sha256=st.just("0" * 64),
    ),
    search=st.none()
    | st.builds(
        SearchRecord,
        strategy=st.just("tpe"),
        objective=st.just("wallclock"),
        trials=st.integers(0, 999),
        seed=st.integers(0, 9),
        seconds=st.floats(0, 1e6),
        max_new_tokens=st.just(32),
    ),
    measured=st.just([]),
    versions=st.dictionaries(names, names),
    note=st.none() | names,
)


@given(profiles)
def test_writing_and_reading_gives_an_equal_profile(profile):
    text = profile_text(profile)
    assert parse_profile(text, source="p") == profile
    assert text.startswith("version: 2\n")


@given(st.lists(st.sampled_from(MODES), min_size=8, max_size=8), st.sampled_from(MODES[:-1]))
def test_a_draft_path_comes_back_from_its_text(modes, head):
    profile = Profile(model=Identity(layers=4), draft=LayerSkipSpec.from_path(DraftPath.from_modes(modes, head=head)))
    found = parse_profile(profile_text(profile), source="p")
    assert (found.path.modes(4), found.path.head) == (tuple(modes), head)
    assert found.path == profile.path
    assert found.skip_set == found.path.skip
    assert found.drafts == (set(modes) != {"full"} or head != "full")


SETS = st.sampled_from(["skip", "int8", "int4"])


@given(SETS, SETS, st.sampled_from(["attention", "mlp"]), st.integers(0, 5))
def test_what_a_draft_path_may_not_say(first, second, part, layer):
    """A layer listed twice, a layer that the model does not have, a sub-layer of two modes: each one line."""
    draft = {"kind": "layer-skip", first: {part: [layer]}}
    twice = first == second
    draft[second] = {part: [layer, layer] if twice else [layer]}
    with pytest.raises(SelfspecError) as error:
        parse_profile(yaml.safe_dump({"version": 2, "model": {"layers": 4}, "draft": draft}), source="p.yaml")
    said = f"p.yaml: {first}.{part}: layer {layer} is listed twice" if twice else f"p.yaml: {part} of layer {layer} is"
    assert str(error.value).startswith(said)
    del draft[second]
    draft[first] = {part: [layer]}
    text = yaml.safe_dump({"version": 2, "model": {"layers": 4}, "draft": draft})
    if layer < 4:
        assert len(getattr(getattr(parse_profile(text, source="p.yaml").path, first), part)) == 1
        return
    with pytest.raises(SelfspecError, match=rf"^p.yaml: {first}.{part}: layer {layer} does not exist; the model has 4"):
        parse_profile(text, source="p.yaml")


def test_what_a_draft_step_reads_by_what_was_measured():
    own = find_profile_file("stdlib-llama-3.7m")
    assert own.bits_read.plain == 32
    half = own.model_copy(update={"measured": [own.measured[0].model_copy(update={"dtype": "bfloat16"})]})
    assert half.bits_read.plain == 16
    assert half.bits_read.draft == pytest.approx(own.bits_read.draft / 2)
    assert own.model_copy(update={"measured": []}).bits_read == own.bits_read
    assert find_profile_file("llama-2-70b-draft-verify").bits_read is None, "its sizes are not known"
    plain = Profile(model=own.model)
    assert (plain.path, plain.bits_read.draft) == (FULL, 32)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
keys = st.sampled_from(
    [
        "model",
        "skip",
        "controller",
        "draft",
        "parts",
        "version",
        "measured",
        "search",
        "calibration",
        "published",
        "note",
    ]
)


@settings(max_examples=examples(300))
@given(st.dictionaries(keys, json_like) | json_like)
def test_wrong_data_gives_one_line(data):
    _one_line_or_valid(yaml.safe_dump(data))


@settings(max_examples=examples(300))
@given(st.text(max_size=80) | st.text("{}[]&*!|>'\"%@`:-,? \n\tab01.", max_size=40))
def test_wrong_text_gives_one_line(text):
    _one_line_or_valid(text)


@settings(max_examples=examples(200))
@given(profiles, st.data())
def test_a_damaged_file_gives_one_line(profile, data):
    text = profile_text(profile)
    start = data.draw(st.integers(0, len(text)))
    _one_line_or_valid(text[:start] + data.draw(st.text(max_size=4)) + text[start + data.draw(st.integers(0, 9)) :])


def _one_line_or_valid(text):
    try:
        parse_profile(text, source="p.yaml")
    except SelfspecError as error:
        assert "\n" not in str(error)
        assert str(error).startswith("p.yaml")


V2 = "model: {layers: 4}\nversion: 2\n"
KINDS = "plain, layer-skip, lookup, recycle, swift, clasp, input, jacobi, lookahead, head, model, merged"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a profile .* got nothing"),
        ("- 1", "got a list"),
        ("version: 2\nmodel: {layers: 4}\nlayers: 3", "unknown key 'layers'"),
        ("version: 2\nmodel: {layers: 4, width: 3}", "unknown key 'model.width'"),
        ("version: 2", "model: Field required"),
        ("version: 2\nmodel: {hidden: 4}", "model.layers: Field required"),
        (
            "version: 2\nmodel: {layers: 4}\ndraft: {kind: layer-skip, skip: {attention: [4]}}",
            "skip.attention: layer 4 does not exist; the model has 4",
        ),
        (
            "version: 2\nmodel: {layers: 4}\ndraft: {kind: layer-skip, skip: {mlp: [1, 1]}}",
            "skip.mlp: layer 1 is listed twice",
        ),
        (
            "version: 2\nmodel: {layers: 4}\ndraft: {kind: layer-skip, skip: {mlp: [-1]}}",
            "skip.mlp.0: .* greater than or equal to 0, got -1",
        ),
        (
            "version: 2\nmodel: {layers: 4}\ndraft: {kind: layer-skip, skip: {mlp: ['1']}}",
            "skip.mlp.0: .* integer, got '1'",
        ),
        ("model: {layers: 4}\nversion: 3", "p.yaml: version: expected 2, got 3"),
        ("model: {layers: 4}\nversion: true", "version: expected 2, got True"),
        (f"{V2}draft: {{kind: layer-skip, candidates: 0}}", "candidates: .* greater than or equal to 1, got 0"),
        (f"{V2}skip: {{}}", "unknown key 'skip'"),
        (
            "model: {layers: 4}\nskip: {mlp: [1]}",
            "expected 2, got none; `selfspec search` makes a profile of version 2",
        ),
        (
            "model: {layers: 4}\nversion: 1\nskip: {}",
            "expected 2, got 1; `selfspec search` makes a profile of version 2",
        ),
        (
            f"{V2}draft: {{kind: magic}}",
            "draft.kind: 'magic' is not known; known: plain, layer-skip, lookup, .*, head",
        ),
        (
            f"{V2}draft: {{skip: {{}}}}",
            f"draft.kind: it is left out; known: {KINDS}",
        ),
        (
            f"{V2}draft: {{kind: [plain]}}",
            rf"draft.kind: \['plain'\] is not known; known: {KINDS}",
        ),
        (
            f"{V2}draft: plain",
            rf"draft: expected a mapping with 'kind' \({KINDS}\), got",
        ),
        (f"{V2}draft: {{kind: plain, skip: {{}}}}", "unknown key 'draft.skip'"),
        (f"{V2}draft: {{kind: layer-skip, siblings: 2}}", "unknown key 'draft.siblings'"),
        (f"{V2}draft: {{kind: layer-skip, skip: {{mlp: [4]}}}}", "skip.mlp: layer 4 does not exist; the model has 4"),
        (f"{V2}draft: {{kind: layer-skip, skip: {{mlp: ['1']}}}}", "draft.skip.mlp.0: .* integer, got '1'"),
        (f"{V2}draft: {{kind: layer-skip, candidates: 65}}", "draft.candidates: .* or equal to 64, got 65"),
        (f"{V2}draft: {{kind: layer-skip, int8: {{mlp: [4]}}}}", "int8.mlp: layer 4 does .* so 0 to 3 can be in int8"),
        (f"{V2}draft: {{kind: layer-skip, int4: {{mlp: [-1]}}}}", "draft.int4.mlp.0: .* or equal to 0, got -1"),
        (f"{V2}draft: {{kind: layer-skip, int4: [1]}}", r"draft.int4: .*, got \[1\]"),
        (f"{V2}draft: {{kind: layer-skip, head: int2}}", "draft.head: .* 'int8' or 'int4', got 'int2'"),
        (f"{V2}draft: {{kind: layer-skip, head: skip}}", "draft.head: .* 'int8' or 'int4', got 'skip'"),
        (f"{V2}draft: {{kind: layer-skip, confidence: {{gap: -1}}}}", "draft.confidence.gap: .* equal to 0, got -1"),
        (f"{V2}draft: {{kind: layer-skip, confidence: {{gaps: 1}}}}", "unknown key 'draft.confidence.gaps'"),
        (
            f"{V2}draft: {{kind: layer-skip, controller: {{name: fixed, options: {{k: x}}}}}}",
            "draft.controller.options.k: Input should be a valid integer, got 'x'",
        ),
        ("version: 2\nmodel: {layers: 4}\nint8: {mlp: [1]}", "unknown key 'int8'"),
        (f"{V2}parts: {{a: {{file: a.safetensors}}}}", "parts.a.sha256: Field required"),
        (f"{V2}parts: {{a: {{file: a.safetensors, sha256: '0'}}}}", "parts.a.sha256: .* got '0'"),
        ("model: {layers: 4\nskip: ]", "line 2: not valid YAML"),
        ("a: !!python/object:os.system x", "not valid YAML"),
        (V2 + "draft: {kind: clasp, skip_layers: 5}", "draft.skip_layers: 5; expected at most the model's 4"),
        ('a: "\\U80000000"', "not valid YAML"),  # beyond what a character's number may be
        ("model: {layers: 4}\nskip: {mlp: [1]}\nskip: {}", "line 3: not valid YAML .'skip' is given twice"),
        ("version: 2\na: &a [*a]", "it refers to itself; write the values out"),
        (f"{V2}note: {'9' * 101}", "line 3: .*a number of 101 characters; expected at most 100"),
        (f"{V2}note: 1{':1' * 60}", "line 3: .*a number of 121 characters"),
        ("version: 2\nmodel: {<<: {layers: 4}}", "line 2: .*merge keys .<<. are not supported; write the keys out"),
        (V2 + "note: " + "[" * 33 + "]" * 33, "more than 500,000 values or 32 levels"),
        ("version: 2\nmodel: {layers: 4}\npublished: {papers: x}", "unknown key 'published.papers'"),
        ("version: 2\nmodel: {layers: 4}\npublished: {commit: 1}", "published.commit: .* string, got 1"),
    ],
)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(SelfspecError, match=message):
        parse_profile(text, source="p.yaml")


def nested(first, again, levels=24):
    """A YAML mapping whose every level has the level before it twice."""
    lines = [f"l0: &l0 {first}", *(f"l{i}: &l{i} {again.format(f'*l{i - 1}')}" for i in range(1, levels))]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (nested("{a: 1}", "{{<<: [{0}, {0}]}}"), "line 4: .*merge keys"),
        (nested("{model: {layers: 4}, also: []}", "{{model: {{layers: 4}}, also: [{0}, {0}]}}"), "500,000 values"),
        (nested("[1]", "{{a: {0}}}", levels=100), "32 levels"),
    ],
)
def test_aliases_that_stand_for_more_than_any_memory_holds_are_refused(text, message):
    assert len(text) < 6000
    with pytest.raises(SelfspecError, match=message):
        parse_profile(f"{V2}{text}", source="p.yaml")


def test_an_alias_may_stand_for_a_few_values():
    text = f"{V2}draft: {{kind: layer-skip, skip: {{attention: &a [1, 2], mlp: *a}}}}"
    assert parse_profile(text, source="p.yaml").skip_set == SkipSet((1, 2), (1, 2))


def test_a_profile_of_many_megabytes_is_not_read(tmp_path):
    path = tmp_path / "p.yaml"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(SelfspecError, match=r"p.yaml: 1,099,511,627,776 bytes; expected at most 4,194,304$"):
        read_profile(path)


def test_a_published_set_without_measurements_is_valid():
    profile = parse_profile(
        "version: 2\nmodel: {layers: 40, name: meta-llama/Llama-2-13b-hf}\n"
        "draft: {kind: layer-skip, skip: {attention: [3], mlp: [6]}}",
        source="p",
    )
    assert len(profile.skip_set) == 2
    assert profile.measured == []


@pytest.mark.parametrize("draft", ["kind: model, model: x", "kind: swift", "kind: clasp"])
def test_draft_steps_that_check_lookup_tokens_cost_what_wider_steps_do(draft):
    def payoff(more):
        text = f"version: 2\nmodel: {{layers: 4}}\ndraft: {{{draft}, step: 0.3{more}}}"
        return parse_profile(text, source="p").payoff

    checks = payoff(", proposers: [{kind: lookup}]")
    assert checks.wider == pytest.approx([0.3, *(0.3 * share for share in WIDER)])
    assert payoff("").wider == ()
    assert checks.draft == payoff("").draft == 0.3


def test_identity_compares_what_is_present():
    mine = Identity(layers=4, hidden=32)
    assert mine.mismatch(Identity(layers=4, hidden=32, vocabulary=9)) is None
    assert mine.mismatch(Identity(layers=4)) is None
    assert mine.mismatch(Identity(layers=5)) == "layers 4 in the profile, 5 in the model"
    assert not mine.other_weights(Identity(layers=4, fingerprint="a"))
    assert Identity(layers=4, fingerprint="b").other_weights(Identity(layers=4, fingerprint="a"))


def test_files(tmp_path):
    profile = Profile(model=Identity(layers=4), draft=LayerSkipSpec.from_path(SkipSet((1,))))
    path = tmp_path / "p.yaml"
    write_profile(profile, path)
    assert read_profile(path) == find_profile_file(path) == profile
    assert [p.name for p in tmp_path.iterdir()] == ["p.yaml"]
    for bad, message in [
        (tmp_path / "no.yaml", "no such file"),
        (tmp_path, "is a folder"),
    ]:
        with pytest.raises(SelfspecError, match=message):
            read_profile(bad)
    with pytest.raises(SelfspecError, match="the folder .* does not exist"):
        write_profile(profile, tmp_path / "no" / "p.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"model: \xff")
    with pytest.raises(SelfspecError, match="not UTF-8"):
        read_profile(tmp_path / "binary.yaml")


def test_shipped_profiles_are_valid_and_found_by_name():
    from selfspec.controllers import make_controller

    shipped = shipped_profiles()
    assert "stdlib-llama-3.7m" in shipped
    for name, profile in shipped.items():
        make_controller(profile.draft.controller)
        assert find_profile_file(name) == profile
    with pytest.raises(
        SelfspecError, match=r"no such file, and no shipped profile of that name; shipped profiles are listed by: s"
    ):
        find_profile_file("nothing")
    with pytest.raises(
        SelfspecError, match=r"of that name; did you mean stdlib-llama-3.7m\? All shipped profiles are listed by: s"
    ):
        find_profile_file("stdlib-llama")


@pytest.mark.parametrize(
    ("tokens", "why"),
    [("[]", "vocabulary"), ("[1, 1]", "named twice"), ("[5, 64]", "token 64 is not among"), ("[-1]", "vocabulary.0")],
)
def test_a_wrong_draft_vocabulary(tokens, why):
    model = "version: 2\nmodel: {layers: 4, vocabulary: 64}"
    with pytest.raises(SelfspecError, match=why):
        parse_profile(f"{model}\ndraft: {{kind: layer-skip, vocabulary: {tokens}}}\n", source="p")


class TestSchema:
    @pytest.fixture
    def validator(self):
        schema = profile_schema()
        jsonschema.Draft202012Validator.check_schema(schema)
        return jsonschema.Draft202012Validator(schema)

    def test_what_can_be_written_is_valid(self, validator):
        @settings(max_examples=examples(50))
        @given(profiles)
        def check(profile):
            validator.validate(yaml.safe_load(profile_text(profile)))

        check()

    @pytest.mark.parametrize("name", shipped_profiles())
    def test_so_is_what_ships(self, validator, name):
        validator.validate(yaml.safe_load(profile_text(find_profile_file(name))))

    @pytest.mark.parametrize(
        "text",
        [
            "[]",
            "skip: {}",
            "version: 2\nmodel: {layers: 0}",
            "version: 2\nmodel: {layers: 4, width: 3}",
            "version: 2\nmodel: {layers: 4}\ndraft: {kind: layer-skip, skip: {mlp: [-1]}}",
            "version: 2\nmodel: {layers: 4}\ndraft: {kind: layer-skip, skip: {mlp: ['1']}}",
            "model: {layers: 4}\nversion: 3",
            "model: {layers: 4}\ndraft: {kind: plain}",
            "model: {layers: 4}\nversion: 1\nparts: {}",
            f"{V2}siblings: 2",
            f"{V2}draft: {{kind: magic}}",
            f"{V2}draft: {{kind: plain, skip: {{}}}}",
            f"{V2}draft: {{kind: layer-skip, skip: {{mlp: [-1]}}}}",
            f"{V2}draft: {{kind: layer-skip, candidates: 0}}",
            f"{V2}draft: {{kind: layer-skip, int8: {{mlp: [-1]}}}}",
            f"{V2}draft: {{kind: layer-skip, head: skip}}",
            f"{V2}draft: {{kind: layer-skip, confidence: {{gap: -1}}}}",
            f"{V2}parts: {{a: {{file: a.safetensors, sha256: '0'}}}}",
            "version: 2\nmodel: {layers: 4}\ncontroller: {options: {}}",
            "version: 2\nmodel: {layers: 4}\npublished: {papers: x}",
        ],
    )
    def test_what_is_refused_is_not(self, validator, text):
        with pytest.raises(SelfspecError):
            parse_profile(text, source="p")
        assert not validator.is_valid(yaml.safe_load(text))

    def test_every_record_is_described_and_no_title_repeats_a_name(self):
        schema = profile_schema()
        records = list(schema["$defs"].values())
        assert schema["description"]
        assert all(record["description"] for record in records)
        assert not [field for record in records for field in record["properties"].values() if "title" in field]


@pytest.mark.parametrize(
    ("draft", "share"), [("kind: lookup", 0.0), ("kind: recycle", 0.0), ("kind: model, model: x", 0.3)]
)
def test_drafts_without_the_models_own_layers_read_none_of_its_keys(draft, share):
    """Lookups are free at any length, and a draft model's keys are taken to cost its share."""
    text = f"version: 2\nmodel: {{layers: 4}}\ndraft: {{{draft}}}"
    costs = CostModel(
        context=10,
        base=0.1,
        attention=0.1,
        mlp=0.1,
        attention_per_key=0.01,
        widths=[1, 2],
        verify=[1.0, 1.1],
        round=0.0,
    )
    payoff = parse_profile(text, source="p").model_copy(update={"costs": costs}).payoff
    longer = payoff.at(4106)
    assert longer.context > payoff.context
    assert longer.draft == pytest.approx(share)


def test_files_that_a_profile_names_are_found_from_where_it_is_written(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    (first / "small").mkdir(parents=True)
    second.mkdir()
    (first / "w.safetensors").write_bytes(b"mine")
    (second / "w.safetensors").write_bytes(b"another")
    part = ModuleFile(file="w.safetensors", sha256=sha256_of(first / "w.safetensors"))
    small, path = ModelSpec(model="small"), LayerSkipSpec(skip=Skip(attention=[1]))
    merged = MergedSpec(drafters=[small, path])
    for draft, folder in ((small, True), (merged, True), (ModelSpec(model="a/name"), False)):
        write_profile(Profile(model=Identity(layers=4), draft=draft, parts={"int4": part}), first / "p.yaml")
        written = write_profile(read_profile(first / "p.yaml"), second / "q.yaml")
        assert read_profile(second / "q.yaml") == written
        copied = second / written.parts["int4"].file
        assert copied.read_bytes() == b"mine"
        assert (second / "w.safetensors").read_bytes() == b"another"
        drafters = getattr(written.draft, "drafters", [written.draft])
        assert drafters[0].model == (str((first / "small").resolve()) if folder else "a/name")
    assert write_profile(read_profile(first / "p.yaml"), first / "again.yaml").parts == {"int4": part}
