"""The supported model families, by the `model_type` of their configuration.

A family is a file in this folder, which locates the models' modules and defines how sub-layers compute (see `base`),
and a line in `FAMILIES`. Models that share a module tree, such as Llama, Mistral and Qwen2, share the file.
"""

from __future__ import annotations

from typing import Any

from selfspec.basics.errors import UnsupportedModelError
from selfspec.models.families.base import Family, Parts
from selfspec.models.families.cohere2 import Cohere2
from selfspec.models.families.experts import Mixtral, Qwen3Moe
from selfspec.models.families.gemma import Gemma2, Gemma3
from selfspec.models.families.glm4 import Glm4
from selfspec.models.families.gpt_neox import GptNeoX
from selfspec.models.families.gpt_oss import GptOss
from selfspec.models.families.llama import Llama
from selfspec.models.families.llama_variants import Granite, Phi3, Qwen3, SmolLM3
from selfspec.models.families.olmo2 import Olmo2
from selfspec.models.families.stablelm import StableLm
from selfspec.models.families.starcoder2 import Starcoder2

__all__ = ["FAMILIES", "Family", "Parts", "find_family", "is_lean", "parts_of"]

FAMILIES: dict[str, Family] = {
    "llama": Llama(),
    "mistral": Llama(),
    "qwen2": Llama(),
    "qwen3": Qwen3(),
    "smollm3": SmolLM3(),
    "phi3": Phi3(),
    "granite": Granite(),
    "olmo2": Olmo2(),
    "gemma2": Gemma2(),
    "gemma3_text": Gemma3(),
    "glm4": Glm4(),
    "cohere2": Cohere2(),
    "starcoder2": Starcoder2(),
    "stablelm": StableLm(),
    "gpt_neox": GptNeoX(),
    "mixtral": Mixtral(),
    "qwen3_moe": Qwen3Moe(),
    "gpt_oss": GptOss(),
}


def find_family(config: Any, what: str) -> Family:
    """Return the family of a configuration.

    Raises `UnsupportedModelError` if its family is not supported; the message calls the model `what`.
    """
    name = getattr(config, "model_type", None)
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{what} (model_type {name!r}) is not supported; supported: causal language models of {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def is_lean(model: Any) -> bool:
    """Return whether a loaded model is in `FAMILIES`: the runtime calls its modules, not the model's forward."""
    return getattr(getattr(model, "config", None), "model_type", None) in FAMILIES


def base_model(model: Any) -> Any:
    """Return the model that PEFT wraps, whose modules hold the adapters; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def parts_of(model: Any) -> Parts:
    """Return the modules (`Parts`) of a loaded model. Raises `UnsupportedModelError` for an unsupported model."""
    family = find_family(getattr(model, "config", None), type(model).__name__)
    return family.parts(base_model(model))
