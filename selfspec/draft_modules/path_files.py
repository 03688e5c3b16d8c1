"""Part files for draft paths: bridges over skipped layers, and low-rank updates of quantised weights (adapters)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.module_files import PartFile
from selfspec.models.path_modules import Bridge, Trained, Update
from selfspec.runtime.base import Runtime

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
