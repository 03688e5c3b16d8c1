"""Quantisation of a model's attention and MLP weights to int4, layer by layer, resumable, and the files it makes.

The moments of every linear's inputs come from the full model's own hidden states on calibration texts. Experts are left
out: drafts round their weights to nearest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError, short
from selfspec.basics.files import kind, make_folder
from selfspec.draft_modules.module_files import PartFile, opened_part, read_part, write_part
from selfspec.models.dispatch import device_of
from selfspec.models.linears import Group
from selfspec.models.low_precision import GROUPS, QuantizedWeight
from selfspec.models.quantizers import InputMoments, group_for, quantize_int4
from selfspec.models.shards import check_unsharded
from selfspec.runtime.base import Runtime
from selfspec.types.methods import Int4Method

KIND = "int4"
_TENSORS = {"values": "U8", "scale": "BF16", "zero": "BF16"}  # a group's tensors, with their types in the file

GroupName = tuple[int, int]
"""A layer, and the index of a group of linears in `WeightQuantizer.linear_groups`."""


@dataclass(frozen=True, slots=True)
class Int4File:
    """The int4 weights in a part file, as `quantized_sublayers.Int4Weights`; a weight is read when it is asked for.

    `shapes`: for each group, its outputs, inputs and groups of inputs. `devices`: of each group.
    """

    path: Path
    shapes: Mapping[GroupName, tuple[int, int, int]]
    devices: Mapping[GroupName, torch.device]

    def get(self, layer: int, group: int) -> QuantizedWeight | None:
        """Return a group's weight, on the device of the model's; None if the file has none.

        Raises `SelfspecError` if the file cannot be read any more, and for scales that are not finite.
        """
        if (layer, group) not in self.shapes:
            return None
        with opened_part(self.path) as (_, file):
            packed, scale, zero = (file.get_tensor(f"int4.{layer}.{group}.{name}") for name in _TENSORS)
        if not (bool(scale.isfinite().all()) and bool(zero.isfinite().all())):
            raise SelfspecError(f"{self.path}: scales of layer {layer} are not finite; make the file again")
        device = self.devices[layer, group]
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
    own = {layer: dict(enumerate(quantizer.linear_groups(layer))) for layer in {layer for layer, _ in found}}
    shapes, devices = dict[GroupName, tuple[int, int, int]](), dict[GroupName, torch.device]()
    for (layer, group), tensors in found.items():
        linears = own[layer].get(group)
        out, into = (0, 0) if linears is None else linears.sizes
        groups = next((into // size for size in GROUPS if tensors.get("scale") == (out, into // size)), 0)
        want = {"values": (out, into // 2), "scale": (out, groups), "zero": (out, groups)}
        if linears is None or not groups or tensors != want:
            raise SelfspecError(f"{path}: the int4 weights {layer}.{group} do not fit the model; make the file again")
        shapes[layer, group] = out, into, groups
        devices[layer, group] = device_of(linears.modules[0])
    return Int4File(path, shapes, devices)


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


Texts = Sequence[Sequence[int]]


def int4_settings(method: Int4Method, group: int, texts: Texts, *, seed: int = 0) -> dict[str, Any]:
    """Return the settings that a file of int4 weights records: method, group size, texts (token ids) and their seed."""
    digest = hashlib.sha256("\n".join(" ".join(map(str, ids)) for ids in texts).encode()).hexdigest()
    described = {"count": len(texts), "tokens": sum(map(len, texts)), "sha256": digest}
    return {"method": method, "group": group, "seed": seed, "texts": described}


def layers_folder(out: Path) -> Path:
    """Return the folder that keeps the layers finished so far, for the file `out`."""
    return out.with_name(f"{out.name}.layers")


def check_quantizable(runtime: Runtime) -> None:
    """Raise `SelfspecError` if no weight of a model can be quantised to a file, or if it is tensor parallel."""
    check_unsharded(runtime.model, "quantising to a file")
    if not any(runtime.skeleton.quantizer.int4_groups(index) for index in range(runtime.layers)):
        raise SelfspecError("the model has no weights that can be quantised to int4")


def write_int4(
    runtime: Runtime,
    out: Path,
    texts: Texts,
    settings: Mapping[str, Any],
    *,
    on_layer: Callable[[int], bool] = lambda done: True,
) -> bool:
    """Quantise a model's weights and write them to `out`; return whether all layers were done.

    `texts`: token ids, from which method `nearest` reads nothing. `settings`: those of `int4_settings`. `on_layer`
    receives the number of layers done; if it returns False, quantising stops. Finished layers are kept in the folder
    `out`.layers, from which the next call with the same settings resumes; it is deleted at the end. Raises
    `SelfspecError` if no weight can be quantised, if there are no texts for a method that needs them, and if a file
    cannot be written.
    """
    check_quantizable(runtime)
    if settings["method"] != "nearest" and not any(texts):
        raise SelfspecError(f"method '{settings['method']}': expected at least one text")
    folder = layers_folder(out)
    make_folder(folder)
    files = [folder / f"{index:04}.safetensors" for index in range(runtime.layers)]
    done = {index for index, file in enumerate(files) if _is_finished(file, settings, runtime)}
    todo = [index for index in range(runtime.layers) if index not in done]
    for index, weights in _quantized_layers(runtime, texts, settings, todo):
        write_part(files[index], int4_part(settings, int4_tensors(index, weights), runtime))
        done.add(index)
        if not on_layer(len(done)) and len(done) < len(files):
            return False
    tensors = {name: tensor for file in files for name, tensor in read_part(file).tensors.items()}
    write_part(out, int4_part(settings, tensors, runtime))
    for file in files:
        file.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
    return True


def _is_finished(file: Path, settings: Mapping[str, Any], runtime: Runtime) -> bool:
    """Return whether a layer's file is complete, and made of this model with these settings."""
    if kind(file) != "file":
        return False
    try:
        part = read_part(file)
    except SelfspecError:  # damaged: the layer is quantised again
        return False
    return part.settings == settings and part.model == runtime.skeleton.identity


def _quantized_layers(
    runtime: Runtime, texts: Texts, settings: Mapping[str, Any], todo: Sequence[int]
) -> Iterator[tuple[int, dict[int, QuantizedWeight]]]:
    """Yield each layer in `todo` with its int4 weights, by the index of the group."""
    method, context = settings["method"], runtime.skeleton.context
    each: Iterable[tuple[int, Mapping[int, InputMoments]]] = ((index, {}) for index in todo)
    if method != "nearest":
        shown = [ids[:context] for ids in texts if ids]
        each = runtime.input_moments(shown, todo, products=method == "gptq")
    for index, moments in each:
        groups = runtime.skeleton.quantizer.int4_groups(index)
        yield (
            index,
            {
                number: _quantized(group, method, settings["group"], moments.get(number))
                for number, group in groups.items()
            },
        )


def _quantized(group: Group, method: Int4Method, preferred: int, moments: InputMoments | None) -> QuantizedWeight:
    """Quantise the concatenated weights of a group, in groups of `preferred` inputs if that divides their number."""
    weight = torch.cat([module.weight.detach() for module in group.modules])
    size = group_for(weight.shape[1], preferred)
    assert size is not None
    return quantize_int4(weight, method, None if moments is None else moments.mean(), group=size)
