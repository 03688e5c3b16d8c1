"""Linear maps as the runtime calls them: without a module call's overhead, and several over one input as one.

The parameters of linears that read the same input (a `Group`: query, key and value, for one) can be laid side by side
in one tensor (`join_`), which keeps their values and needs no memory; one product then serves all of them. Weights can
also be packed in the order that oneDNN reads fastest (`PackedLinear`). Knows nothing of families and caches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError
from selfspec.model.dispatch import calls_itself, device_of

_PACKED_FOR = 16  # rows that oneDNN is told to expect; the order that it then chooses suits one row and hundreds too
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
    if not exact or module.max_norm is not None:
        return lambda ids: module(ids)
    return partial(torch.embedding, module.weight.detach())


def linear(module: Any) -> Call:
    """A linear from `[N, in]` to `[N, out]`: an exact `nn.Linear` without a module call's overhead."""
    if (whole := _whole_parts([module])) is not None:
        return whole.product
    if not is_exact(module):
        return on_rows(module)
    return _product(module.weight.detach(), None if module.bias is None else module.bias.detach())


def linear_over(module: Any, outputs: Sequence[int]) -> Call | None:
    """A linear from `[N, in]` to `[N, out]` of which only `outputs` are computed; the others are -inf.

    It holds a copy of the weight's rows. None where the weight is not at hand (quantised, adapted, offloaded).
    """
    at = torch.tensor(outputs, device=device_of(module))
    if isinstance(module, PartLinear) and not isinstance(module, PackedLinear):
        product = module.over(at)
    elif is_readable(module):
        weight = module.weight.detach().index_select(0, at).t().contiguous()
        product = _product(weight.t(), None if module.bias is None else module.bias.detach().index_select(0, at))
    else:
        return None
    out = module.out_features  # and not the module, which may hold the whole in few bits

    def spread(x: Tensor) -> Tensor:
        x = x.to(at.device)
        return x.new_full((len(x), out), -torch.inf).index_copy_(1, at, product(x).to(x.dtype))

    return spread


def on_rows(module: Any) -> Call:
    """A module as a callable on rows `[N, D]`; it sees the three dimensions that it would in its own model."""
    return lambda x: module(x.unsqueeze(0)).squeeze(0)


def linear_onto(module: Any) -> Onto:
    """A linear whose output for `x` `[N, in]` is added to `base` `[N, out]` in place: `f(base, x)`."""
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
        weight = _whole([module.weight.detach() for module in modules])
        biases = [module.bias.detach() for module in modules if module.bias is not None]
        bias = _whole(biases) if len(biases) == len(modules) else None
        if weight is not None and (bias is not None or not biases):
            product = _product(weight, bias)
            return lambda x, out: product(x, out=out)
    if (parts := _whole_parts(modules)) is not None:
        multiply = parts.product
        return lambda x, out: out.copy_(multiply(x))
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

    `writes`: what they give is added to the residual stream.
    """

    parent: Any
    names: tuple[str, ...]
    writes: bool = False

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


def _whole(parts: Sequence[Tensor]) -> Tensor | None:
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


def _whole_parts(modules: Sequence[Any]) -> Product | None:
    """The product that `modules` are all the parts of, in order; None where they are not."""
    if not all(isinstance(module, PartLinear) and is_plain(module) for module in modules):
        return None
    whole, start = modules[0].whole, 0
    for module in modules:
        if module.whole is not whole or module.start != start:
            return None
        start += module.out_features
    return whole if start == whole.out else None


def is_exact(module: nn.Module) -> bool:
    """Whether a module is an `nn.Linear`, no subclass, without hooks and with its weight loaded."""
    return type(module) is nn.Linear and is_plain(module) and not module.weight.is_meta


def is_readable(module: nn.Module) -> bool:
    """Whether a linear's weight is at hand, and is all that it multiplies with."""
    return is_exact(module) or (type(module) is PackedLinear and is_plain(module))


class Product(Protocol):
    """What multiplies one or more linears' weights, as one, with rows `[N, in]`; `out`: outputs of all."""

    out: int

    @property
    def product(self) -> Call:
        """What multiplies."""


class PartLinear(nn.Module):
    """Stands for a linear whose weight is some rows, from `start` on, of what `whole` multiplies with.

    Its own forward, which calls these one by one, is slower: each computes the whole product and returns its part.
    """

    def __init__(self, whole: Product, start: int, linear: Any) -> None:
        super().__init__()
        self.whole, self.start = whole, start
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """The product with `x` `[.., in]`."""
        return self.whole.product(x).narrow(-1, self.start, self.out_features)

    def over(self, outputs: Tensor) -> Call:
        """The product with the weight's rows `outputs` alone."""
        raise NotImplementedError


class Packed:
    """A weight `[out, in]` in an order of oneDNN's, which makes products with 8 rows little dearer than with one.

    float32 or bfloat16 on the CPU. Raises whatever torch raises where oneDNN cannot pack it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR)
        self.dtype, self.bias, self.out = weight.dtype, bias, len(weight)
        self.product: Call = partial(_packed_product, weight=self.tensor, bias=bias)

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(t.numel() * t.element_size() for t in (self.tensor, self.bias) if t is not None)

    def unpacked(self) -> Tensor:
        """The weight as it was, exactly."""
        weight: Tensor = self.tensor.to_dense(self.dtype)
        return weight

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        return Packed(self.unpacked(), copy.deepcopy(self.bias, memo))


def _packed_product(x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return product


class PackedLinear(PartLinear):
    """Takes the place of an `nn.Linear` whose weight has been packed, alone or together with others' over its input.

    `weight` unpacks it each time it is read: it is no parameter. A model with these can be called, copied and saved as
    before, but neither trained nor moved.
    """

    whole: Packed

    def __init__(self, packed: Packed, start: int, linear: nn.Linear) -> None:
        super().__init__(packed, start, linear)
        self.bias = None if packed.bias is None else packed.bias.narrow(0, start, linear.out_features)

    @property
    def packed(self) -> Packed:
        """The packed weight."""
        return self.whole

    @property
    def weight(self) -> Tensor:
        """The weight `[out, in]`, unpacked."""
        return self.packed.unpacked().narrow(0, self.start, self.out_features)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight.contiguous()
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        dtype = self.packed.dtype
        moved = fn(torch.zeros(1, dtype=dtype))
        if moved.dtype != dtype or moved.device.type != "cpu":
            kind = str(dtype).removeprefix("torch.")
            raise SelfspecError(f"packed weights stay {kind} on the CPU; load the model anew to move or cast it")
        return self


@torch.no_grad()
def pack_(group: Group) -> None:
    """Replace a group's exact linears by `PackedLinear`: parts of one packed weight, unless only some have a bias."""
    modules = group.modules
    if any((module.bias is None) != (modules[0].bias is None) for module in modules):
        for name in group.names:
            pack_(Group(group.parent, (name,)))
        return
    bias = None if modules[0].bias is None else torch.cat([module.bias.detach() for module in modules])
    packed, start = Packed(torch.cat([module.weight.detach() for module in modules]), bias), 0
    for name, module in zip(group.names, modules, strict=True):
        setattr(group.parent, name, PackedLinear(packed, start, module))
        start += module.out_features
