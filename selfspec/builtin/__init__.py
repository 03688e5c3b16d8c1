"""The built-in model and its prompts: package data, so that every command works with no network."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Literal

NAME = "builtin"
PROFILE = "stdlib-llama-3.7m"


def model_folder() -> Path:
    """The folder of the built-in model, as `from_pretrained` reads it."""
    return Path(str(resources.files("selfspec.builtin") / "model"))


def prompts(part: Literal["calibration", "heldout"]) -> list[str]:
    """Excerpts of Python's standard library: from files the model was trained on, or from held-out files only.

    In an order shuffled once, so that the first n are a random sample.
    """
    text = (resources.files("selfspec.builtin") / f"{part}.jsonl").read_text("utf-8")
    return [json.loads(line)["prompt"] for line in text.splitlines()]
