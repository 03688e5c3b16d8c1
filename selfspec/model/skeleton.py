"""What the runtime needs of a `transformers` model of any family: its modules as callables, its sizes and limits.

They are read and checked once. What is not supported is refused by name. Knows nothing of caches, prompts and drafts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from selfspec.basics.errors import UnsupportedModelError
from selfspec.facts.identity import Identity
from selfspec.model.dispatch import check_hooks, check_places, containers, device_of, is_dense, weight_of
from selfspec.model.families import Parts, find_family
from selfspec.model.families.base import Block, Rotary
from selfspec.model.linears import Call, Moved
from selfspec.model.low_precision import Kernel
from selfspec.model.lowered import Lowered
from selfspec.model.norms import Norm, Norms
from selfspec.model.sizes import Sizes

ROPES = ("default", "linear", "llama3", "yarn")
# These recompute their frequencies from each call's longest position: fixed only up to the original length.
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model as the runtime sees it.

    `embed` turns token ids `[B, n]` into the residual stream `[B, n, D]`, `blocks` are its layers, `norm` and `head`
    make logits of its rows, `head_over` makes a head that computes some tokens' logits only, if its weight is at hand.
    `rotary` gives rope's cosines and sines, `scaling` multiplies the products of queries and keys. `context` is the
    number of positions that can be served, `limit` says why. `ends` are the tokens after which nothing is emitted.
    `device` is where tokens come in and logits go out. `norms` keeps the stream's norms up to date. `lowered` makes
    sub-layers and the head in few bits.
    """

    embed: Call
    blocks: tuple[Block, ...]
    norm: Norm
    head: Call
    head_over: Callable[[Sequence[int]], Call | None]
    rotary: Rotary
    scaling: float
    identity: Identity
    sizes: Sizes
    context: int
    limit: str
    ends: frozenset[int]
    device: torch.device
    norms: Norms
    lowered: Lowered

    def refresh(self) -> None:
        """Take over norms' weights that have been changed in place."""
        self.norms.refresh()


def read_skeleton(model: Any, *, kernel: Kernel | None = None) -> Skeleton:
    """Read a loaded `transformers` causal language model; `kernel` is `Lowered`'s.

    Raises `UnsupportedModelError`, naming what is not supported and what is.
    """
    config = getattr(model, "config", None)
    if hasattr(model, "get_base_model"):  # PEFT: its adapters are in the modules that are called
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"{type(model).__name__} with learnt prompts is not supported; merge or remove it"
            )
        model = model.get_base_model()
    family = find_family(config, type(model).__name__)
    assert config is not None
    context, limit = _context(config)
    parts = family.parts(model)
    inside = containers(model, parts.called())
    check_hooks(inside)
    check_places(model, [layer.module for layer in parts.layers], inside)
    norms = Norms(parts.eps)
    blocks = tuple(family.block(layer, norms) for layer in parts.layers)
    last = blocks[-1].device
    return Skeleton(
        embed=family.embed(parts),
        blocks=blocks,
        norm=norms.read(parts.norm, last),
        head=_brought(family.head(parts), parts, last),
        head_over=partial(family.head_over, parts),
        rotary=parts.rotary,
        scaling=parts.scaling,
        identity=read_identity(config).model_copy(update={"fingerprint": _fingerprint(parts)}),
        sizes=_sizes(config, parts),
        context=context,
        limit=limit,
        ends=_ends(model),
        device=device_of(parts.embedding),
        norms=norms,
        lowered=Lowered(family, parts, norms, kernel),
    )


def read_identity(config: Any) -> Identity:
    """What a configuration says of which model it is; the weights' fingerprint is left out."""
    return Identity(
        name=getattr(config, "_name_or_path", None) or None,
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
    )


def _sizes(config: Any, parts: Parts) -> Sizes:
    return Sizes(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=parts.head_dim,
        eps=parts.eps,
        dtype=parts.norm.weight.dtype,
    )


def _brought(head: Call, parts: Parts, stream: torch.device) -> Call:
    """The head as a callable on what the last norm gives of a stream on the device `stream`."""
    device = device_of(parts.head.module)
    if device == stream == device_of(parts.norm):
        return head
    return Moved(head, device)


def _context(config: Any) -> tuple[int, str]:
    """Positions that can be served, and the reason for the limit."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    context, limit = int(config.max_position_embeddings), "the model's context"
    if kind in LENGTH_DEPENDENT_ROPES:
        original = rope.get("original_max_position_embeddings") or context
        if original < context:
            context, limit = int(original), f"the original length of '{kind}' rope, beyond which keys would change"
    elif kind not in ROPES:
        supported = ", ".join((*ROPES, *LENGTH_DEPENDENT_ROPES))
        raise UnsupportedModelError(f"rope type '{kind}' is not supported; supported: {supported}")
    window = _window(config)
    if window is not None and window < context:
        context, limit = window, "the sliding window, within which attention is full"
    return context, limit


def _window(config: Any) -> int | None:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def _ends(model: Any) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    end = getattr(generation, "eos_token_id", None)
    return end_tokens(model.config.eos_token_id if end is None else end)


def end_tokens(ids: int | Iterable[int] | None) -> frozenset[int]:
    """The set of end tokens that a configuration writes as one, several, or none."""
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)


def _fingerprint(parts: Parts) -> str | None:
    """A hash of 64 values from each of three layers' first norm and last linear, rounded to bfloat16.

    None when a weight is quantised. Equal for a bfloat16 checkpoint loaded in any wider dtype.
    """
    layers = parts.layers
    digest = hashlib.sha256()
    for layer in (layers[0], layers[len(layers) // 2], layers[-1]):
        for module in (layer.norms[0], layer.groups[-1].modules[-1]):
            weight = None if getattr(module, "bits", None) else weight_of(module)
            if weight is None or not is_dense(weight) or not weight.is_floating_point():
                return None
            values = weight.detach().flatten()[:64].to("cpu", torch.bfloat16).view(torch.int16)
            digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]
