"""Control characters in profiles, file names and studies do not reach the terminal."""

from __future__ import annotations

import json

import pytest
import yaml

from selfspec.cli.common import print_json

HOSTILE = "\x1b]0;x\x07\x9b31m\u202e\u2066"
PROFILE = {"version": 2, "model": {"layers": 4}, "draft": {"kind": "layer-skip", "skip": {"mlp": [1]}}}


def acts(text):
    return [char for char in HOSTILE if not char.isprintable() and char in text]


@pytest.fixture
def written(cli, tmp_path):
    """The name of a profile's file."""

    def write(name="p.yaml", **entries):
        (tmp_path / name).write_text(yaml.safe_dump(PROFILE | entries))
        return name

    return write


@pytest.mark.parametrize("command", [["profile", "show"], ["generate", "--profile"], ["profile", "validate"]])
def test_an_unknown_key_is_shown_as_signs(command, cli, written):
    code, out, err = cli(*command, written(**{f"a{HOSTILE}b": 1}))
    assert code in (1, 2)
    assert "unknown key 'a" in out + err
    assert not acts(out + err)


def test_a_file_name_is_shown_as_signs(cli, written):
    code, out, err = cli("generate", "--profile", f"missing{HOSTILE}.yaml")
    assert code == 2
    assert "missing" in err
    assert not acts(out + err)


@pytest.mark.parametrize(
    "entries",
    [
        {"note": HOSTILE},
        {"versions": {f"torch{HOSTILE}": HOSTILE}},
        {"model": {"layers": 4, "name": f"a{HOSTILE}", "model_type": HOSTILE}},
        {"draft": PROFILE["draft"] | {"controller": {"name": "fixed", "options": {f"k{HOSTILE}": 2}}}},
        {"calibration": {"source": HOSTILE, "prompts": 1, "tokens": 1, "sha256": HOSTILE}},
        {"published": {"paper": HOSTILE, "repository": HOSTILE}},
    ],
)
@pytest.mark.parametrize("command", [["show"], ["diff", "--json", "other.yaml"], ["diff", "other.yaml"], ["validate"]])
def test_what_a_profile_holds_is_shown_as_signs(entries, command, cli, written):
    written("other.yaml")
    _, out, err = cli("profile", *command, written(**entries))
    assert out + err
    assert not acts(out + err)


def test_json_holds_the_same_text(capsys):
    print_json({HOSTILE: HOSTILE})
    out = capsys.readouterr().out
    assert not acts(out)
    assert json.loads(out) == {HOSTILE: HOSTILE}
