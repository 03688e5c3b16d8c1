"""GGUF files as models whose weights stay in memory with the bits that they have in the file.

Weights of `gguf_blocks.TYPES` stay quantised, and weights in 16 bits stay so with a C++ compiler; other weights are
dequantised to float32. Tensors are read one at a time from the mapped file, so no weight is in memory twice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selfspec.basics.errors import SelfspecError
from selfspec.models.families import parts_of
from selfspec.models.gguf import description
from selfspec.models.gguf_blocks import TYPES
from selfspec.models.gguf_header import Header, read_header
from selfspec.models.gguf_linear import BlockLinear, Stored, block_product, concat_weights
from selfspec.models.gguf_tensors import GGUFTensors
from selfspec.models.half_storage import HalfLinear, HalfProduct, nativise_model_
from selfspec.models.linears import Group
from selfspec.models.native_library import available
from selfspec.models.stored_linear import StoredEmbedding, save_tied_once

_log = logging.getLogger("selfspec")


def load_quantized_gguf(path: Path) -> Any:
    """Load a GGUF file's model, with weights of `TYPES` quantised as in the file and all other weights in float32.

    Raises `SelfspecError` if the file is not a supported model, and for weights of the IQ types.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(description(path)), trust_remote_code=False)
    header = read_header(path)
    _refuse_iq(path, header)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    file, parts = GGUFTensors(path, header, config), parts_of(model)
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = names[id(parts.embedding)], names[id(parts.head.module)]
    blocks = _stored(file, f"{embedding}.weight")
    if blocks is not None:
        owner, _, name = embedding.rpartition(".")
        setattr(
            model.get_submodule(owner), name, StoredEmbedding(blocks, getattr(parts.embedding, "embed_scale", None))
        )
    tied = not file.has(f"{head}.weight")
    for group in parts.groups():
        _keep(group, [_stored(file, f"{names[id(module)]}.weight") for module in group.modules], file, names)
    _keep(parts.head, [blocks if tied else _stored(file, f"{head}.weight")], file, names)
    made: dict[str, nn.Parameter] = {}  # by name, so that a head tied to the embedding shares its parameter
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if parameter.is_meta:
            owner, _, last = name.rpartition(".")
            source = f"{embedding}.weight" if tied and owner == head else name
            if source not in made:
                made[source] = nn.Parameter(file.read(source), requires_grad=False)
            setattr(model.get_submodule(owner), last, made[source])
    if available():
        nativise_model_(model, parts)
    else:
        save_tied_once(model)
    if file.others:
        kinds = ", ".join(f"{n} of type {kind}" for kind, n in sorted(file.others.items()))
        _log.warning("%s: dequantised to float32: %s; kept in quantised form: %s", path.name, kinds, ", ".join(TYPES))
    return model


def _refuse_iq(path: Path, header: Header) -> None:
    from gguf import GGMLQuantizationType

    kinds = {GGMLQuantizationType(tensor.type).name for tensor in header.tensors.values()}
    if iq := sorted(kind for kind in kinds if kind.startswith("IQ")):
        raise SelfspecError(
            f"{path}: weights of type {', '.join(iq)} cannot be kept quantised; expected {', '.join(TYPES)}, or "
            "--dtype auto, which dequantises them"
        )


def _stored(file: GGUFTensors, name: str) -> Stored | None:
    return file.stored(name, halves=available())


def _keep(group: Group, weights: Sequence[Stored | None], file: GGUFTensors, names: dict[int, str]) -> None:
    """Replace a group's linears by linears on the file's weights, fused if all can stay as in the file."""
    modules, blocks = group.modules, [weight for weight in weights if weight is not None]
    if len(modules) > 1 and (len(blocks) < len(modules) or len({module.bias is None for module in modules}) > 1):
        for name, weight in zip(group.names, weights, strict=True):
            _keep(Group(group.parent, (name,)), [weight], file, names)
        return
    if not blocks:
        return
    biases = [file.read(f"{names[id(module)]}.bias") for module in modules if module.bias is not None]
    fused, start = block_product(concat_weights(blocks), torch.cat(biases) if biases else None), 0
    for name, module in zip(group.names, modules, strict=True):
        made = HalfLinear(fused, start, module) if isinstance(fused, HalfProduct) else BlockLinear(fused, start, module)
        setattr(group.parent, name, made)
        start += module.out_features
