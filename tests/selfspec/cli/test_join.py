"""`selfspec profile join`: one profile of several."""

from __future__ import annotations

import json

import pytest

from selfspec.profile.reading import read_profile

HALF = "version: 2\nmodel: {layers: 16}\ndraft: {kind: layer-skip, skip: {attention: [3, 5, 9], mlp: [7, 11]}}\n"


@pytest.fixture
def cli(cli, tmp_path):
    (tmp_path / "a.yaml").write_text(HALF)
    (tmp_path / "b.yaml").write_text("version: 2\nmodel: {layers: 16}\ndraft: {kind: lookup}\n")
    (tmp_path / "other.yaml").write_text("version: 2\nmodel: {layers: 4}\n")
    return cli


def test_ways_to_draft_become_one_profile(cli, tmp_path):
    code, _, err = cli("profile", "join", "a.yaml", "b.yaml", "--out", "both.yaml")
    assert not code
    assert err.startswith("saved both.yaml: 2 ways to draft (")
    both = read_profile(tmp_path / "both.yaml")
    assert both.alternatives == [read_profile(tmp_path / name) for name in ("a.yaml", "b.yaml")]
    assert not cli("profile", "join", "both.yaml", "b.yaml", "--out", "three.yaml")[0]
    assert len(read_profile(tmp_path / "three.yaml").alternatives) == 3
    assert "also" in cli("profile", "show", "both.yaml")[1]
    assert not cli("profile", "validate", "both.yaml")[0]


@pytest.mark.parametrize("where", ["b.yaml", "both.yaml"])
def test_a_wrong_controller_is_told_of_every_kind_and_alternative(cli, tmp_path, where):
    wrong = (tmp_path / "b.yaml").read_text().replace("lookup}", "lookup, controller: {name: nonsense}}")
    cli("profile", "join", "a.yaml", "b.yaml", "--out", "both.yaml")
    (tmp_path / "b.yaml").write_text(wrong)
    both = (tmp_path / "both.yaml").read_text()
    assert "name: rate" in both
    (tmp_path / "both.yaml").write_text("name: nonsense".join(both.rsplit("name: rate", 1)))
    code, out, err = cli("profile", "validate", where)
    assert (code, out) == (2, "")
    assert f"{where}: controller 'nonsense'" in " ".join(err.split())


def test_a_draft_model_beside_a_joined_profile_is_found(cli, tmp_path):
    (tmp_path / "c.yaml").write_text("version: 2\nmodel: {layers: 16}\ndraft: {kind: model, model: small}\n")
    assert not cli("profile", "join", "a.yaml", "c.yaml", "--out", "both.yaml")[0]
    assert {each.folder for each in read_profile(tmp_path / "both.yaml").alternatives} == {tmp_path}


def test_text_is_plain_decodings(cli):
    cli("profile", "join", "a.yaml", "b.yaml", "--out", "both.yaml")
    texts = []
    for profile in ("none", "both.yaml"):
        args = ("--profile", profile, "--model", "builtin", "--max-new-tokens", "24", "--json")
        code, out, _ = cli("generate", *args, "def read_header(self, stream):")
        assert not code
        texts.append(json.loads(out)["text"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a.yaml"], "a.yaml: one profile; expected two or more to join"),
        (["a.yaml", "gone.yaml"], "gone.yaml"),
        (["a.yaml", "other.yaml"], "other.yaml: is of another model than a.yaml: layers"),
        (["a.yaml", "b.yaml", "--out", "none/x.yaml"], "the folder none does not exist"),
    ],
)
def test_wrong_input_is_one_clear_line(cli, tmp_path, given, said):
    before = sorted(tmp_path.iterdir())
    code, out, err = cli("profile", "join", *given)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())
    assert sorted(tmp_path.iterdir()) == before
