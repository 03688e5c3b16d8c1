"""`--quiet` and `--verbose`: what a command says on standard error."""

from __future__ import annotations

import logging

import pytest

from selfspec.cli.dataclass_options import verbosity

PROMPT = "import os\n\ndef main(args):\n    "
ARGS = ("generate", PROMPT, "-n", 3, "--profile", "none", "--seed", 1)


@pytest.fixture(autouse=True)
def own_level():
    """The level of the log that a command sets ends with the test."""
    yield
    logging.getLogger("selfspec").setLevel(logging.NOTSET)


def test_notes_and_no_notes(cli):
    normal, quiet = cli(*ARGS), cli(*ARGS, "--quiet")
    assert "--seed: no effect" in normal[2]
    assert quiet == (0, normal[1], "")
    assert verbosity() == "normal"


def test_what_is_asked_for_and_errors_are_printed(cli):
    assert "3 tokens in " in cli(*ARGS, "-q", "--stats")[2]
    code, _, err = cli("generate", PROMPT, "--profile", "none", "-q", "--set", "minp=1")
    assert code == 2
    assert err.startswith("error: ")


def test_verbose_says_what_was_chosen(cli, caplog):
    assert cli(*ARGS)[0] == 0
    assert caplog.messages == []
    assert cli(*ARGS, "-v")[0] == 0
    (said,) = (record.getMessage() for record in caplog.records if record.name == "selfspec")
    assert said.startswith("builtin: layout ")
    assert said.endswith(", drafts: none")


def test_both(cli):
    code, _, err = cli(*ARGS, "-q", "-v")
    assert (code, err) == (2, "error: --quiet and --verbose: expected only one of the two\n")
