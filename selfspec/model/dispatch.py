"""Models that accelerate has dispatched: parts on several devices, weights on the CPU or on disk until they are used.

accelerate hooks every module. The runtime calls leaf modules, whose hooks then bring their inputs and weights; hooks on
what contains them never run. Knows nothing of families and caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook
from torch import Tensor, nn

from selfspec.basics.errors import UnsupportedModelError


def calls_itself(module: nn.Module, *, offloaded: bool = False) -> bool:
    """Whether calling a module runs its class's own forward: nothing replaces it but accelerate's moving of inputs.

    `offloaded`: or its bringing of weights.
    """
    forward = module.__dict__.get("forward")
    if forward is None:
        return True
    accelerates = isinstance(forward, partial) and forward.func.__module__ == "accelerate.hooks"
    own = accelerates and getattr(module._old_forward, "__func__", None) is type(module).forward
    return own and all(
        isinstance(hook, AlignDevicesHook) and (offloaded or not hook.offload) for hook in _hooks(module)
    )


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: where accelerate brings it, else where its weights are."""
    for hook in (hook for part in module.modules() for hook in _hooks(part)):
        if getattr(hook, "execution_device", None) is not None:
            return torch.empty(0, device=hook.execution_device).device  # with its number
    held = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if held is None else held.device


def weight_of(module: nn.Module) -> Tensor | None:
    """A module's weight, or, offloaded, what accelerate keeps of it; None where there is none."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_meta:
        return weight
    for hook in _hooks(module):
        if getattr(hook, "weights_map", None) is not None:
            kept: Tensor = hook.weights_map["weight"]
            return kept.to(weight.dtype)
    return None


def check_hooks(model: Any) -> None:
    """Raise `UnsupportedModelError` for a hook on a module that is never called, since it would be ignored.

    accelerate's own hooks that only move inputs are not missed, and transformers' only record.
    """
    for name, module in _containers(model):
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        foreign = [h for h in hooks if not str(getattr(h, "__module__", "")).startswith("transformers.")]
        if not foreign and calls_itself(module):
            continue
        if not foreign and calls_itself(module, offloaded=True):
            raise UnsupportedModelError(
                f"{name} is offloaded as a whole, and selfspec calls what is in it; dispatch the model without "
                "preload_module_classes"
            )
        raise UnsupportedModelError(
            f"{name} has a hook or a forward of its own, which would be ignored: selfspec calls the leaf modules "
            "(norms, projections, head); remove it, or put it there"
        )


def check_places(model: Any) -> None:
    """Raise `UnsupportedModelError` for weights that nothing will bring, and for a layer on more than one device."""
    for name, module in model.named_modules():
        offloaded = any(getattr(hook, "offload", False) for hook in _hooks(module))
        if not offloaded and any(p.is_meta for p in module.parameters(recurse=False)):
            raise UnsupportedModelError(
                f"module '{name}' has no weights (they are on the device 'meta'); load them, or load the model with a "
                "device_map"
            )
    for number, layer in enumerate(model.model.layers):
        inside = (layer.self_attn, layer.mlp)
        parts = [pair for owner in (layer, *inside) for pair in owner.named_children() if pair[1] not in inside]
        places = {name: device_of(part) for name, part in parts if next(part.parameters(), None) is not None}
        first = device_of(layer.input_layernorm)
        other = next((name for name, device in places.items() if device != first), None)
        if other is not None:
            raise UnsupportedModelError(
                f"layer {number} is on two devices (input_layernorm on {first}, {other} on {places[other]}); give each "
                "layer one device, as device_map='auto' does"
            )


def _containers(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """What the runtime looks into and never calls."""
    yield "the model", model
    yield "module 'model'", model.model
    for number, layer in enumerate(model.model.layers):
        name = f"model.layers.{number}"
        yield f"module '{name}'", layer
        yield f"module '{name}.self_attn'", layer.self_attn
        yield f"module '{name}.mlp'", layer.mlp


def _hooks(module: nn.Module) -> list[Any]:
    """Accelerate's hooks on a module, those that run one after the other apart."""
    found, left = [], [module.__dict__.get("_hf_hook")]
    while left:
        hook = left.pop(0)
        inner = getattr(hook, "hooks", None)
        if inner is not None:
            left = [*inner, *left]
        elif hook is not None:
            found.append(hook)
    return found
