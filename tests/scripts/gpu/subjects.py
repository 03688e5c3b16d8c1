"""The models and draft paths that parts measure."""

from __future__ import annotations

from typing import Any

import torch
from measuring import Part
from tape import Tape
from transformers import LlamaConfig, LlamaForCausalLM

import selfspec.runtime.forward
from selfspec.llm.llm import LLM, wrap
from selfspec.measure.model_copies import widen
from selfspec.models.kernels import BY_DEVICE, KERNELS
from selfspec.models.layout import join_all_
from selfspec.models.loading import load_model
from selfspec.runtime.base import Runtime
from selfspec.types.draft_path import DraftPath, Mode

CONTEXT = 8192  # positions of a widened model
SHAPES = {  # of the products of Llama 3 8B: outputs and inputs
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
}


def paths(layers: int) -> dict[str, DraftPath]:
    """Return the draft paths that are measured: every second MLP skipped, all int8, all int4 with the head in int8."""
    half: list[Mode] = ["full" if i < layers or i % 2 else "skip" for i in range(2 * layers)]
    return {
        "skip": DraftPath.from_modes(half),
        "int8": DraftPath.from_modes(["int8"] * (2 * layers), head="int8"),
        "int4": DraftPath.from_modes(["int4"] * (2 * layers), head="int8"),
    }


def as_on_cuda(part: Part) -> None:
    """In a rehearsal, let the CPU do as a GPU does.

    Passes are recorded and replayed, and quantised weights are multiplied by torch's weight-only products.
    """
    if part.toy:
        selfspec.runtime.forward.recorder_for = lambda model, skeleton: Tape()
        BY_DEVICE["cpu"] = {bits: {"weights only": KERNELS[bits]["weights only"]} for bits in (8, 4)}


def load_builtin(part: Part, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """Load the built-in model and its tokenizer, its weights joined as drafts have theirs."""
    name = str(dtype or part.dtype).removeprefix("torch.")
    model, tokenizer = load_model("builtin", device=str(part.device), dtype=name)
    join_all_(model)
    return model, tokenizer


def load_widened(part: Part, factor: int) -> LLM:
    """Widen the built-in model, which keeps its texts, and allocate the cache for all texts of the benchmark.

    A factor of 18 has 1.0 billion parameters, one of 48 has 7.2.
    """
    model, tokenizer = load_builtin(part)
    model.config.max_position_embeddings = CONTEXT
    wide = widen(model, 2 if part.toy else factor)
    join_all_(wide)
    llm = wrap(wide, tokenizer, profile="none", name=f"builtin, widened {factor} times")
    size_cache(llm.runtime, 1024)
    return llm


def random_llama(part: Part, *, positions: int, layers: int = 32) -> Any:
    """Return Llama 3 8B with random weights, joined as drafts have theirs, with `layers` of its layers."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes |= {"vocab_size": 128256, "num_hidden_layers": layers}
    if part.toy:
        sizes = {name: max(value // 64, 2) for name, value in sizes.items()} | {"num_attention_heads": 4}
    config = LlamaConfig(**sizes, max_position_embeddings=positions, rms_norm_eps=1e-5, rope_theta=500000.0)
    with part.device, torch.random.fork_rng(devices=[] if part.toy else [part.device]):
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(config, dtype=part.dtype).eval()
    join_all_(model)
    return model


def read_bytes(model: Any) -> int:
    """Return the bytes of the weights that a plain step reads."""
    return sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name)


def size_cache(runtime: Runtime, slots: int) -> None:
    """Allocate a runtime's cache once: when it grows, everything that was recorded is recorded anew."""
    with runtime.session(slots):
        pass


def parameters(model: Any) -> int:
    """Count a model's parameters."""
    return sum(p.numel() for p in model.parameters())
