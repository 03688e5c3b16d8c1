"""The families of models that are served, by the `model_type` of their configuration.

A family is one file here that says where its models keep their modules and how their sub-layers compute (`base`), and
a line in `FAMILIES`. Models that share a skeleton, as Llama, Mistral and Qwen2 do, share the file.
"""

from __future__ import annotations

from typing import Any

from selfspec.basics.errors import UnsupportedModelError
from selfspec.model.families.base import Family, Parts
from selfspec.model.families.llama import Llama

__all__ = ["FAMILIES", "Family", "Parts", "find_family", "parts_of"]

FAMILIES: dict[str, Family] = {"llama": Llama(), "mistral": Llama(), "qwen2": Llama()}


def find_family(config: Any, what: str) -> Family:
    """The family that a configuration belongs to.

    Raises `UnsupportedModelError` where none is served, which names the model as `what` and says what is.
    """
    name = getattr(config, "model_type", None)
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{what} (model_type {name!r}) is not supported; supported: causal language models of {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def parts_of(model: Any) -> Parts:
    """Where a loaded model keeps its modules. Raises `UnsupportedModelError` for a model that is not served."""
    family = find_family(getattr(model, "config", None), type(model).__name__)
    return family.parts(model.get_base_model() if hasattr(model, "get_base_model") else model)
