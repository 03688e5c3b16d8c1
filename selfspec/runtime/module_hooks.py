"""Replaced forwards and hooks of a model's modules for one pass in one thread, removed even after an error.

No class is patched. Another thread that calls the model during the pass gets the model's own forward.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.models.dispatch import for_one_pass, in_this_thread
from selfspec.models.structure import Forwards, Structure


class _Pass(threading.local):
    """The calling thread's pass: the forwards that it replaces."""

    forwards: Forwards = MappingProxyType({})


@dataclass(slots=True)
class _Patch:
    """A module whose forward is replaced: in how many passes, and the forward of the instance before (or None)."""

    passes: int
    before: Any


_pass, _lock = _Pass(), threading.Lock()
_patches: dict[nn.Module, _Patch] = {}


@contextmanager
def replacing(forwards: Forwards) -> Iterator[None]:
    """Run `forwards` in place of modules' own forwards in this thread, while the context lasts. Contexts may nest."""
    before, patched = _pass.forwards, list[nn.Module]()
    try:
        with _lock:
            for module in forwards:
                _patch(module)
                patched.append(module)
        _pass.forwards = {**before, **forwards} if before else forwards
        yield
    finally:
        _pass.forwards = before
        with _lock:
            for module in patched:
                _unpatch(module)


def _patch(module: nn.Module) -> None:
    patch = _patches.get(module)
    if patch is not None:
        patch.passes += 1
        return
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return _pass.forwards.get(module, own)(*args, **kwargs)

    before = module.__dict__.get("forward")
    _patches[module] = _Patch(1, before)
    module.__dict__["forward"] = for_one_pass(forward, before)


def _unpatch(module: nn.Module) -> None:
    patch = _patches[module]
    patch.passes -= 1
    if patch.passes:
        return
    del _patches[module]
    if patch.before is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = patch.before


def stepping(modules: Sequence[nn.Module]) -> Forwards:
    """Return forwards that run hidden states `[B, n, D]` one token after the other, and join the outputs.

    So a recurrent module that starts from an empty state whenever it gets several tokens goes on from its own state.
    """
    return {module: _step_forward(module.forward) for module in modules}


def _step_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that runs `forward` for one token after the other."""

    def steps(*args: Any, **kwargs: Any) -> Any:
        name = "hidden_states" if not args else None
        x, others = (kwargs.pop(name), ()) if name else (args[0], args[1:])
        outs = [
            forward(*others, **{name: part}, **kwargs) if name else forward(part, *others, **kwargs)
            for part in x.split(1, dim=1)
        ]
        if len(outs) == 1:
            return outs[0]
        joined = torch.cat([first_of(out) for out in outs], 1)
        return (joined, *outs[-1][1:]) if isinstance(outs[-1], tuple) else joined

    return steps


def zero_forward(module: nn.Module, outputs: int | None) -> Callable[..., Any]:
    """Return a forward for `module` that outputs zeros, or its argument `residual` if it adds the residual (Bloom).

    `outputs`: the length of the module's output tuple (None: a single tensor).
    """
    signature = inspect.signature(module.forward)

    def nothing(*args: Any, **kwargs: Any) -> Any:
        x = signature.bind(*args, **kwargs).arguments.get("residual")
        if x is None:
            x = torch.zeros_like(args[0] if args else kwargs["hidden_states"])
        return x if outputs is None else (x, *[None] * (outputs - 1))

    return nothing


@contextmanager
def capture_hidden(
    structure: Structure, hidden: Sequence[int], between: Sequence[int]
) -> Iterator[tuple[dict[int, Tensor], dict[int, Tensor]]]:
    """Capture the inputs of layers `hidden`, and the hidden states between attention and MLP of layers `between`.

    Yields two dicts of hidden states by layer, which the pass fills. In `hidden`, an index equal to the number of
    layers stands for the last layer's output. The hidden states between attention and MLP are the layer's input plus
    its attention's output.
    """
    streams, entered, halves = dict[int, Tensor](), dict[int, Tensor](), dict[int, Tensor]()
    last = len(structure.layers)

    def entering(index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            entered[index] = args[0] if args else kwargs["hidden_states"]
            if index in hidden:
                streams[index] = entered[index].clone()

        return hook

    def added(index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            halves[index] = entered[index] + first_of(out)

        return hook

    def left(_module: nn.Module, _args: Any, out: Any) -> None:
        streams[last] = first_of(out).clone()

    layers = {index for index in (*hidden, *between) if index < last}
    hooks = [
        structure.layers[i].register_forward_pre_hook(in_this_thread(entering(i)), with_kwargs=True) for i in layers
    ]
    hooks += [structure.attention[i].register_forward_hook(in_this_thread(added(i))) for i in between]
    if last in hidden:
        hooks.append(structure.layers[-1].register_forward_hook(in_this_thread(left)))
    try:
        yield streams, halves
        for index in between:  # a layer without an attention module, which adds nothing of its own
            halves.setdefault(index, entered[index])
    finally:
        for hook in hooks:
            hook.remove()


def first_of(out: Any) -> Tensor:
    """Return a module's output `out`, or its first entry if the output is a tuple."""
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first


@contextmanager
def callers_of(cache: Any, names: Sequence[str], modules: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """Collect which of `modules`, and of the modules in them, call a method `names` of `cache` themselves."""
    stack: list[nn.Module] = []
    callers: list[nn.Module] = []

    def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            if stack and stack[-1] not in callers:
                callers.append(stack[-1])
            return method(*args, **kwargs)

        return record

    def enter(module: nn.Module, _args: Any) -> None:
        stack.append(module)

    def leave(_module: nn.Module, _args: Any, _out: Any) -> None:
        stack.pop()

    inner = list({id(part): part for module in modules for part in module.modules()}.values())
    hooks = [
        hook
        for part in inner
        for hook in (
            part.register_forward_pre_hook(in_this_thread(enter)),
            part.register_forward_hook(in_this_thread(leave)),
        )
    ]
    for name in names:
        setattr(cache, name, recorded(getattr(cache, name)))
    try:
        yield callers
    finally:
        for name in names:
            delattr(cache, name)
        for hook in hooks:
            hook.remove()
