"""The configuration of a GGUF file's model, from llama.cpp's keys and from which tensors the file holds.

The reader of `transformers` leaves out RoPE scaling, sliding windows, logit soft caps, multipliers and more. A key that
a file lacks has llama.cpp's default for the architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.basics.errors import SelfspecError, short
from selfspec.models.gguf_header import Header, Tensor
from selfspec.types.methods import MOST_LAYERS

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_ORIGINAL = "rope.scaling.original_context_length"
_LARGEST = 1e15  # largest number of a header's RoPE entries
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}


def rope_parameters(path: Path, header: Header) -> dict[str, Any]:
    """Return a model's RoPE base and scaling, as the `rope_parameters` of its `transformers` configuration.

    Raises `SelfspecError` if the scaling is unknown or invalid.
    """
    return {"rope_theta": number(path, header, "rope.freq_base", 10_000.0), **_scaling(path, header)}


def number(path: Path, header: Header, key: str, default: float | None = None) -> float:
    """Return the positive number that the header has for an architecture's `key`; without one, `default`.

    Raises `SelfspecError` for any other value, and for a missing one if `default` is None.
    """
    value = header.arch_value(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
        raise SelfspecError(f"{path}: {key} {short(value)}; expected a number above 0")
    return value


def _scaling(path: Path, header: Header) -> dict[str, Any]:
    if "rope_factors_long.weight" in header.tensors:
        return _longrope(path, header)
    kind = header.arch_value("rope.scaling.type")
    if "rope_freqs.weight" in header.tensors:
        return _llama3(path, header)
    if kind in (None, "none"):
        return {"rope_type": "default"}
    original = header.arch_value(_ORIGINAL)
    if kind not in ("linear", "yarn") or (kind == "yarn" and not original):
        raise SelfspecError(f"{path}: rope scaling {short(kind)} is not supported in GGUF files")
    rope: dict[str, Any] = {"rope_type": kind, "factor": number(path, header, "rope.scaling.factor")}
    if original:
        rope["original_max_position_embeddings"] = int(number(path, header, _ORIGINAL))
    if kind == "yarn":
        keys = {key: name for key, name in YARN.items() if header.arch_value(key) is not None}
        rope |= {name: number(path, header, key) for key, name in keys.items()}
        if (times := number(path, header, "rope.scaling.attn_factor", 1.0)) != 1:
            rope["attention_factor"] = times * (1 + 0.1 * math.log(rope["factor"]))
    return rope


def _longrope(path: Path, header: Header) -> dict[str, Any]:
    """Return Phi-3's RoPE scaling, with a divisor for each frequency, of short and of long texts."""
    original = int(number(path, header, _ORIGINAL))
    rope = {
        "rope_type": "longrope",
        "short_factor": _divisors(header.tensors.get("rope_factors_short.weight"), path),
        "long_factor": _divisors(header.tensors["rope_factors_long.weight"], path),
        "original_max_position_embeddings": original,
        "factor": number(path, header, "context_length") / original,
    }
    if header.arch_value("rope.scaling.attn_factor") is not None:
        rope["attention_factor"] = number(path, header, "rope.scaling.attn_factor")
    return rope


def _divisors(tensor: Tensor | None, path: Path) -> list[float]:
    """Return the divisors `[d / 2]` of RoPE's frequencies that a tensor holds. Raises `SelfspecError` for others."""
    import numpy as np

    if tensor is not None and tensor.type == 0 and len(tensor.shape) == 1 and tensor.shape[0]:
        divisors = np.fromfile(tensor.path, dtype="<f4", count=tensor.shape[0], offset=tensor.start)
        if np.all(np.isfinite(divisors) & (divisors > 0)):
            return [float(divisor) for divisor in divisors]
    raise SelfspecError(f"{path}: unknown rope frequencies; expected numbers above 0 in float32")


def _llama3(path: Path, header: Header) -> dict[str, Any]:
    """Return Llama 3.1's RoPE scaling from the frequency divisors `[d / 2]`, which are all that the file holds."""
    import numpy as np

    divisors = np.array(_divisors(header.tensors["rope_freqs.weight"], path))
    if np.all(divisors == 1):
        return {"rope_type": "default"}
    base = number(path, header, "rope.freq_base", 10_000.0)
    lengths = 2 * np.pi * base ** (np.arange(len(divisors)) / len(divisors))  # wavelengths in positions
    factor = float(np.round(divisors.max(), 3))
    original, high, low = (
        _LLAMA3[name] for name in ("original_max_position_embeddings", "high_freq_factor", "low_freq_factor")
    )
    share = np.clip((original / lengths - low) / (high - low), 0, 1)  # weight of the unscaled frequency
    if not np.allclose(divisors, 1 / ((1 - share) / factor + share), rtol=1e-3):
        raise SelfspecError(f"{path}: unknown rope frequencies in 'rope_freqs.weight'; expected Llama 3.1's")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


