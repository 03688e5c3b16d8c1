"""Models dispatched by accelerate: over several devices, with weights offloaded to the CPU or disk until used.

accelerate adds a hook to every module. The runtime calls a model's norms, linears and head one by one, and the hooks on
these modules bring inputs and weights to the device. The runtime never calls *containers*, the modules that contain
these modules (the model, its layers), so that the hooks of containers never run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from itertools import chain
from typing import Any, TypeVar

import torch
from accelerate.hooks import AlignDevicesHook
from torch import Tensor, nn

from selfspec.basics.errors import UnsupportedModelError

CallT = TypeVar("CallT", bound=Callable[..., Any])


def for_one_pass(function: CallT, before: Callable[..., Any] | None = None) -> CallT:
    """Mark a hook, or a forward that stands for the forward `before` of an instance (None: its class's).

    They do nothing of their own in other threads, where the module counts as it is without them.
    """
    function.before_pass = before  # type: ignore[attr-defined]
    return function


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that does nothing when another thread calls the module."""
    owner = threading.get_ident()

    @wraps(hook)
    def own(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == owner else None

    return for_one_pass(own)


def is_for_one_pass(function: Callable[..., Any]) -> bool:
    """Return whether a hook or a forward is there for one pass of some thread."""
    return hasattr(function, "before_pass")


def calls_itself(module: nn.Module, *, offloaded: bool = False) -> bool:
    """Return whether calling a module, between passes, runs its class's own forward.

    accelerate's wrapper around the forward is allowed if it only moves inputs to the module's device, or, with
    `offloaded`, if it also loads the weights.
    """
    forward = module.__dict__.get("forward")
    if forward is not None and is_for_one_pass(forward):
        forward = forward.before_pass
    if forward is None:
        return True
    accelerates = isinstance(forward, partial) and forward.func.__module__ == "accelerate.hooks"
    own = accelerates and getattr(module._old_forward, "__func__", None) is type(module).forward
    return own and all(
        isinstance(hook, AlignDevicesHook) and (offloaded or not hook.offload) for hook in _hooks(module)
    )


def device_of(module: nn.Module) -> torch.device:
    """Return the device that a module computes on: accelerate's execution device, else that of its weights."""
    for hook in (hook for part in module.modules() for hook in _hooks(part)):
        if getattr(hook, "execution_device", None) is not None:
            return torch.empty(0, device=hook.execution_device).device  # a device with an index
    tensor = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def dtype_of(module: Any) -> torch.dtype:
    """Return the dtype of a module's weight; a weight that is converted at each read is not read for it."""
    dtype: torch.dtype = getattr(module, "dtype", None) or module.weight.dtype
    return dtype


def is_dense(weight: Any) -> bool:
    """Return whether a weight is a plain torch tensor, and no subclass such as torchao's quantised tensors."""
    return type(weight) in (Tensor, nn.Parameter)


def weight_of(module: nn.Module) -> Tensor | None:
    """Return a module's weight, or accelerate's copy of an offloaded weight; None if no weight is loaded."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_meta:
        return weight
    for hook in _hooks(module):
        if getattr(hook, "weights_map", None) is not None:
            offloaded_weight: Tensor = hook.weights_map["weight"]
            return offloaded_weight.to(weight.dtype)
    return None


def containers(model: nn.Module, called: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that contain any of `called`, by name (the model's own is "").

    `nn.ModuleList`s are left out, as nothing ever calls them.
    """
    names = {id(module): name for name, module in model.named_modules()}
    by_name: dict[str, nn.Module] = {"": model}
    for module in called:
        name = names[id(module)]
        while name:
            name = name.rpartition(".")[0]
            by_name[name] = model.get_submodule(name)
    return {name: module for name, module in by_name.items() if not isinstance(module, nn.ModuleList)}


def check_hooks(containers: Mapping[str, nn.Module]) -> None:
    """Raise `UnsupportedModelError` for a hook on a container, which would be ignored, naming the container.

    Allowed are accelerate's hooks that only move inputs, and hooks of `transformers`, which only record outputs.
    """
    for path, module in containers.items():
        name = f"module '{path}'" if path else "the model"
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        foreign = [h for h in hooks if not str(getattr(h, "__module__", "")).startswith("transformers.")]
        if not foreign and calls_itself(module):
            continue
        if not foreign and calls_itself(module, offloaded=True):
            raise UnsupportedModelError(
                f"{name} is offloaded as a whole, but selfspec calls the modules in it; dispatch the model without "
                "preload_module_classes"
            )
        raise UnsupportedModelError(
            f"{name} has a hook or a replaced forward, which would be ignored: selfspec calls only leaf modules "
            "(norms, projections, head); remove it, or move it to a leaf module"
        )


def check_places(model: nn.Module, layers: Sequence[nn.Module], containers: Mapping[str, nn.Module]) -> None:
    """Raise `UnsupportedModelError` for meta weights that no hook loads, and for a layer on more than one device."""
    for name, module in model.named_modules():
        offloaded = any(getattr(hook, "offload", False) for hook in _hooks(module))
        if not offloaded and any(p.is_meta for p in module.parameters(recurse=False)):
            raise UnsupportedModelError(
                f"module '{name}' has no weights (they are on the device 'meta'); load them, or load the model with a "
                "device_map"
            )
    owners = set(containers.values())
    for number, layer in enumerate(layers):
        parts = [pair for owner in layer.modules() if owner in owners for pair in owner.named_children()]
        (first, where), *others = (
            (name, device_of(part))
            for name, part in parts
            if part not in owners and next(part.parameters(), None) is not None
        )
        for name, device in others:
            if device != where:
                raise UnsupportedModelError(
                    f"layer {number} is on two devices ({first} on {where}, {name} on {device}); give each "
                    "layer one device, as device_map='auto' does"
                )


def _hooks(module: nn.Module) -> list[Any]:
    """Return accelerate's hooks on a module, with sequential hooks flattened."""
    hooks, left = [], [module.__dict__.get("_hf_hook")]
    while left:
        hook = left.pop(0)
        inner = getattr(hook, "hooks", None)
        if inner is not None:
            left = [*inner, *left]
        elif hook is not None:
            hooks.append(hook)
    return hooks
