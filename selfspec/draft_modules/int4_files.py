"""Part files of int4 weights: for each group of linears its values, two in a byte, its scales and its zero points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError, short
from selfspec.draft_modules.module_files import PartFile, opened_part
from selfspec.models.low_precision import GROUPS, QuantizedWeight
from selfspec.runtime.base import Runtime

KIND = "int4"
_TENSORS = {"values": "U8", "scale": "BF16", "zero": "BF16"}  # a group's tensors, with their types in the file

GroupName = tuple[int, int]
"""A layer, and the index of a group of linears in `Layer.groups`."""


@dataclass(frozen=True, slots=True)
class Int4File:
    """The int4 weights in a part file, as `path_modules.Int4Weights`; a weight is read when it is asked for.

    `shapes`: for each group, its outputs, inputs and groups of inputs. `devices`: of each layer.
    """

    path: Path
    shapes: Mapping[GroupName, tuple[int, int, int]]
    devices: tuple[torch.device, ...]

    def get(self, layer: int, group: int) -> QuantizedWeight | None:
        """Return a group's weight, on the layer's device; None if the file has none.

        Raises `SelfspecError` if the file cannot be read any more, and for scales that are not finite.
        """
        if (layer, group) not in self.shapes:
            return None
        with opened_part(self.path) as (_, file):
            packed, scale, zero = (file.get_tensor(f"int4.{layer}.{group}.{name}") for name in _TENSORS)
        if not (bool(scale.isfinite().all()) and bool(zero.isfinite().all())):
            raise SelfspecError(f"{self.path}: scales of layer {layer} are not finite; make the file again")
        device = self.devices[layer]
        return QuantizedWeight(4, unpack(packed.to(device)), scale.to(device), zero.to(device))

    def bytes(self, layer: int, group: int) -> int | None:
        """Return the bytes of a group's weight; None if the file has none."""
        if (layer, group) not in self.shapes:
            return None
        out, into, groups = self.shapes[layer, group]
        return out * into // 2 + 4 * out * groups


def int4_tensors(layer: int, weights: Mapping[int, QuantizedWeight]) -> dict[str, Tensor]:
    """Return the tensors of a layer's int4 weights by their names in a part file; `weights`: by index of the group."""
    tensors: dict[str, Tensor] = {}
    for group, weight in weights.items():
        assert weight.zero is not None
        each = {"values": pack(weight.values), "scale": weight.scale, "zero": weight.zero}
        tensors |= {f"int4.{layer}.{group}.{name}": tensor.cpu() for name, tensor in each.items()}
    return tensors


def int4_part(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], runtime: Runtime) -> PartFile:
    """Return a part file of int4 weights for the runtime's model."""
    return PartFile(KIND, settings, tensors, runtime.skeleton.identity)


def open_int4(runtime: Runtime, path: Path) -> Int4File:
    """Open a part file of int4 weights, of which only the header is read.

    Raises `SelfspecError` for a file of another kind or model, and for wrong names, types or shapes of tensors.
    """
    quantizer = runtime.skeleton.quantizer
    with opened_part(path) as (part, file):
        part.check(KIND, runtime.skeleton.identity)
        found: dict[GroupName, dict[str, tuple[int, ...]]] = {}
        for name in file.keys():  # noqa: SIM118 (no mapping)
            kind, layer, group, what = _split(name)
            tensor = file.get_slice(name)
            if kind != KIND or _TENSORS.get(what) != tensor.get_dtype():
                raise SelfspecError(f"{path}: tensor {short(name)} is not one of int4 weights; make the file again")
            found.setdefault((layer, group), {})[what] = tuple(tensor.get_shape())
    shapes: dict[GroupName, tuple[int, int, int]] = {}
    for (layer, group), tensors in found.items():
        out, into = quantizer.group_sizes(layer, group) or (0, 0)
        groups = next((into // size for size in GROUPS if tensors.get("scale") == (out, into // size)), 0)
        want = {"values": (out, into // 2), "scale": (out, groups), "zero": (out, groups)}
        if not groups or tensors != want:
            raise SelfspecError(f"{path}: the int4 weights {layer}.{group} do not fit the model; make the file again")
        shapes[layer, group] = out, into, groups
    return Int4File(path, shapes, tuple(block.device for block in runtime.skeleton.blocks))


def pack(values: Tensor) -> Tensor:
    """Return values 0 to 15 `[out, in]` two in a byte, `[out, in / 2]`, an even input's in the low bits."""
    both = values.to(torch.uint8)
    return both[:, ::2] | both[:, 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Return the int8 values `[out, in]` of bytes that `pack` returned."""
    return torch.stack([packed & 15, packed >> 4], 2).view(len(packed), -1).to(torch.int8)


def _split(name: str) -> tuple[str, int, int, str]:
    parts = name.split(".")
    if len(parts) != 4 or not (parts[1].isdecimal() and parts[2].isdecimal() and len(name) < 64):
        return "", 0, 0, ""
    return parts[0], int(parts[1]), int(parts[2]), parts[3]