Entries = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF file's header, and its path for messages."""

    path: Path
    header: Header

    def number(self, key: str, default: float | None = None) -> float:
        """Return the positive number of an architecture's `key`, as the function `number` does."""
        return number(self.path, self.header, key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return `number(key, default)` as an int. Raises `SelfspecError` if it is not whole."""
        value = self.number(key, default)
        if value != int(value):
            raise SelfspecError(f"{self.path}: {key} {short(value)}; expected an integer above 0")
        return int(value)

    def has(self, tensor: str) -> bool:
        """Return whether the file holds the tensor `blk.0.{tensor}` of the first layer."""
        return f"blk.0.{tensor}" in self.header.tensors

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.integer("block_count")

    @property
    def head_dim(self) -> int:
        """The width of an attention head."""
        width = self.integer("embedding_length") // self.integer("attention.head_count")
        return self.integer("attention.key_length", width)

    def windows(self, period: int, default: int | None = None) -> Entries:
        """Return the entries for a sliding window, in tokens, which all layers but every `period`-th have."""
        kinds = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(self.layers)]
        return {"sliding_window": self.integer("attention.sliding_window", default), "layer_types": kinds}


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of GGUF files: the `model_type` in `transformers`, and how its files differ from Llama's.

    `entries`: further entries of the configuration. `paired`: RoPE rotates neighbours, so the rows of queries and keys
    are reordered in the file. `norm_plus`: what the file's norm weights exceed those of `transformers` by. `experts`:
    whether a mixture of experts takes the place of MLPs. `eps`: the key of the norms' epsilon, and its name.
    """

    model_type: str
    entries: Callable[[Source], Entries]
    paired: bool = False
    norm_plus: float = 0.0
    experts: bool = False
    eps: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")


def _llama(source: Source) -> Entries:
    whole = source.integer("rope.dimension_count", source.head_dim) == source.head_dim
    if not whole:
        raise SelfspecError(f"{source.path}: RoPE over a part of each head; expected all of it")
    return {
        "head_dim": source.head_dim,
        "attention_bias": source.has("attn_q.bias"),
        "mlp_bias": source.has("ffn_down.bias"),
    }


def _granite(source: Source) -> Entries:
    return {name: entry for name, entry in _llama(source).items() if name != "head_dim"} | {
        "embedding_multiplier": source.number("embedding_scale", 1.0),
        "residual_multiplier": source.number("residual_scale", 1.0),
        "attention_multiplier": source.number("attention.scale", source.head_dim**-0.5),
        "logits_scaling": source.number("logit_scale", 1.0),
    }


def _qwen3(source: Source) -> Entries:
    return {"head_dim": source.head_dim, "attention_bias": source.has("attn_q.bias")}


def _qwen3moe(source: Source) -> Entries:
    return _qwen3(source) | {
        "num_experts": source.integer("expert_count"),
        "num_experts_per_tok": source.integer("expert_used_count"),
        "moe_intermediate_size": source.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma(source: Source, large: int) -> Entries:
    """Return the entries of both Gemmas; the model of `large` layers scales scores by its width for each head."""
    heads, width = source.integer("attention.head_count"), source.integer("embedding_length")
    scale = source.number("attention.scale", (width / heads if source.layers == large else source.head_dim) ** -0.5)
    caps = {
        f"{name}_logit_softcapping": source.number(key, 0.1)
        for name in ("attn", "final")
        if source.header.arch_value(key := f"{name}_logit_softcapping") is not None
    }
    return {"head_dim": source.head_dim, "query_pre_attn_scalar": round(scale**-2), **caps}


def _gemma2(source: Source) -> Entries:
    return source.windows(2, 4096) | _gemma(source, 46)


def _gemma3(source: Source) -> Entries:
    local = {"rope_type": "default", "rope_theta": source.number("rope.freq_base_swa", 10_000.0)}
    whole = {"rope_theta": source.number("rope.freq_base", 1_000_000.0)}
    ropes = {"full_attention": rope_parameters(source.path, source.header) | whole, "sliding_attention": local}
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    return source.windows(6, 1024) | caps | _gemma(source, 62) | {"rope_parameters": ropes}


def _partial(source: Source) -> Entries:
    rope = rope_parameters(source.path, source.header)
    return {
        "rope_parameters": rope | {"partial_rotary_factor": source.integer("rope.dimension_count") / source.head_dim}
    }


def _phi3(source: Source) -> Entries:
    if not source.has("attn_qkv.weight"):
        raise SelfspecError(f"{source.path}: no tensor blk.0.attn_qkv.weight; expected fused queries, keys and values")
    made = _partial(source) | {"sliding_window": source.header.arch_value("attention.sliding_window") or None}
    original = made["rope_parameters"].get("original_max_position_embeddings")
    return made if original is None else made | {"original_max_position_embeddings": original}


def _starcoder2(source: Source) -> Entries:
    window = source.header.arch_value("attention.sliding_window")
    return {"use_bias": source.has("attn_q.bias"), "sliding_window": window or None}


def _stablelm(source: Source) -> Entries:
    return _partial(source) | {
        "use_qkv_bias": source.has("attn_q.bias"),
        "qk_layernorm": source.has("attn_q_norm.weight"),
        "use_parallel_residual": not source.has("ffn_norm.weight"),
    }


def _olmo2(source: Source) -> Entries:
    if source.header.arch_value("attention.sliding_window"):
        raise SelfspecError(f"{source.path}: an OLMo 3 model; supported in GGUF files: OLMo 2")
    return {"attention_bias": source.has("attn_q.bias")}


def _gpt_oss(source: Source) -> Entries:
    rope = rope_parameters(source.path, source.header)
    return source.windows(2) | {
        "head_dim": source.head_dim,
        "attention_bias": source.has("attn_q.bias"),
        "num_local_experts": source.integer("expert_count"),
        "num_experts_per_tok": source.integer("expert_used_count"),
        "intermediate_size": source.integer("expert_feed_forward_length"),
        "rope_parameters": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
    }


_LAYER_NORM = "attention.layer_norm_epsilon"
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _llama, paired=True),  # Mistral's files say llama
    "qwen2": Architecture("qwen2", lambda _: {}),
    "qwen3": Architecture("qwen3", _qwen3),
    "gemma2": Architecture("gemma2", _gemma2, norm_plus=1.0),
    "gemma3": Architecture("gemma3_text", _gemma3, norm_plus=1.0),
    "phi3": Architecture("phi3", _phi3),
    "qwen3moe": Architecture("qwen3_moe", _qwen3moe, experts=True),
    "starcoder2": Architecture("starcoder2", _starcoder2, eps=(_LAYER_NORM, "norm_epsilon")),
    "stablelm": Architecture("stablelm", _stablelm, eps=(_LAYER_NORM, "layer_norm_eps")),
    "granite": Architecture("granite", _granite, paired=True),
    "olmo2": Architecture("olmo2", _olmo2),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, experts=True),
}


