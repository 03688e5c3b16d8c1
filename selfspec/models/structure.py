"""Discovery of the decoder layers, attention and MLP modules in a causal language model of any family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from selfspec.basics.errors import UnsupportedModelError
from selfspec.models.dispatch import device_of
from selfspec.models.families import FAMILIES
from selfspec.models.families.base import Sizes
from selfspec.models.quantized_sublayers import WeightQuantizer
from selfspec.models.skeleton import ModelFacts, Skeleton, context_of, decoder_part, ends_of, read_identity

Forwards = Mapping[nn.Module, Callable[..., Any]]
"""Functions that run in place of modules' own forwards."""

_ATTENTION = re.compile(r"(self_?|linear_|rel_)?att(entio)?n?|self_attention|multi_head_attention")
_MIXER = re.compile(r"mamba|mixer|(short_)?conv|temporal_block|mlstm_layer")  # what stands where others have attention
_MLP = re.compile(r"mlp|mlp_block|ffn?|feed_?forward|moe|block_sparse_moe|sparse_moe_block")


class Absent(nn.Identity):
    """Stands for a sub-layer that is no module of its own, and so can be neither skipped nor observed."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A model's decoder layers, and the attention (or recurrent mixer) and the MLP module of each, perhaps `Absent`."""

    layers: tuple[nn.Module, ...]
    attention: tuple[nn.Module, ...]
    mlp: tuple[nn.Module, ...]


def find_structure(model: Any) -> Structure:
    """Find a model's structure by module names: the layers with most sub-layers, and the first of these.

    Raises `UnsupportedModelError` if there is no list of layers, or if no sub-layer is a module of its own.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"model {type(model).__name__}: expected a model that transformers has loaded")
    config = decoder_part(getattr(model, "config", None))
    counts = {getattr(config, name, None) for name in ("num_hidden_layers", "num_layers")} - {None}
    found: list[Structure] = []
    for _, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) in counts and len(module):
            mixers = tuple(_child(layer, _ATTENTION) or _child(layer, _MIXER) or Absent() for layer in module)
            mlps = tuple(_child(layer, _MLP) or Absent() for layer in module)
            found.append(Structure(tuple(module), mixers, mlps))
    best = max(found, key=_modules, default=None)
    if best is None or not _modules(best):
        kind = getattr(getattr(model, "config", None), "model_type", None)
        raise UnsupportedModelError(
            f"{type(model).__name__} (model_type {kind!r}) is not supported: no layers with an attention or MLP module "
            f"were found; supported are {', '.join(FAMILIES)}, and models with such layers"
        )
    return best


def _modules(structure: Structure) -> int:
    return sum(not isinstance(part, Absent) for part in (*structure.attention, *structure.mlp))


def _child(layer: nn.Module, name: re.Pattern[str]) -> nn.Module | None:
    named = ((own, child) for own, child in layer.named_children() if not isinstance(child, nn.ModuleList))
    return next((child for own, child in named if name.fullmatch(own)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline(ModelFacts):
    """The properties of a `Skeleton` that are known for a model that runs through its own forward.

    `quantizer` makes quantised sub-layers and heads. `parts`, `blocks`, `norms` and `gain` raise
    `UnsupportedModelError`, as its other modules are unknown.
    """

    embed: Callable[[Tensor], Tensor]
    name: str
    quantizer: WeightQuantizer

    def refresh(self) -> None:
        """Do nothing, as no copies of weights are kept."""

    def head_over(self, tokens: Sequence[int]) -> None:
        """Return None, as the model's own head computes all logits."""

    @property
    def parts(self) -> Any:
        """The model's modules. Raises `UnsupportedModelError`, as they are unknown."""
        raise UnsupportedModelError(
            f"{self.name} runs through its own forward, without access to its modules; expected {', '.join(FAMILIES)}"
        )

    blocks = norms = gain = parts


ModelOutline = Skeleton | Outline
"""The sizes, identity and modules of a model, as far as they are known."""


def read_outline(model: Any, kv_heads: int, head_dim: int, quantizer: WeightQuantizer) -> Outline:
    """Return the outline of a model of any family; its cached keys are `[B, kv_heads, n, head_dim]`."""
    config, embedding = decoder_part(model.config), model.get_input_embeddings()
    context, limit = context_of(config, any_rope=True)
    identity = read_identity(config)
    hidden = embedding.weight.shape[1] if identity.hidden is None else identity.hidden
    sizes = hidden, identity.intermediate or 4 * hidden, identity.heads or kv_heads, kv_heads, head_dim
    return Outline(
        embed=embedding,
        identity=identity,
        sizes=Sizes(*sizes, 1e-6, embedding.weight.dtype),
        context=context,
        context_reason=limit,
        ends=ends_of(model),
        device=device_of(embedding),
        name=f"{type(model).__name__} (model_type {model.config.model_type!r})",
        quantizer=quantizer,
    )
