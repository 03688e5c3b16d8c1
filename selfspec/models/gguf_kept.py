"""GGUF files as models whose weights stay quantised in memory exactly as in the file.

Weights of `TYPES`, which have blocks of 32 values and float16 scales, stay quantised; other weights are dequantised to
float32.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError
from selfspec.models.families import parts_of
from selfspec.models.gguf import check_gguf, description
from selfspec.models.gguf_header import Tensor as Described
from selfspec.models.gguf_linear import BLOCK, BlockLinear, GGUFWeight, block_product, concat_weights
from selfspec.models.half_storage import nativise_model_
from selfspec.models.linears import Group
from selfspec.models.native_library import available
from selfspec.models.stored_linear import StoredEmbedding, save_tied_once

TYPES = ("Q4_0", "Q4_1", "Q8_0")
_log = logging.getLogger("selfspec")


def load_quantized_gguf(path: Path) -> Any:
    """Load a GGUF file's model, with weights of `TYPES` quantised as in the file and all other weights in float32.

    Raises `SelfspecError` if the file is not a supported model.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(description(path)), trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    file, parts = _File(path, config), parts_of(model)
    names = {id(module): name for name, module in model.named_modules()}
    embedding = names[id(parts.embedding)]
    if (blocks := file.blocks(embedding)) is not None:
        owner, _, name = embedding.rpartition(".")
        setattr(model.get_submodule(owner), name, StoredEmbedding(blocks))
    file.share(names[id(parts.head.module)], embedding, blocks)
    for group in (*parts.groups(), parts.head):
        _keep(group, [names[id(module)] for module in group.modules], file)
    made: dict[str, nn.Parameter] = {}  # by tensor name, so that a head tied to the embedding shares its parameter
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if parameter.is_meta:
            owner, _, last = name.rpartition(".")
            if (source_name := file.name_of(name)) not in made:
                made[source_name] = nn.Parameter(file.dequantised(name), requires_grad=False)
            setattr(model.get_submodule(owner), last, made[source_name])
    if available():
        nativise_model_(model, parts)
    else:
        save_tied_once(model)
    file.report()
    return model


def _keep(group: Group, names: Sequence[str], file: _File) -> None:
    """Replace a group's linears by `BlockLinear`s on the file's weights, fused if all have the same bits."""
    modules, weights = group.modules, [file.blocks(name) for name in names]
    bits = {None if blocks is None else blocks.bits for blocks in weights}
    if len(modules) > 1 and (len(bits) > 1 or len({module.bias is None for module in modules}) > 1):
        for name, module_name in zip(group.names, names, strict=True):
            _keep(Group(group.parent, (name,)), [module_name], file)
        return
    quantized = [blocks for blocks in weights if blocks is not None]
    if not quantized:
        return
    biases = [file.dequantised(f"{n}.bias") for n, m in zip(names, modules, strict=True) if m.bias is not None]
    fused, start = block_product(concat_weights(quantized), torch.cat(biases) if biases else None), 0
    for name, module in zip(group.names, modules, strict=True):
        setattr(group.parent, name, BlockLinear(fused, start, module))
        start += module.out_features


class _File:
    """A GGUF file's tensors under their names in `transformers`."""

    def __init__(self, path: Path, config: Any) -> None:
        import gguf

        self._gguf, self._path, self._config = gguf, path, config
        self._header = check_gguf(path)
        arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == self._header.architecture)
        self._names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
        self._data = np.memmap(path, np.uint8, "r")
        self._cached_weights: dict[str, GGUFWeight] = {}
        self._same: dict[str, str] = {}
        self._others: Counter[str] = Counter()

    def share(self, head: str, embedding: str, blocks: GGUFWeight | None) -> None:
        """Tie the head to the embedding's weight if the file has no weight for the head."""
        if self._described(f"{head}.weight") is None:
            self._same[f"{head}.weight"] = f"{embedding}.weight"
            if blocks is not None:
                self._cached_weights[head] = blocks

    def blocks(self, module: str) -> GGUFWeight | None:
        """Return the quantised weight of a linear or an embedding; None if its type is not one of `TYPES`."""
        if module in self._cached_weights:
            return self._cached_weights[module]
        tensor = self._required_tensor(self.name_of(f"{module}.weight"))
        into, out = tensor.shape
        kind = self._gguf.GGMLQuantizationType(tensor.type).name
        if kind not in TYPES or into % BLOCK:
            return None
        raw = self._rows(tensor).reshape(out, into // BLOCK, -1)
        numbers = 2 if kind == "Q4_1" else 1
        grid = torch.from_numpy(np.ascontiguousarray(raw[..., : 2 * numbers]).view(np.float16))
        values = torch.from_numpy(np.ascontiguousarray(raw[..., 2 * numbers :])).view(out, -1)
        if kind == "Q4_0":  # (value - 8) * scale
            grid = torch.cat([grid, -8 * grid], -1)
        weight = GGUFWeight(4, values, grid) if kind != "Q8_0" else GGUFWeight(8, values.view(torch.int8), grid)
        order = self._order(module, out)
        return weight if order is None else weight.rows(order)

    def name_of(self, name: str) -> str:
        """Return the name of the parameter that the parameter `name` is tied to, else `name` itself."""
        return self._same.get(name, name)

    def dequantised(self, name: str) -> Tensor:
        """Return a parameter of any type in float32. Raises `SelfspecError` if the file has no parameter `name`."""
        tensor = self._required_tensor(self.name_of(name))
        kind = self._gguf.GGMLQuantizationType(tensor.type)
        if len(tensor.shape) > 1:
            self._others[kind.name] += 1
        values = np.array(self._gguf.quants.dequantize(self._rows(tensor), kind), dtype=np.float32)
        parameter = torch.from_numpy(values).view(*reversed(tensor.shape))
        order = self._order(name.rpartition(".")[0], len(parameter))
        return parameter if order is None else parameter[order]

    def report(self) -> None:
        """Log which weights were dequantised, by type."""
        if self._others:
            kinds = ", ".join(f"{n} of type {kind}" for kind, n in sorted(self._others.items()))
            _log.warning(
                "%s: dequantised to float32: %s; kept in quantised form: %s", self._path.name, kinds, ", ".join(TYPES)
            )

    def _order(self, module: str, out: int) -> Tensor | None:
        """Return a linear's row order, as llama files interleave the RoPE halves of q and k heads; None: as stored."""
        last = module.rpartition(".")[2]
        if self._header.architecture != "llama" or last not in ("q_proj", "k_proj"):
            return None
        heads = self._config.num_attention_heads if last == "q_proj" else self._config.num_key_value_heads
        return torch.arange(out).view(heads, -1, 2).transpose(1, 2).reshape(-1)

    def _required_tensor(self, name: str) -> Described:
        tensor = self._described(name)
        if tensor is None:
            raise SelfspecError(f"{self._path}: holds no tensor for {name}")
        return tensor

    def _described(self, name: str) -> Described | None:
        module, _, suffix = name.rpartition(".")
        known = self._names.get_name(module)
        return None if known is None else self._header.tensors.get(f"{known}.{suffix}")

    def _rows(self, tensor: Described) -> Any:
        """Return a tensor's raw bytes `[out, bytes]`."""
        values, size = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(tensor.type)]
        into, *more = tensor.shape
        out = int(np.prod(more))
        row = into // values * size
        return self._data[tensor.start : tensor.start + out * row].reshape(out, row)