def check_header(path: Path, header: Header) -> Architecture:
    """Return the architecture of a file. Raises `SelfspecError` if it is not that of a supported language model."""
    architecture = ARCHITECTURES.get(header.architecture)
    if architecture is None:
        raise SelfspecError(
            f"{path}: a model of architecture '{header.architecture}'; supported in GGUF files: "
            f"{', '.join(ARCHITECTURES)} (Mistral's files say llama)"
        )
    if header.arch_value("expert_count") and not architecture.experts:
        raise SelfspecError(
            f"{path}: a mixture of experts of architecture '{header.architecture}', not supported in GGUF files"
        )
    if "tokenizer.ggml.tokens" not in header.metadata:
        raise SelfspecError(f"{path}: no tokenizer in the file; expected the GGUF file of a language model")
    layers = header.arch_value("block_count")
    if type(layers) is not int or not 0 < layers <= MOST_LAYERS:
        raise SelfspecError(f"{path}: {short(layers)} layers; expected 1 to {MOST_LAYERS}")
    rope_parameters(path, header)
    return architecture


def read_config(path: Path, header: Header) -> PretrainedConfig:
    """Return the configuration of a file's model. Raises `SelfspecError` if the file does not describe one."""
    from transformers import AutoConfig

    architecture, source = check_header(path, header), Source(path, header)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise SelfspecError(f"{path}: no matrix token_embd.weight; expected the GGUF file of a language model")
    heads = source.integer("attention.head_count")
    key, eps = architecture.eps
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    entries: Entries = {
        "vocab_size": embedding.shape[1],
        "hidden_size": source.integer("embedding_length"),
        "num_hidden_layers": source.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": source.integer("attention.head_count_kv", heads),
        "intermediate_size": source.integer("feed_forward_length", 1 if architecture.experts else None),
        "max_position_embeddings": source.integer("context_length"),
        eps: source.number(key),
        "rope_parameters": rope_parameters(path, header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **{name: header.metadata.get(f"tokenizer.ggml.{short_name}_token_id") for name, short_name in names.items()},
    }
    return AutoConfig.for_model(architecture.model_type, **(entries | architecture.entries(source)))
