"""Writers of GGUF files: of LLaMA-like models with a type for each matrix, and of EAGLE-3 heads.

Formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and llama.cpp's `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers import LlamaConfig

from selfspec.basics.errors import SelfspecError
from selfspec.export.gguf_tokenizer import Key
from selfspec.export.head_export import HeadFiles
from selfspec.export.weights import Weights
from selfspec.models.gguf_config import YARN

TYPES = ("f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1")
GROUP = 32  # group size: consecutive weights of a row that share a scale
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_DTYPES = {torch.float16: Type.F16, torch.bfloat16: Type.BF16}


def check_type(name: str | None) -> None:
    """Raise `SelfspecError` unless the type's name is among `TYPES` or None."""
    if name is not None and name.lower() not in TYPES:
        raise SelfspecError(f"--type {name}: expected one of {', '.join(TYPES)}")


def type_of(name: str | None, dtype: torch.dtype) -> Type:
    """Return the GGUF type called `name`; if that is None, the type that corresponds to `dtype`."""
    return _DTYPES.get(dtype, Type.F32) if name is None else Type[name.upper()]


def write_model(
    path: Path, weights: Weights, words: Sequence[Key], types: Callable[[str], Type], *, context: int, name: str
) -> list[str]:
    """Write a model as a GGUF file; return the modules stored as F16 because their rows do not divide into groups.

    `words`: the keys of the tokenizer. `types(module)`: the GGUF type of a module's matrix, by `transformers`' name of
    the module. `context`: the model's context length in tokens. `name`: the model's name in the file. Raises
    `SelfspecError` for a RoPE scaling that GGUF has no name for.
    """
    config, llama = weights.config, weights.config.model_type != "qwen2"
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    f16_modules: list[str] = []

    def gguf_tensor(full: str, tensor: Tensor) -> tuple[str, Tensor, Type]:
        module, _, suffix = full.rpartition(".")
        own, kind = module.rpartition(".")[2], _stored_type(tensor, types(module))
        if tensor.ndim > 1 and kind != types(module):
            f16_modules.append(module)
        return (
            f"{module_name(module)}.{suffix}",
            permute_rope_rows(tensor, heads[own]) if llama and own in heads else tensor,
            kind,
        )

    tensors = [gguf_tensor(full, tensor) for full, tensor in weights.tensors.items()]
    if (divisors := rope_divisors(config)) is not None:
        tensors.append(("rope_freqs.weight", divisors, Type.F32))
    architecture = _ARCHITECTURES[config.model_type]
    write(path, architecture, [*model_keys(architecture, config, context, name), *words], tensors)
    return f16_modules


def _stored_type(tensor: Tensor, kind: Type) -> Type:
    """Return the type in which a tensor is stored: `kind`, but F32 for a vector and F16 if rows do not fit groups."""
    if tensor.ndim == 1:
        return Type.F32
    return Type.F16 if kind not in (Type.F32, Type.F16, Type.BF16) and tensor.shape[-1] % GROUP else kind


def fake_quantize(weights: Weights, types: Callable[[str], Type]) -> Weights:
    """Return the weights quantised to the GGUF types by module and dequantised to each tensor's dtype."""
    tensors = {}
    for name, tensor in weights.tensors.items():
        kind = _stored_type(tensor, types(name.rpartition(".")[0]))
        values = gguf.quants.dequantize(_as(tensor, kind), kind)
        tensors[name] = torch.from_numpy(values.astype(np.float32)).reshape(tensor.shape).to(tensor.dtype)
    return Weights(weights.config, tensors, weights.layers, weights.zeroed)


