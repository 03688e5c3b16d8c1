"""Linear maps as the runtime calls them: without a module call's overhead, and several over one input as one.

The parameters of query, key and value, and of gate and up, can be laid side by side in one tensor each (`join_`), which
keeps their values and needs no memory; one product then serves all of them. Knows nothing of caches and prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Call = Callable[[Tensor], Tensor]
Onto = Callable[[Tensor, Tensor], Tensor]


def is_plain(module: nn.Module) -> bool:
    """Whether calling `module` runs its class's own forward and nothing else: no hooks, no parametrisation."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return not hooks and "forward" not in module.__dict__ and not hasattr(module, "parametrizations")


def linear(module: Any) -> Call:
    """A linear from `[N, in]` to `[N, out]`: an exact `nn.Linear` without a module call's overhead."""
    if not _is_exact(module):
        return on_rows(module)
    return _product(module.weight.detach(), None if module.bias is None else module.bias.detach())


def on_rows(module: Any) -> Call:
    """A module as a callable on rows `[N, D]`; it sees the three dimensions that it would in its own model."""
    return lambda x: module(x.unsqueeze(0)).squeeze(0)


def linear_onto(module: Any) -> Onto:
    """A linear from `x` `[N, in]` whose output is added to `base` `[N, out]`: `f(base, x)`."""
    if _is_exact(module) and module.bias is None:
        weight = module.weight.detach().t()
        return lambda base, x: torch.addmm(base, x, weight)
    call = linear(module)
    return lambda base, x: base + call(x)


def side_by_side(modules: Sequence[Any]) -> Call:
    """Several linears over one input `[N, in]` as a callable whose outputs stand side by side `[N, sum of outs]`.

    One product where their parameters lie side by side, as `join_` leaves them; otherwise one each.
    """
    if all(map(_is_exact, modules)):
        weight = _whole([module.weight.detach() for module in modules])
        biases = [module.bias for module in modules]
        if weight is not None and all(bias is None for bias in biases):
            return _product(weight, None)
        if weight is not None and all(bias is not None for bias in biases):
            bias = _whole([bias.detach() for bias in biases])
            if bias is not None:
                return _product(weight, bias)
    calls = [linear(module) for module in modules]
    return lambda x: torch.cat([call(x) for call in calls], dim=-1)


def _product(weight: Tensor, bias: Tensor | None) -> Call:
    """The product with `weight` `[out, in]`, made once ready to be multiplied with."""
    if bias is None:
        return partial(torch.mm, mat2=weight.t())
    return partial(torch.addmm, bias, mat2=weight.t())


@torch.no_grad()
def join_(model: Any) -> None:
    """Lay the parameters that read the same input side by side, layer by layer, in place.

    Every parameter keeps its values, its shape and its identity, and becomes a view of the whole. Exact `nn.Linear`
    of one dtype on one device only; anything else (adapters, quantised or offloaded weights, hooks) stays as it is.
    """
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        _join([attention.q_proj, attention.k_proj, attention.v_proj])
        _join([mlp.gate_proj, mlp.up_proj])


def _join(modules: Sequence[Any]) -> None:
    if not all(map(_is_exact, modules)):
        return
    for name in ("weight", "bias"):
        parts = [getattr(module, name) for module in modules]
        if any(part is None or part.dtype != parts[0].dtype or part.device != parts[0].device for part in parts):
            continue
        whole, row = torch.cat([part.data for part in parts]), 0
        for part in parts:
            part.data = whole.narrow(0, row, len(part))
            row += len(part)


def _whole(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor that `parts` are consecutive rows of; None where they are not."""
    first = parts[0]
    end = first.data_ptr()
    for part in parts:
        same = part.dtype == first.dtype and part.device == first.device and part.shape[1:] == first.shape[1:]
        if not (same and part.is_contiguous() and part.data_ptr() == end):
            return None
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += part.numel() * part.element_size()
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _is_exact(module: nn.Module) -> bool:
    return type(module) is nn.Linear and is_plain(module) and not module.weight.is_meta
