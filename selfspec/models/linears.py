"""Linear maps as the runtime calls them: without a module call's overhead, and several over one input as one.

The parameters of linears that read the same input (a `Group`: query, key and value, for one) can be laid side by side
in one tensor (`join_`), which keeps their values and needs no memory; one product then serves all of them. Weights can
also be held in another form (`PartLinear`). Knows nothing of families and caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from selfspec.models.dispatch import calls_itself, device_of, is_dense

Call = Callable[[Tensor], Tensor]
Into = Callable[[Tensor, Tensor], object]  # f(x, out): writes what x gives to out
Onto = Callable[[Tensor, Tensor], object]  # f(base, x): adds what x gives to base, in place


def is_plain(module: nn.Module, *, offloaded: bool = False) -> bool:
    """Whether calling `module` runs its class's own forward and nothing else: no hooks, no parametrisation.

    accelerate's moving of inputs does not count, as the runtime has them on the module's device already; with
    `offloaded`, nor does its bringing of weights.
    """
    hooks = module._forward_hooks or module._forward_pre_hooks
    return not hooks and calls_itself(module, offloaded=offloaded) and not hasattr(module, "parametrizations")


def embedding(module: Any) -> Call:
    """An embedding of token ids `[B, n]`: an exact `nn.Embedding` without a module call's overhead."""
    exact = type(module) is nn.Embedding and is_plain(module) and not module.weight.is_meta
    if not exact or module.max_norm is not None or not is_dense(module.weight):
        return lambda ids: module(ids)
    return partial(torch.embedding, module.weight.detach())


def linear(module: Any) -> Call:
    """A linear from `[N, in]` to `[N, out]`: an exact `nn.Linear` without a module call's overhead."""
    if (whole := whole_parts([module])) is not None:
        return whole.product
    if not is_exact(module):
        return on_rows(module)
    return _product(module.weight.detach(), None if module.bias is None else module.bias.detach())


def linear_over(module: Any, outputs: Sequence[int]) -> Call | None:
    """A linear from `[N, in]` to `[N, out]` of which only `outputs` are computed; the others are -inf.

    It holds a copy of the weight's rows. None where the weight is not at hand (quantised, adapted, offloaded).
    """
    at = torch.tensor(outputs, device=device_of(module))
    product = module.over(at) if isinstance(module, PartLinear) else None
    if product is None:
        if not is_readable(module):
            return None
        weight = module.weight.detach().index_select(0, at).t().contiguous()
        product = _product(weight.t(), None if module.bias is None else module.bias.detach().index_select(0, at))
    return Spread(product, at, module.out_features)  # not the module, which may hold the whole in few bits


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A product `call` of rows, with something before or after it."""

    call: Call


@dataclass(frozen=True, slots=True)
class Moved(Wrapped):
    """Rows are brought to the product's device."""

    device: torch.device

    def __call__(self, x: Tensor) -> Tensor:
        """The product."""
        return self.call(x.to(self.device))


@dataclass(frozen=True, slots=True, eq=False)
class Spread(Wrapped):
    """What the product gives are the outputs `at` of `out`; the others are -inf."""

    at: Tensor
    out: int

    def __call__(self, x: Tensor) -> Tensor:
        """All outputs `[N, out]`."""
        x = x.to(self.at.device)
        return x.new_full((len(x), self.out), -torch.inf).index_copy_(1, self.at, self.call(x).to(x.dtype))


def on_rows(module: Any) -> Call:
    """A module as a callable on rows `[N, D]`; it sees the three dimensions that it would in its own model."""
    return lambda x: module(x.unsqueeze(0)).squeeze(0)


def linear_onto(module: Any) -> Onto:
    """A linear whose output for `x` `[N, in]` is added to `base` `[N, out]` in place: `f(base, x)`."""
    if (whole := whole_parts([module])) is not None and isinstance(whole.product, InPlace):
        return whole.product.add
    if not is_exact(module) or module.bias is not None:
        call = linear(module)
        return lambda base, x: base.add_(call(x))
    weight = module.weight.detach()
    if not _vectors(weight):
        across = weight.t()
        return lambda base, x: base.addmm_(x, across)

    def onto(base: Tensor, x: Tensor) -> object:
        if len(x) > 1:
            return base.addmm_(x, weight.t())
        return base[0].addmv_(weight, x[0])

    return onto


def side_by_side(modules: Sequence[Any]) -> Into:
    """Several linears over one input `x` `[N, in]`, whose outputs are written side by side: `f(x, out)`.

    One product where their parameters lie side by side, as `join_` leaves them; otherwise one each. `out` is
    `[N, sum of outs]`.
    """
    if all(map(is_exact, modules)):
        weight = whole_of([module.weight.detach() for module in modules])
        biases = [module.bias.detach() for module in modules if module.bias is not None]
        bias = whole_of(biases) if len(biases) == len(modules) else None
        if weight is not None and (bias is not None or not biases):
            product = _product(weight, bias)
            return lambda x, out: product(x, out=out)
    if (parts := whole_parts(modules)) is not None:
        multiply = parts.product
        return multiply.write if isinstance(multiply, InPlace) else lambda x, out: out.copy_(multiply(x))
    calls = [linear(module) for module in modules]
    return lambda x, out: torch.cat([call(x) for call in calls], dim=-1, out=out)


