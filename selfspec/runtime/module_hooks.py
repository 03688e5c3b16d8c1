"""What is put on a model's own modules for one pass, and taken off whatever happens: stand-ins, and hooks that look on.

Nothing is done to classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.models.structure import Structure


@contextmanager
def bypassing(parts: Sequence[tuple[nn.Module, int | None]]) -> Iterator[None]:
    """These sub-layers give nothing: so many things, of which the first is added; None: a tensor alone."""
    before: list[tuple[nn.Module, Any]] = []
    try:
        for part, gives in parts:
            before.append((part, part.__dict__.get("forward")))
            part.forward = _nothing_of(part.forward, gives)
        yield
    finally:
        for part, forward in before:
            if forward is None:
                part.__dict__.pop("forward", None)
            else:
                part.forward = forward


def _nothing_of(forward: Callable[..., Any], gives: int | None) -> Callable[..., Any]:
    """In the place of a sub-layer's forward. One that adds to a residual itself, as Bloom's do, gives that."""
    signature = inspect.signature(forward)

    def nothing(*args: Any, **kwargs: Any) -> Any:
        x = signature.bind(*args, **kwargs).arguments.get("residual")
        if x is None:
            x = torch.zeros_like(args[0] if args else kwargs["hidden_states"])
        return x if gives is None else (x, *[None] * (gives - 1))

    return nothing


@contextmanager
def watched(
    of: Structure, hidden: Sequence[int], between: Sequence[int]
) -> Iterator[tuple[dict[int, Tensor], dict[int, Tensor]]]:
    """The streams that enter layers `hidden` (the last leaves them), and those `between` attention and MLP.

    The latter are what enters a layer and what its attention gives, together.
    """
    streams, entered, halves = dict[int, Tensor](), dict[int, Tensor](), dict[int, Tensor]()
    last = len(of.layers)

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
    hooks = [of.layers[i].register_forward_pre_hook(entering(i), with_kwargs=True) for i in layers]
    hooks += [of.attention[i].register_forward_hook(added(i)) for i in between]
    if last in hidden:
        hooks.append(of.layers[-1].register_forward_hook(left))
    try:
        yield streams, halves
    finally:
        for hook in hooks:
            hook.remove()


def first_of(out: Any) -> Tensor:
    """What a module gives, without what some give beside it."""
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first
