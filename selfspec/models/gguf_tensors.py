"""The tensors of a GGUF file, read one at a time from the mapped file, under their names in `transformers`."""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.models.gguf_blocks import TYPES, Bytes
from selfspec.models.gguf_config import ARCHITECTURES
from selfspec.models.gguf_header import Header
from selfspec.models.gguf_header import Tensor as Described
from selfspec.models.gguf_linear import GGUFWeight, Stored
from selfspec.models.half_storage import HalfWeight

_HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}
_EXPERTS = re.compile(r"(.*\.mlp)\.experts\.gate_up_proj(_bias)?")
_HEAD_NORMS = re.compile(r"(.*\.[qk]_layernorm)\.norms\.([0-9]+)\.weight")


class GGUFTensors:
    """A GGUF file's tensors by the parameters' names in `transformers`, without what llama.cpp's converter changes.

    `others` counts the matrices that were dequantised, by type.
    """

    def __init__(self, path: Path, header: Header, config: Any) -> None:
        import gguf

        self._gguf, self._path, self._header, self._config = gguf, path, header, config
        self._architecture = ARCHITECTURES[header.architecture]
        arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture)
        self._names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
        self.others: Counter[str] = Counter()

    def has(self, name: str) -> bool:
        """Return whether the file has a tensor for the parameter `name`."""
        return self._described(name) is not None

    def stored(self, name: str, *, halves: bool = True) -> Stored | None:
        """Return a matrix as the file stores it; None for types that cannot stay so.

        `halves`: whether matrices in 16 bits stay so.
        """
        tensor = self._required(name)
        kind = self._type(tensor).name
        rows, order = self._rows(tensor), self._order(name, tensor.shape[-1])
        if kind in TYPES:
            return GGUFWeight(TYPES[kind].layout, *TYPES[kind].read(rows, order))
        if kind not in _HALVES or not halves:
            return None
        weight = torch.from_numpy(np.array(rows)).view(_HALVES[kind])
        if not bool(weight.isfinite().all()):
            return None
        return HalfWeight(weight if order is None else weight[order])

    def read(self, name: str) -> Tensor:
        """Return a parameter in float32. Raises `SelfspecError` if it is missing or of an unknown type."""
        if (experts := _EXPERTS.fullmatch(name)) is not None:
            return self._gate_up(experts[1], "bias" if experts[2] else "weight")
        if (norms := _HEAD_NORMS.fullmatch(name)) is not None:
            return self._values(self._required(f"{norms[1]}.weight"))[int(norms[2])]
        tensor = self._required(name)
        parameter = self._values(tensor)
        if self._across and name.endswith("experts.down_proj"):
            return parameter.transpose(1, 2).contiguous()
        if self._architecture.norm_plus and name.endswith("norm.weight"):
            return parameter - self._architecture.norm_plus
        order = self._order(name, len(parameter))
        return parameter if order is None else parameter[order]

    @property
    def _across(self) -> bool:
        """Whether `transformers` stores an expert's weights as `[in, out]`, and its gates and ups alternately."""
        return self._architecture.model_type == "gpt_oss"

    def _gate_up(self, mlp: str, suffix: str) -> Tensor:
        """Return the experts' fused gate and up: `[experts, 2 * I, D]` or `[experts, D, 2 * I]`; biases without D."""
        gate, up = (self._values(self._required(f"{mlp}.experts.{part}_proj.{suffix}")) for part in ("gate", "up"))
        if not self._across:
            return torch.cat([gate, up], 1)
        both = torch.stack([gate, up], 2).flatten(1, 2)
        return both if suffix == "bias" else both.transpose(1, 2).contiguous()

    def _order(self, name: str, out: int) -> Tensor | None:
        """Return the row order of queries and keys if RoPE's halves of each head alternate in the file; else None."""
        last = name.split(".")[-2]
        if not self._architecture.paired or last not in ("q_proj", "k_proj"):
            return None
        heads = self._config.num_attention_heads if last == "q_proj" else self._config.num_key_value_heads
        return torch.arange(out).view(heads, -1, 2).transpose(1, 2).reshape(-1)

    def _required(self, name: str) -> Described:
        tensor = self._described(name)
        if tensor is None:
            raise SelfspecError(f"{self._path}: holds no tensor for {name}")
        return tensor

    def _described(self, name: str) -> Described | None:
        name = re.sub(r"(experts\.[a-z_]+_proj)(_bias)?$", lambda of: f"{of[1]}.{'bias' if of[2] else 'weight'}", name)
        name = f"{name}.weight" if name.endswith("sinks") else name
        module, _, suffix = name.rpartition(".")
        known = self._names.get_name(module)
        return None if known is None else self._header.tensors.get(f"{known}.{suffix}")

    def _values(self, tensor: Described) -> Tensor:
        """Return a tensor's values in float32."""
        kind = self._type(tensor)
        if len(tensor.shape) > 1 and kind.name != "F32":
            self.others[kind.name] += 1
        try:
            values = self._gguf.quants.dequantize(self._rows(tensor), kind)
        except NotImplementedError:
            raise SelfspecError(f"{tensor.path}: tensors of type {kind.name} are not supported") from None
        values = np.array(values, dtype=np.float32, copy=None if values.base is None else True)
        return torch.from_numpy(values).view(*reversed(tensor.shape))

    def _type(self, tensor: Described) -> Any:
        return self._gguf.GGMLQuantizationType(tensor.type)

    def _rows(self, tensor: Described) -> Bytes:
        """Return a tensor's raw bytes `[out, bytes]`, mapped until they are dropped: so memory holds one tensor's."""
        values, size = self._gguf.GGML_QUANT_SIZES[self._type(tensor)]
        into, *more = tensor.shape
        out, row = prod(more), into // values * size
        return np.memmap(tensor.path, np.uint8, "r", tensor.start, (out, row))
