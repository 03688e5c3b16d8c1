from __future__ import annotations

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.basics.errors import SelfspecError
from selfspec.facts.controller import ControllerSpec
from selfspec.facts.identity import Identity
from selfspec.profile.reading import parse_profile, profile_schema, profile_text, read_profile, write_profile
from selfspec.profile.schema import Calibration, Profile, Published, SearchRecord, Skip
from selfspec.profile.shipped import find_profile_file, shipped_profiles

indices = st.lists(st.integers(0, 9), unique=True).map(sorted)
names = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=20)
profiles = st.builds(
    Profile,
    model=st.builds(Identity, layers=st.integers(10, 99), name=names, hidden=st.none() | st.integers(1, 9999)),
    skip=st.builds(Skip, attention=indices, mlp=indices),
    controller=st.builds(
        ControllerSpec,
        name=names,
        options=st.dictionaries(names, st.integers(0, 64) | st.floats(allow_nan=False, allow_infinity=False)),
    ),
    draft_vocabulary=st.none() | st.lists(st.integers(0, 10**6), min_size=1, unique=True, max_size=200),
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
    assert parse_profile(profile_text(profile), source="p") == profile


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
keys = st.sampled_from(
    ["model", "skip", "controller", "version", "measured", "search", "calibration", "published", "note"]
)


@settings(max_examples=300)
@given(st.dictionaries(keys, json_like) | json_like)
def test_wrong_data_gives_one_line(data):
    _one_line_or_valid(yaml.safe_dump(data))


@settings(max_examples=300)
@given(st.text(max_size=80) | st.text("{}[]&*!|>'\"%@`:-,? \n\tab01.", max_size=40))
def test_wrong_text_gives_one_line(text):
    _one_line_or_valid(text)


@settings(max_examples=200)
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "want a profile .* got nothing"),
        ("- 1", "got a list"),
        ("model: {layers: 4}\nlayers: 3", "unknown key 'layers'"),
        ("model: {layers: 4, width: 3}", "unknown key 'model.width'"),
        ("skip: {attention: [1]}", "model: Field required"),
        ("model: {hidden: 4}", "model.layers: Field required"),
        ("model: {layers: 4}\nskip: {attention: [4]}", "skip.attention: layer 4 does not exist; the model has 4"),
        ("model: {layers: 4}\nskip: {mlp: [1, 1]}", "skip.mlp: layer 1 is listed twice"),
        ("model: {layers: 4}\nskip: {mlp: [-1]}", "skip.mlp.0: .* greater than or equal to 0, got -1"),
        ("model: {layers: 4}\nskip: {mlp: ['1']}", "skip.mlp.0: .* integer, got '1'"),
        ("model: {layers: 4}\nversion: 2", "version: .* got 2"),
        ("model: {layers: 4\nskip: ]", "line 2: not valid YAML"),
        ("a: !!python/object:os.system x", "not valid YAML"),
        ("model: {layers: 4}\nskip: {mlp: [1]}\nskip: {}", "line 3: not valid YAML .'skip' is given twice"),
        ("a: &a [*a]", "unknown key|model"),
        ("model: {layers: 4}\npublished: {papers: x}", "unknown key 'published.papers'"),
        ("model: {layers: 4}\npublished: {commit: 1}", "published.commit: .* string, got 1"),
    ],
)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(SelfspecError, match=message):
        parse_profile(text, source="p.yaml")


def test_a_published_set_without_measurements_is_valid():
    profile = parse_profile(
        "model: {layers: 40, name: meta-llama/Llama-2-13b-hf}\nskip: {attention: [3], mlp: [6]}", source="p"
    )
    assert len(profile.skip_set) == 2
    assert profile.measured == []


def test_identity_compares_what_is_present():
    mine = Identity(layers=4, hidden=32)
    assert mine.mismatch(Identity(layers=4, hidden=32, vocabulary=9)) is None
    assert mine.mismatch(Identity(layers=4)) is None
    assert mine.mismatch(Identity(layers=5)) == "layers 4 in the profile, 5 in the model"
    assert not mine.other_weights(Identity(layers=4, fingerprint="a"))
    assert Identity(layers=4, fingerprint="b").other_weights(Identity(layers=4, fingerprint="a"))


def test_files(tmp_path):
    profile = Profile(model=Identity(layers=4), skip=Skip(attention=[1]))
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
        make_controller(profile.controller)
        assert find_profile_file(name) == profile
    with pytest.raises(
        SelfspecError, match=r"no such file, and no shipped profile of that name; they are listed by: sel"
    ):
        find_profile_file("nothing")
    with pytest.raises(
        SelfspecError, match=r"of that name; did you mean stdlib-llama-3.7m\? All are listed by: selfspec"
    ):
        find_profile_file("stdlib-llama")


@pytest.mark.parametrize(
    ("tokens", "why"),
    [("[]", "draft_vocabulary"), ("[1, 1]", "named twice"), ("[5, 64]", "token 64 is not in"), ("[-1]", "draft_voc")],
)
def test_a_wrong_draft_vocabulary(tokens, why):
    with pytest.raises(SelfspecError, match=why):
        parse_profile(f"model: {{layers: 4, vocabulary: 64}}\ndraft_vocabulary: {tokens}\n", source="p")


class TestSchema:
    @pytest.fixture
    def validator(self):
        schema = profile_schema()
        jsonschema.Draft202012Validator.check_schema(schema)
        return jsonschema.Draft202012Validator(schema)

    def test_what_can_be_written_is_valid(self, validator):
        @settings(max_examples=50)
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
            "model: {layers: 0}",
            "model: {layers: 4, width: 3}",
            "model: {layers: 4}\nskip: {mlp: [-1]}",
            "model: {layers: 4}\nskip: {mlp: ['1']}",
            "model: {layers: 4}\nversion: 2",
            "model: {layers: 4}\ncontroller: {options: {}}",
            "model: {layers: 4}\npublished: {papers: x}",
        ],
    )
    def test_what_is_refused_is_not(self, validator, text):
        with pytest.raises(SelfspecError):
            parse_profile(text, source="p")
        assert not validator.is_valid(yaml.safe_load(text))

    def test_every_record_is_described_and_no_title_repeats_a_name(self):
        schema = profile_schema()
        records = [schema, *schema["$defs"].values()]
        assert all(record["description"] for record in records)
        assert not [field for record in records for field in record["properties"].values() if "title" in field]
