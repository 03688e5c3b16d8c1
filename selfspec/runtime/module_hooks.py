"""Temporary patches and hooks on a model's modules for one pass, removed even after an error. No class is patched."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.models.structure import Structure


@contextmanager
def skipping(parts: Sequence[tuple[nn.Module, int | None]]) -> Iterator[None]:
    """Patch these sub-layers to return zeros; the int is the length of the output tuple (None: a single tensor)."""
    with _patched([(part, partial(_zero_forward, gives=gives)) for part, gives in parts]):
        yield


@contextmanager
def stepping(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Patch these modules to run their hidden states `[B, n, D]` one token after the other, and join the outputs.

    So a recurrent module that starts from an empty state whenever it gets several tokens goes on from its own state.
    """
    with _patched([(module, _step_forward) for module in modules]):
        yield


@contextmanager
def _patched(parts: Sequence[tuple[nn.Module, Callable[[Callable[..., Any]], Callable[..., Any]]]]) -> Iterator[None]:
    """Replace the forward of each module's instance by a function of it, for one pass."""
    before: list[tuple[nn.Module, Any]] = []
    try:
        for part, replacement in parts:
            before.append((part, part.__dict__.get("forward")))
            part.forward = replacement(part.forward)
        yield
    finally:
        for part, forward in reversed(before):
            if forward is None:
                part.__dict__.pop("forward", None)
            else:
                part.forward = forward


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


def _zero_forward(forward: Callable[..., Any], *, gives: int | None) -> Callable[..., Any]:
    """Return a forward that outputs zeros, or its argument `residual` if the sub-layer adds the residual (Bloom)."""
    signature = inspect.signature(forward)

    def nothing(*args: Any, **kwargs: Any) -> Any:
        x = signature.bind(*args, **kwargs).arguments.get("residual")
        if x is None:
            x = torch.zeros_like(args[0] if args else kwargs["hidden_states"])
        return x if gives is None else (x, *[None] * (gives - 1))

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
    hooks = [structure.layers[i].register_forward_pre_hook(entering(i), with_kwargs=True) for i in layers]
    hooks += [structure.attention[i].register_forward_hook(added(i)) for i in between]
    if last in hidden:
        hooks.append(structure.layers[-1].register_forward_hook(left))
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
        hook for part in inner for hook in (part.register_forward_pre_hook(enter), part.register_forward_hook(leave))
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
