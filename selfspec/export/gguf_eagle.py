"""A writer of EAGLE-3 heads as GGUF files of llama.cpp's architecture `eagle3`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from transformers import LlamaConfig

from selfspec.export.gguf_files import model_keys, module_name, permute_rope_rows, rope_divisors, write
from selfspec.export.gguf_tokenizer import Key
from selfspec.export.head_export import HeadFiles

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
