"""The built-in model and its prompts: package data, so that every command works with no network."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Literal

NAME = "builtin"
PROFILE = "stdlib-llama-3.7m"
Part = Literal["calibration", "heldout"]


def model_folder() -> Path:
    """Return the folder of the built-in model, which `from_pretrained` reads."""
    return Path(str(resources.files("selfspec.builtin") / "model"))


def prompts(part: Part) -> list[str]:
    """Return excerpts of Python's standard library as prompts.

    `calibration`: excerpts of files that the model was trained on; `heldout`: excerpts of held-out files. The order was
    shuffled once, so the first n are a random sample.
    """
    return [row["prompt"] for row in _rows(part)]


def chat_prompts(part: Part) -> list[tuple[str, str]]:
    """Return everyday requests to an assistant, each as (request, task), with a task such as `translation`.

    No request is both in `calibration` and in `heldout`. The order was shuffled once, so the first n are a random
    sample.
    """
    return [(row["prompt"], row["task"]) for row in _rows(f"chat-{part}")]


def _rows(name: str) -> list[dict[str, str]]:
    text = (resources.files("selfspec.builtin") / f"{name}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.split("\n") if line]
