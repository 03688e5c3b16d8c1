"""Part files: safetensors files of draft heads, bridges and adapters, with settings and target model as metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from selfspec.basics.errors import SelfspecError, reason
from selfspec.basics.files import check_file, write_bytes
from selfspec.models.quantized_sublayers import Bridge, Trained, Update
from selfspec.runtime.base import Runtime
from selfspec.types.identity import Identity

_FORMAT = "selfspec part 1"
_COMMANDS = {"int4": "make one with: selfspec quantize"}  # by kind; others are trained


@dataclass(frozen=True, slots=True)
class PartFile:
    """The contents of a part file: a module's kind, its settings (any JSON), its tensors by name, its target model."""

    kind: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    model: Identity

    def check(self, kind: str, model: Identity) -> None:
        """Raise `SelfspecError` if the module is of another kind, or was trained for another model or other weights."""
        remedy = _COMMANDS.get(kind, "train one with: selfspec train")
        if self.kind != kind:
            raise SelfspecError(f"the part is of kind '{self.kind}'; expected '{kind}'")
        if difference := self.model.mismatch(model):
            raise SelfspecError(f"the part is of another model: {difference}; {remedy}")
        mine, theirs = self.model.fingerprint, model.fingerprint
        if mine is not None and theirs is not None and mine != theirs:
            raise SelfspecError(f"the part is of other weights (fingerprint {mine}, the model's is {theirs}); {remedy}")


def write_part(path: Path, part: PartFile) -> None:
    """Write a part file atomically; of equal parts, equal bytes. Raises `SelfspecError` if it cannot be written."""
    header = {
        "format": _FORMAT,
        "kind": part.kind,
        "settings": json.dumps(dict(part.settings)),
        "model": part.model.model_dump_json(),
    }
    data = save({name: tensor.contiguous() for name, tensor in part.tensors.items()}, header)
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size]) | {"__metadata__": header}  # which `save` writes in any order
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_bytes(path, len(text).to_bytes(8, "little"), text, memoryview(data)[8 + size :])


def read_part(path: Path) -> PartFile:
    """Read a part file. Raises `SelfspecError` if the file does not exist or is no part file."""
    with opened_part(path) as (part, file):
        return replace(part, tensors={name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 (no mapping)


@contextmanager
def opened_part(path: Path) -> Iterator[tuple[PartFile, Any]]:
    """Open a part file, to read some of its tensors: yields the part without tensors, and the safetensors file.

    Raises `SelfspecError` as `read_part`, also for any error in the context.
    """
    check_file(path)
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            if header.get("format") != _FORMAT:
                raise SelfspecError(f"{path}: no trained part; expected a file that selfspec train wrote")
            model = Identity.model_validate_json(header["model"])
            settings = json.loads(header["settings"])
            if not isinstance(settings, dict):
                raise ValueError("its settings are no object")
            yield PartFile(header["kind"], settings, {}, model), file
    except SelfspecError:
        raise
    except Exception as error:
        raise SelfspecError(f"{path}: no trained part can be read from it ({reason(error)})") from None


def part_kind(path: Path) -> str | None:
    """Return the kind of the part in a file; None if it is no part file."""
    try:
        with opened_part(path) as (part, _):
            return part.kind
    except SelfspecError:
        return None


PATH_KINDS = ("bridge", "adapter")


def path_part(kind: str, settings: Mapping[str, Any], trained: Trained, runtime: Runtime) -> PartFile:
    """Return a part file of `kind` (bridge or adapter) with the trained bridges and updates for the runtime's model."""
    tensors: dict[str, Tensor] = {}
    for (first, end), bridge in trained.bridges.items():
        named = {"into": bridge.into, "onto": bridge.onto, "bias": bridge.bias}
        tensors |= {f"bridge.{first}.{end}.{name}": t for name, t in named.items() if t is not None}
    for (layer, group), update in trained.updates.items():
        tensors |= {f"update.{layer}.{group}.down": update.down, f"update.{layer}.{group}.up": update.up}
    return PartFile(
        kind, settings, {name: t.detach().float() for name, t in tensors.items()}, runtime.skeleton.identity
    )


def trained_of(runtime: Runtime, part: PartFile) -> Trained:
    """Return the bridges and updates in a part file.

    Raises `SelfspecError` for a part file of another kind or model, and for wrong names or shapes of tensors.
    """
    if part.kind not in PATH_KINDS:
        raise SelfspecError(
            f"the part is of kind '{part.kind}'; expected one of a draft path ({', '.join(PATH_KINDS)})"
        )
    part.check(part.kind, runtime.skeleton.identity)
    tensors_by_module: dict[tuple[str, int, int], dict[str, Tensor]] = {}
    for name, tensor in part.tensors.items():
        module_kind, first, second, what = _read(name)
        tensors_by_module.setdefault((module_kind, first, second), {})[what] = tensor.to(runtime.device)
    hidden = runtime.skeleton.sizes.hidden
    trained = Trained({}, {})
    for (module_kind, first, second), tensors in tensors_by_module.items():
        if module_kind == "bridge":
            bridge = Bridge(tensors.get("into"), *(_needed(tensors, module_kind, name) for name in ("onto", "bias")))
            rank = hidden if bridge.into is None else len(bridge.into)
            shapes = [(bridge.onto, (hidden, rank)), (bridge.bias, (hidden,))]
            shapes += [] if bridge.into is None else [(bridge.into, (rank, hidden))]
            fits = 0 <= first < second <= runtime.layers
            trained = replace(trained, bridges={**trained.bridges, (first, second): bridge})
        else:
            update = Update(_needed(tensors, module_kind, "down"), _needed(tensors, module_kind, "up"))
            sizes = runtime.skeleton.quantizer.group_sizes(first, second)
            fits = sizes is not None
            rank, (out, into) = len(update.down), sizes or (0, 0)
            shapes = [(update.down, (rank, into)), (update.up, (out, rank))]
            trained = replace(trained, updates={**trained.updates, (first, second): update})
        if not fits or any(tuple(t.shape) != shape for t, shape in shapes):
            raise SelfspecError(
                f"the part's {module_kind} {first}.{second} does not fit the model; train one with: selfspec train"
            )
    return trained


def _read(name: str) -> tuple[str, int, int, str]:
    parts = name.split(".")
    if len(parts) != 4 or parts[0] not in ("bridge", "update") or not (parts[1] + parts[2]).isdecimal():
        raise SelfspecError(f"the part holds a tensor {name}; expected bridges and updates of draft paths")
    return parts[0], int(parts[1]), int(parts[2]), parts[3]


def _needed(tensors: Mapping[str, Tensor], module_kind: str, name: str) -> Tensor:
    if name not in tensors:
        raise SelfspecError(f"the part has {'an' if module_kind == 'update' else 'a'} {module_kind} without its {name}")
    return tensors[name]
