"""How the help of commands with many options reads in a terminal of 80 columns."""

from __future__ import annotations

import re
import sys

import pytest

from selfspec.cli import main

DEVICE = ["device", "dtype", "threads", "device-map", "max-memory", "offload-folder"]
PROMPTS = ["column", "template", "chat"]
LAST = ["revision", "quiet", "verbose", "help"]
DRAFTING = {"Drafting": ["controller", "store"], "Prompts": PROMPTS, "Device": DEVICE}
DECODING = {
    "Sampling": ["top-k", "top-p", "seed", "generation-config", "min-p", "repetition-penalty", "set"],
    "Drafting": ["rule", "method", "controller", "store", "extra-memory", "answers"],
    "Guided generation (needs llguidance)": ["regex", "json-schema"],
    "Device": [*DEVICE, "tensor-parallel"],
}
COMMANDS = {
    "search": {
        "Options": [
            *("model", "prompts", "out", "trials", "minutes", "num-prompts", "max-new-tokens", "temperature", "json"),
            *LAST,
        ],
        "Prompts": PROMPTS,
        "Sampling": ["top-k", "top-p"],
        "Drafting and verification": ["rule", "controller", "kv", "drafters", "store"],
        "Search space": ["keep", "modes", "extra-memory", "int4", "granularity", "max-draft-cost", "keep-best"],
        "Search method": ["strategy", "context", "seed"],
        "Search as in the paper (with --strategy skopt)": ["objective", "warm-starts"],
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
        "Many prompts": ["prompts", "column", "template", "batch-size", "memory", "out"],
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
        **DRAFTING,
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


@pytest.mark.parametrize("command", COMMANDS)
def test_options_stand_in_panels_the_common_ones_first(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(sys, "argv", ["selfspec", command, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert not any("<bool>" in line for line in lines)
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
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(sys, "argv", ["selfspec", "--help"])
    with pytest.raises(SystemExit):
        main()
    found = {}
    for line in capsys.readouterr().out.splitlines():
        assert "<bool>" not in line
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
