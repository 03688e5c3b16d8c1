"""How the help of commands with many options reads in a terminal of 80 columns."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import typer

from selfspec.cli import main
from selfspec.cli.app import app

DOCS = Path(__file__).parents[3] / "docs"
DEVICE = ["device", "dtype", "threads"]
PROMPTS = ["column", "template", "chat"]
LAST = ["revision", "quiet", "verbose", "help-all", "help"]
DRAFTING = {"Drafting": ["store"], "Prompts": PROMPTS, "Device": DEVICE}
DECODING = {
    "Sampling": ["top-k", "top-p", "seed", "generation-config", "min-p", "repetition-penalty", "set"],
    "Drafting": ["rule", "method", "store", "extra-memory", "answers"],
    "Guided generation (needs llguidance)": ["regex", "json-schema"],
    "Device": DEVICE,
}
COMMANDS = {
    "search": {
        "Options": [
            *("model", "prompts", "out", "trials", "minutes", "num-prompts", "max-new-tokens", "temperature", "json"),
            *LAST,
        ],
        "Prompts": PROMPTS,
        "Sampling": ["top-k", "top-p"],
        "Search space": ["keep-layers", "modes", "extra-memory", "int4", "keep-best"],
        "Drafting and verification": ["store"],
        "Search method": ["seed"],
        "Storage of trials": ["storage", "study"],
        "Device": DEVICE,
    },
    "train": {
        "Arguments": [],
        "Options": [
            *("model", "profile", "prompts", "out", "minutes", "max-new-tokens", "vocabulary", "rank", "loss"),
            *("student", "layers", "texts", "steps", "batch-size", "seed", "json", *LAST),
        ],
        "Prompts": PROMPTS,
        "Device": DEVICE,
    },
    "convert": {
        "Arguments": [],
        "Options": ["model", "profile", "out", "json", *LAST],
        "Device": DEVICE,
    },
    "generate": {
        "Arguments": [],
        "Options": [
            *("prompt", "model", "profile", "max-new-tokens", "temperature", "stop", "chat", "system", "stats"),
            *("compare", "color", "json", *LAST),
        ],
        **DECODING,
        "Many prompts": ["prompts", "column", "template", "num-prompts", "batch-size", "memory", "out"],
    },
    "chat": {
        "Options": [*("model", "profile", "max-new-tokens", "temperature", "stop", "system", "color"), *LAST],
        **DECODING,
    },
    "audit": {
        "Options": [
            *("model", "profile", "prompts", "num-prompts", "max-new-tokens", "temperature", "seed", "json"),
            *LAST,
        ],
        "Drafting": ["store", "method"],
        **{panel: DRAFTING[panel] for panel in ("Prompts", "Device")},
    },
    "bench": {
        "Options": [
            *(
                "model",
                "profile",
                "methods",
                "prompts",
                "num-prompts",
                "max-new-tokens",
                "temperature",
                "rounds",
                "seed",
            ),
            *("widen", "out", "json", *LAST),
        ],
        **DRAFTING,
    },
    "compare": {
        "Options": [
            *("model", "profile", "methods", "draft-model", "prompts", "num-prompts", "max-new-tokens", "temperature"),
            *("rounds", "patience", "out", "json", *LAST),
        ],
        "Prompts": PROMPTS,
        "Device": DEVICE,
    },
    "index": {
        "Arguments": [],
        "Options": ["model", "out", "add", "column", "template", "json", *LAST],
    },
    "report": {
        "Options": [
            *("out", "profile", "study", "storage", "bench", "model", "prompts", "num-prompts", "max-new-tokens"),
            *("no-sample", *LAST),
        ],
        "Prompts": PROMPTS,
        "Device": DEVICE,
    },
}


def helped(monkeypatch, capsys, *arguments):
    """The help in a terminal of 80 columns, by lines."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(sys, "argv", ["selfspec", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_options_stand_in_panels_the_common_ones_first(command, monkeypatch, capsys):
    lines = helped(monkeypatch, capsys, command, "--help")
    assert not any(re.search(r"--.* <[a-z]+", line) for line in lines), "the type of an option, not a word for it"
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines), "cut short"
    found, lengths = {}, []
    for line in lines:
        if title := re.match(r"╭─ (.*?) ─+╮", line):
            found[title[1]] = []
        elif option := re.match(r"│ (?:[* ]  )?--([a-z0-9-]+) ", line):
            found[[*found][-1]].append(option[1])
            lengths.append(1)
        elif lengths and line.startswith("│"):
            lengths[-1] += 1
    assert [*found.items()] == [*COMMANDS[command].items()]
    assert max(lengths) <= 5, "no help is so long, or its column so narrow"


def test_commands_stand_in_groups(monkeypatch, capsys):
    found = {}
    for line in helped(monkeypatch, capsys, "--help"):
        assert "<" not in line
        if title := re.match(r"╭─ (.*?) ─+╮", line):
            found[title[1]] = []
        elif named := re.match(r"│ ([a-z]+) ", line):
            found[[*found][-1]].append(named[1])
    assert [*found.items()] == [
        ("Options", []),
        ("Run", ["generate", "chat", "serve"]),
        ("Tune", ["search", "compare", "profile"]),
        ("Check", ["audit", "bench", "env"]),
        ("Extend", ["train", "convert", "quantize", "index", "export"]),
        ("Show", ["plot", "report"]),
    ]


def test_rare_options_are_in_the_full_help_only(monkeypatch, capsys):
    short = "\n".join(helped(monkeypatch, capsys, "search", "--help"))
    whole = "\n".join(helped(monkeypatch, capsys, "search", "--help-all"))
    for option in ("--objective", "--no-warm-starts", "--granularity", "--device-map"):
        assert option not in short
        assert option in whole
    assert "--help-all" in short
    assert "\n".join(helped(monkeypatch, capsys, "search", "--help")) == short
    assert short.count("\n") < 100, "two screens"


def commands():
    """Every command, as its words."""
    top = typer.main.get_command(app)
    return [
        words
        for name, command in top.commands.items()
        for words in ([(name, sub) for sub in command.commands] if hasattr(command, "commands") else [(name,)])
    ]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_each_help_ends_with_an_example_and_its_page(words, monkeypatch, capsys):
    end = "\n".join(helped(monkeypatch, capsys, *words, "--help")).rpartition("╯")[2]
    found = re.fullmatch(r"Example: selfspec (.*) More: docs/([a-z.-]+)(?:#(\S+))?", " ".join(end.split()))
    assert found[1].startswith(" ".join(words))
    anchor, text = found[3], (DOCS / found[2]).read_text()
    headings = [re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in text.splitlines()]
    assert not anchor or anchor in headings


@pytest.mark.parametrize(("typed", "completed"), [("ge", ["generate"]), ("search --num-p", ["--num-prompts"])])
def test_a_shell_completes_commands_and_options(typed, completed, monkeypatch, capsys):
    """`--install-completion` makes a shell run this; bash asks with these variables."""
    monkeypatch.setenv("_SELFSPEC_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"selfspec {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split())))
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # `python -m pytest` has one
    assert helped(monkeypatch, capsys) == completed


def test_shell_completion_can_be_installed(monkeypatch, capsys):
    assert any("--install-completion" in line for line in helped(monkeypatch, capsys, "--help"))