def _product(weight: Tensor, bias: Tensor | None) -> Callable[..., Tensor]:
    """The function x @ weight.t() + bias of x, the weight `[out, in]` transposed once and not at each call."""
    across = weight.t()
    several = partial(torch.mm, mat2=across) if bias is None else partial(torch.addmm, bias, mat2=across)
    if not _vectors(weight):
        return several
    one = partial(torch.mv, weight) if bias is None else partial(torch.addmv, bias, weight)

    def product(x: Tensor, out: Tensor | None = None) -> Tensor:
        if len(x) > 1:
            return several(x, out=out)
        return one(x[0], out=None if out is None else out[0]).unsqueeze(0)

    return product


def _vectors(weight: Tensor) -> bool:
    """Whether a product with one row is best one with a vector: on a CPU, with a weight stored by rows.

    A product of matrices brings a bfloat16 weight into another order first, each time; of float16 it is the other way
    round, as products with vectors are not vectorised for it.
    """
    return weight.device.type == "cpu" and weight.is_contiguous() and weight.dtype != torch.float16


@dataclass(frozen=True, slots=True)
class Group:
    """Linears that read the same input: the attributes `names` of `parent`.

    `writes`: what they give is added to the residual stream. `partial`: each process has some of their inputs, and what
    they give is a part of a sum.
    """

    parent: Any
    names: tuple[str, ...]
    writes: bool = False
    partial: bool = False

    @property
    def modules(self) -> list[Any]:
        """The linears, as they are now."""
        return [getattr(self.parent, name) for name in self.names]

    @property
    def module(self) -> Any:
        """The linear of a group of one."""
        (module,) = self.modules
        return module


@torch.no_grad()
def join_(group: Group, *, columns: bool = False) -> None:
    """Lay the parameters of a group side by side in one tensor, in place.

    Every parameter keeps its values, its shape and its identity, and becomes a view of the whole. With `columns`,
    weights are stored by columns, so that `weight.t()` is contiguous. Exact `nn.Linear` of one dtype on one device
    only; anything else (adapters, quantised or offloaded weights, hooks) stays as it is.
    """
    modules = group.modules
    if not (columns or len(modules) > 1) or not all(map(is_exact, modules)):
        return
    for name in ("weight", "bias"):
        parts = [getattr(module, name) for module in modules]
        if any(part is None or part.dtype != parts[0].dtype or part.device != parts[0].device for part in parts):
            continue
        across = columns and name == "weight"
        whole = torch.cat([part.data.t() if across else part.data for part in parts], dim=1 if across else 0)
        whole, row = whole.t() if across else whole, 0
        for part in parts:
            part.data = whole.narrow(0, row, len(part))
            row += len(part)


def whole_of(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor that `parts` are consecutive rows of, stored by rows or by columns; None where they are not."""
    first, rows = parts[0], sum(len(part) for part in parts)
    if first.dim() == 2 and first.stride(0) == 1 != first.stride(1):
        strides: tuple[int, ...] = (1, rows)
    else:
        strides = first.stride() if first.is_contiguous() else ()
    end = first.data_ptr()
    for part in parts:
        same = part.dtype == first.dtype and part.device == first.device and part.shape[1:] == first.shape[1:]
        if not (same and part.stride() == strides and part.data_ptr() == end):
            return None
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += len(part) * strides[0] * part.element_size()
    return first.as_strided((rows, *first.shape[1:]), strides)


def whole_parts(modules: Sequence[Any]) -> Product | None:
    """The product that `modules` are all the parts of, in order; None where they are not."""
    if not all(isinstance(module, PartLinear) and module.current and is_plain(module) for module in modules):
        return None
    whole, start = modules[0].whole, 0
    for module in modules:
        if module.whole is not whole or module.start != start:
            return None
        start += module.out_features
    return whole if start == whole.out else None


def is_exact(module: nn.Module) -> bool:
    """Whether a module is an `nn.Linear`, no subclass, without hooks and with its weight, no subclass, loaded."""
    exact = type(module) is nn.Linear and is_plain(module) and not module.weight.is_meta
    return exact and is_dense(module.weight)


def is_readable(module: nn.Module) -> bool:
    """Whether a linear's weight is at hand, and is all that it multiplies with."""
    return is_exact(module) or (isinstance(module, PartLinear) and module.readable and is_plain(module))


@runtime_checkable
class InPlace(Protocol):
    """A product that needs no tensor of its own for what it gives."""

    def write(self, x: Tensor, out: Tensor) -> None:
        """The product with rows `x` `[N, in]`, written to `out` `[N, out]`."""

    def add(self, base: Tensor, x: Tensor) -> None:
        """The product with rows `x` `[N, in]`, added to `base` `[N, out]`."""

    def with_bias(self, bias: Tensor) -> InPlace:
        """The same with a bias."""


class Product(Protocol):
    """What multiplies one or more linears' weights, as one, with rows `[N, in]`; `out`: outputs of all."""

    out: int

    @property
    def product(self) -> Call:
        """What multiplies."""


class PartLinear(nn.Module):
    """Stands for a linear whose weight is some rows, from `start` on, of what `whole` multiplies with.

    Its own forward, which calls these one by one, is slower: each computes the whole product and returns its part.
    `readable`: whether its `weight` is what it multiplies with, exactly. `bits`: as few as it is kept in, if it is.
    """

    readable: ClassVar[bool] = False
    bits: int | None = None

    def __init__(self, whole: Product, start: int, linear: Any) -> None:
        super().__init__()
        self.whole, self.start = whole, start
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """The product with `x` `[.., in]`."""
        return self.whole.product(x).narrow(-1, self.start, self.out_features)

    @property
    def current(self) -> bool:
        """Whether `whole` still multiplies with its weight."""
        return True

    def over(self, outputs: Tensor) -> Call | None:
        """The product with the weight's rows `outputs` alone, of its own kind; None where there is none of that."""
        return None