def write(path: Path, architecture: str, keys: Sequence[Key], tensors: Sequence[tuple[str, Tensor, Type]]) -> None:
    """Write a GGUF file of keys, and of tensors as (name, tensor, type); converts one tensor at a time."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value, kind, inner in keys:
        writer.add_key_value(key, value, kind, inner)
    for name, tensor, kind in tensors:
        rows, width = tensor.shape[:-1], tensor.shape[-1]
        group, size = gguf.GGML_QUANT_SIZES[kind]
        plain = {Type.F32: np.float32, Type.F16: np.float16, Type.I64: np.int64}.get(kind)
        shape = (*rows, width if plain else width // group * size)
        dtype = np.dtype(plain or np.uint8)
        writer.add_tensor_info(name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor, kind in tensors:
        writer.write_tensor_data(_as(tensor, kind))
    writer.close()


def _as(tensor: Tensor, kind: Type) -> np.ndarray[Any, Any]:
    """Return the values of a tensor converted to a GGUF type, as the array to write."""
    if kind == Type.I64:
        integers: np.ndarray[Any, Any] = tensor.cpu().numpy()
        return integers
    values: np.ndarray[Any, Any] = gguf.quants.quantize(tensor.detach().cpu().float().contiguous().numpy(), kind)
    return values


def model_keys(architecture: str, config: Any, context: int, name: str) -> list[Key]:
    """Return the GGUF keys that describe the model; the tokenizer's keys are separate.

    Raises `SelfspecError` for a RoPE scaling that GGUF has no name for.
    """
    integer, number, text = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.STRING
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = dict(config.rope_parameters or {})
    kind = rope.get("rope_type", "default")
    arch = architecture
    keys: list[Key] = [
        ("general.name", name, text, None),
        (f"{arch}.context_length", context, integer, None),
        (f"{arch}.embedding_length", config.hidden_size, integer, None),
        (f"{arch}.block_count", config.num_hidden_layers, integer, None),
        (f"{arch}.feed_forward_length", config.intermediate_size, integer, None),
        (f"{arch}.attention.head_count", config.num_attention_heads, integer, None),
        (f"{arch}.attention.head_count_kv", config.num_key_value_heads, integer, None),
        (f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps, number, None),
        (f"{arch}.rope.freq_base", float(rope.get("rope_theta", 10_000.0)), number, None),
        (f"{arch}.rope.dimension_count", head, integer, None),
        (f"{arch}.vocab_size", config.vocab_size, integer, None),
    ]
    if head * config.num_attention_heads != config.hidden_size:
        keys += [(f"{arch}.attention.{which}_length", head, integer, None) for which in ("key", "value")]
    if kind in ("linear", "yarn"):
        keys += [
            (f"{arch}.rope.scaling.type", kind, text, None),
            (f"{arch}.rope.scaling.factor", float(rope["factor"]), number, None),
        ]
        if original := rope.get("original_max_position_embeddings"):
            keys.append((f"{arch}.rope.scaling.original_context_length", int(original), integer, None))
        if kind == "yarn":
            keys += [(f"{arch}.{key}", float(rope[own]), number, None) for key, own in YARN.items() if own in rope]
            if (scale := rope.get("attention_factor")) is not None:  # llama.cpp multiplies by the usual one
                times = float(scale) / (1 + 0.1 * math.log(float(rope["factor"])))
                keys.append((f"{arch}.rope.scaling.attn_factor", times, number, None))
    elif kind not in ("default", "llama3", "dynamic"):
        raise SelfspecError(f"RoPE of type '{kind}' cannot be written as GGUF")
    return keys


def rope_divisors(config: Any) -> Tensor | None:
    """Return the divisors `[d / 2]` of RoPE's frequencies by Llama 3.1's scaling; None for any other RoPE."""
    rope: Mapping[str, Any] = config.rope_parameters or {}
    if rope.get("rope_type") != "llama3":
        return None
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    base, factor = float(rope["rope_theta"]), float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    lengths = 2 * np.pi * base ** (np.arange(0, head, 2) / head)  # wavelengths, in positions
    share = np.clip((rope["original_max_position_embeddings"] / lengths - low) / (high - low), 0, 1)
    return torch.from_numpy((1 / ((1 - share) / factor + share)).astype(np.float32))


def module_name(module: str) -> str:
    """Return llama.cpp's name of a module, given the `transformers` name."""
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}"
    return NAMES[module]


def permute_rope_rows(tensor: Tensor, heads: int) -> Tensor:
    """Reorder rows `[H * d, ...]` for llama.cpp's RoPE: rotated pairs are adjacent instead of half a head apart."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


_ARCHITECTURE = "eagle3"
_OWN = {"fc": "fc", "norm": "output_norm", "lm_head": "output"}
_HIDDEN = "hidden_norm"


def write_eagle_3(path: Path, head: HeadFiles, words: Sequence[Key], *, width: int) -> None:
    """Write an EAGLE-3 head, with its matrices as F16 or BF16.

    `words`: the keys of the target's tokenizer. `width`: the target's hidden size.
    """
    config = _config(head)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = []
    for name, tensor in head.tensors.items():
        if name in ("d2t", "t2d"):
            continue
        module, _, suffix = name.rpartition(".")
        own = module.rpartition(".")[2]
        kind = Type.F32 if tensor.ndim == 1 else Type.F16 if tensor.dtype == torch.float16 else Type.BF16
        gguf_name = _OWN.get(module) or ("blk.0.attn_norm_2" if own == _HIDDEN else module_name(f"model.{module}"))
        tensors.append(
            (f"{gguf_name}.{suffix}", permute_rope_rows(tensor, heads[own]) if own in heads else tensor, kind)
        )
    offsets = head.tensors["d2t"]
    if len(offsets) < config.vocab_size:
        tensors.append(("d2t", offsets + torch.arange(len(offsets)), Type.I64))
    if (divisors := rope_divisors(config)) is not None:
        tensors.append(("rope_freqs.weight", divisors, Type.F32))
    context = int(config.max_position_embeddings)
    write(
        path,
        _ARCHITECTURE,
        [*model_keys(_ARCHITECTURE, config, context, "draft"), *_of_head(head, width), *words],
        tensors,
    )


def _config(head: HeadFiles) -> LlamaConfig:
    """Return the `transformers` configuration of the head's decoder layer, which is a LLaMA layer."""
    named: dict[str, Any] = {
        name: value for name, value in head.config.items() if name not in ("rope_theta", "rope_scaling")
    }
    rope = {"rope_type": "default", **head.config.get("rope_scaling", {}), "rope_theta": head.config["rope_theta"]}
    return LlamaConfig(**named, rope_parameters=rope)


def _of_head(head: HeadFiles, width: int) -> list[Key]:
    integer, flag = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.BOOL
    return [
        (f"{_ARCHITECTURE}.target_layers", list(head.layers), gguf.GGUFValueType.ARRAY, integer),
        (f"{_ARCHITECTURE}.target_hidden_size", width, integer, None),
        (f"{_ARCHITECTURE}.norm_before_residual", False, flag, None),
        (f"{_ARCHITECTURE}.norm_before_fc", False, flag, None),
    ]
