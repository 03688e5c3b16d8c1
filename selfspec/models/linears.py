"""Linears as the runtime calls them: without a module call's overhead, and fused if they read the same input.

The parameters of linears that read the same input (a `Group`, such as query, key and value) can be joined in one tensor
(`join_`), which keeps their values and needs no extra memory; one product then computes all of them. The weight of a
`PartLinear` is stored in another form, such as packed or quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from selfspec.models.dispatch import calls_itself, device_of, is_dense, is_for_one_pass
from selfspec.models.triton_kernels.switch import DTYPES, triton_enabled

if TYPE_CHECKING:
    from selfspec.models.triton_kernels.products import TritonProduct

Call = Callable[[Tensor], Tensor]
Into = Callable[[Tensor, Tensor], object]  # f(x, out): writes the output for x to out
Onto = Callable[[Tensor, Tensor], object]  # f(base, x): adds the output for x to base, in place


def is_plain(module: nn.Module, *, offloaded: bool = False) -> bool:
    """Return whether calling `module` runs its class's own forward and nothing else: no hooks, no parametrisation.

    What is there for one pass of some thread does not count. accelerate's hooks that move inputs are allowed, as the
    runtime's inputs are on the module's device already; with `offloaded`, so are hooks that load offloaded weights.
    """
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if not all(map(is_for_one_pass, hooks)):
        return False
    return calls_itself(module, offloaded=offloaded) and not hasattr(module, "parametrizations")


def embedding(module: Any) -> Call:
    """Return an embedding of token ids `[B, n]`; an exact `nn.Embedding` is called without a module call's overhead."""
    exact = type(module) is nn.Embedding and is_plain(module) and not module.weight.is_meta
    if not exact or module.max_norm is not None or not is_dense(module.weight):
        return lambda ids: module(ids)
    return partial(torch.embedding, module.weight.detach())


def linear(module: Any) -> Call:
    """Return a linear from `[N, in]` to `[N, out]`; an exact `nn.Linear` is called without a module call's overhead."""
    if (fused := fused_product([module])) is not None:
        return fused.product
    if not is_exact(module):
        return on_rows(module)
    weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
    return _triton(weight, bias) or _product(weight, bias)


def _triton(weight: Tensor, bias: Tensor | None) -> TritonProduct | None:
    """Return the product with a weight by a Triton kernel; None if these are off or do not support the weight."""
    if not triton_enabled(weight.device) or not weight.is_contiguous() or weight.dtype not in DTYPES:
        return None
    from selfspec.models.triton_kernels.products import TritonProduct

    return TritonProduct.dense(weight, bias)


def logits_linear(module: Any) -> Call:
    """Return a head from `[N, in]` to logits `[N, out]`: float32 on CUDA from weights in half precision.

    Logits rounded to bfloat16 are often equal, and the largest then depends on the kernel that computed them.
    """
    if is_exact(module) and module.bias is None:
        weight = module.weight.detach()
        if (few_rows := _triton(weight, None)) is not None:
            return few_rows.float32
        return _float32_product(weight) or linear(module)
    return linear(module)


def _float32_product(weight: Tensor) -> Call | None:
    """Return the product with a weight `[out, in]` in half precision, accumulated and returned in float32, on CUDA.

    Returns None for other weights, and where torch has no such product (before version 2.8).
    """
    if weight.device.type != "cuda" or weight.dtype not in (torch.bfloat16, torch.float16):
        return None
    if not hasattr(torch.ops.aten.mm, "dtype"):
        return None
    return partial(torch.mm, mat2=weight.t(), out_dtype=torch.float32)


def linear_over(module: Any, outputs: Sequence[int]) -> Call | None:
    """Return a linear from `[N, in]` to `[N, out]` that computes only the outputs `outputs`; all others are -inf.

    The linear holds a copy of the weight's rows `outputs`. Returns None if the weight cannot be read (quantised,
    adapted, offloaded).
    """
    indices = torch.tensor(outputs, device=device_of(module))
    product = module.with_outputs(indices) if isinstance(module, PartLinear) else None
    if product is None:
        if not is_readable(module):
            return None
        weight = module.weight.detach().index_select(0, indices).t().contiguous().t()
        bias = None if module.bias is None else module.bias.detach().index_select(0, indices)
        product = (_float32_product(weight) if bias is None else None) or _product(weight, bias)
    return SparseOutputs(
        product, indices, module.out_features
    )  # no reference to the module, to free its quantised weight


@dataclass(frozen=True, slots=True)
class Wrapped:
    """Base of callables that do a further step before or after the product `call`."""

    call: Call


@dataclass(frozen=True, slots=True)
class Moved(Wrapped):
    """The product `call` on `device`, to which the input is moved first."""

    device: torch.device

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product with rows `x` `[N, in]` on any device."""
        return self.call(x.to(self.device))


@dataclass(frozen=True, slots=True)
class Mapped(Wrapped):
    """The product `call`, whose outputs `then` maps one by one."""

    then: Call

    def __call__(self, x: Tensor) -> Tensor:
        """Return the mapped product with rows `x` `[N, in]`."""
        return self.then(self.call(x))


@dataclass(frozen=True, slots=True, eq=False)
class SparseOutputs(Wrapped):
    """A product with `out` outputs, of which `call` computes those at `indices`; all others are -inf."""

    indices: Tensor
    out: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return all outputs `[N, out]`."""
        x = x.to(self.indices.device)
        computed = self.call(x)
        return computed.new_full((len(x), self.out), -torch.inf).index_copy_(1, self.indices, computed)


def on_rows(module: Any) -> Call:
    """Return a module as a callable on rows `[N, D]`; the module is called with `[1, N, D]`."""
    return lambda x: module(x.unsqueeze(0)).squeeze(0)


def linear_onto(module: Any) -> Onto:
    """Return `f(base, x)`, which adds a linear's output for `x` `[N, in]` to `base` `[N, out]` in place."""
    if (fused := fused_product([module])) is not None and isinstance(fused.product, InPlace):
        return fused.product.add
    if not is_exact(module) or module.bias is not None:
        call = linear(module)
        return lambda base, x: base.add_(call(x))
    weight = module.weight.detach()
    if (few_rows := _triton(weight, None)) is not None:
        return few_rows.add
    if not _vectors(weight):
        across = weight.t()
        return lambda base, x: base.addmm_(x, across)

    def onto(base: Tensor, x: Tensor) -> object:
        if len(x) > 1:
            return base.addmm_(x, weight.t())
        return base[0].addmv_(weight, x[0])

    return onto


def side_by_side(modules: Sequence[Any]) -> Into:
    """Return `f(x, out)`, which writes the outputs of several linears for `x` `[N, in]` side by side.

    One product computes all outputs if the linears are joined (`join_`) or fused; otherwise each linear is called.
    `out` is `[N, sum of the linears' outputs]`.
    """
    if (joined := _joined(modules)) is not None:
        if (few_rows := _triton(*joined)) is not None:
            return few_rows.write
        product = _product(*joined)
        return lambda x, out: product(x, out=out)
    if (parts := fused_product(modules)) is not None:
        multiply = parts.product
        return multiply.write if isinstance(multiply, InPlace) else lambda x, out: out.copy_(multiply(x))
    calls = [linear(module) for module in modules]
    return lambda x, out: torch.cat([call(x) for call in calls], dim=-1, out=out)


def gated(modules: Sequence[Any]) -> Into | None:
    """Return `f(x, out)`, which writes silu(gate) * up to `out`, for the linears gate and up.

    Returns None if there is no such kernel, or if the linears are neither joined nor fused.
    """
    joined, parts = _joined(modules), fused_product(modules)
    multiply = _triton(*joined) if joined is not None else None if parts is None else parts.product
    gate: Into | None = getattr(multiply, "gate", None)
    return gate


def _joined(modules: Sequence[Any]) -> tuple[Tensor, Tensor | None] | None:
    """Return the joined weight and bias of linears (`join_`); None if they are not joined."""
    if not all(map(is_exact, modules)):
        return None
    weight = joined_tensor([module.weight.detach() for module in modules])
    biases = [module.bias.detach() for module in modules if module.bias is not None]
    bias = joined_tensor(biases) if len(biases) == len(modules) else None
    return None if weight is None or (bias is None and biases) else (weight, bias)


def _product(weight: Tensor, bias: Tensor | None) -> Callable[..., Tensor]:
    """Return the function x -> x @ weight.t() + bias; the weight `[out, in]` is transposed once, not at each call."""
    across = weight.t()
    several = partial(torch.mm, mat2=across) if bias is None else partial(torch.addmm, bias, mat2=across)
    if not _vectors(weight):
        return several
    matvec = partial(torch.mv, weight) if bias is None else partial(torch.addmv, bias, weight)

    def product(x: Tensor, out: Tensor | None = None) -> Tensor:
        if len(x) > 1:
            return several(x, out=out)
        return matvec(x[0], out=None if out is None else out[0]).unsqueeze(0)

    return product


def _vectors(weight: Tensor) -> bool:
    """Return whether a single row is multiplied faster as a vector: on a CPU, with a weight stored by rows.

    torch's matrix product would first reorder a bfloat16 weight at every call. For float16 the matrix product is
    faster, as torch's matrix-vector product is not vectorised.
    """
    return weight.device.type == "cpu" and weight.is_contiguous() and weight.dtype != torch.float16


@dataclass(frozen=True, slots=True)
class Group:
    """Linears that read the same input: the attributes `names` of `parent`.

    `writes`: the linears' output is added to the residual stream. `partial`: the linears are sharded by inputs (tensor
    parallel), so that each process computes a partial sum.
    """

    parent: Any
    names: tuple[str, ...]
    writes: bool = False
    partial: bool = False

    @property
    def modules(self) -> list[Any]:
        """The linears, as `parent` holds them now."""
        return [getattr(self.parent, name) for name in self.names]

    @property
    def module(self) -> Any:
        """The linear of a group of a single linear."""
        (module,) = self.modules
        return module

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of outputs of all linears, and of their inputs."""
        modules = self.modules
        return sum(module.out_features for module in modules), modules[0].in_features


@torch.no_grad()
def join_(group: Group, *, columns: bool = False) -> None:
    """Join the parameters of a group in one tensor, in place.

    Every parameter keeps its values, shape and identity, and becomes a view of the joined tensor. With `columns`,
    weights are stored by columns, so that `weight.t()` is contiguous. Only exact `nn.Linear`s of one dtype on one
    device are joined; anything else (adapters, quantised or offloaded weights, hooks) is left unchanged.
    """
    modules = group.modules
    if not (columns or len(modules) > 1) or not all(map(is_exact, modules)):
        return
    for name in ("weight", "bias"):
        parts = [getattr(module, name) for module in modules]
        if any(part is None or part.dtype != parts[0].dtype or part.device != parts[0].device for part in parts):
            continue
        across = columns and name == "weight"
        joined = torch.cat([part.data.t() if across else part.data for part in parts], dim=1 if across else 0)
        joined, row = joined.t() if across else joined, 0
        for part in parts:
            part.data = joined.narrow(0, row, len(part))
            row += len(part)


def joined_tensor(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor whose consecutive rows are `parts`, by rows or columns; None if `parts` are not adjacent."""
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


def fused_product(modules: Sequence[Any]) -> Product | None:
    """Return the fused product that consists of exactly `modules`, in order; None if there is no such product."""
    if not all(isinstance(module, PartLinear) and module.current and is_plain(module) for module in modules):
        return None
    fused, start = modules[0].fused, 0
    for module in modules:
        if module.fused is not fused or module.start != start:
            return None
        start += module.out_features
    return fused if start == fused.out else None


def is_exact(module: nn.Module) -> bool:
    """Return whether a module is an `nn.Linear` (no subclass) without hooks, whose weight is a loaded plain tensor."""
    exact = type(module) is nn.Linear and is_plain(module) and not module.weight.is_meta
    return exact and is_dense(module.weight)


def is_readable(module: nn.Module) -> bool:
    """Return whether a linear's weight can be read, and is exactly what it multiplies with."""
    return is_exact(module) or (isinstance(module, PartLinear) and module.readable and is_plain(module))


@runtime_checkable
class InPlace(Protocol):
    """A product that writes its output to a given tensor."""

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write the product with rows `x` `[N, in]` to `out` `[N, out]`."""

    def add(self, base: Tensor, x: Tensor) -> None:
        """Add the product with rows `x` `[N, in]` to `base` `[N, out]`."""

    def with_bias(self, bias: Tensor) -> InPlace:
        """Return a product with the same weight and a bias."""


class Product(Protocol):
    """A fused product of one or more linears with rows `[N, in]`; `out` is their total number of outputs."""

    out: int

    @property
    def product(self) -> Call:
        """The function from rows `[N, in]` to the product `[N, out]` with the fused weight."""


class PartLinear(nn.Module):
    """Replacement of a linear whose weight is part of the fused weight of `fused`: the rows from `start` on.

    `forward` computes the whole fused product and returns this linear's outputs, so the runtime calls `fused` once
    instead. `readable`: whether `weight` is exactly what the linear multiplies with. `bits`: the bits of a quantised
    weight, None in full precision.
    """

    readable: ClassVar[bool] = False
    bits: int | None = None

    def __init__(self, fused: Product, start: int, linear: Any) -> None:
        super().__init__()
        self.fused, self.start = fused, start
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Return the product `[.., out]` with `x` `[.., in]`."""
        return self.fused.product(x).narrow(-1, self.start, self.out_features)

    @property
    def current(self) -> bool:
        """Whether `fused` still multiplies with this module's weight."""
        return True

    def with_outputs(self, outputs: Tensor) -> Call | None:
        """Return the product with only the rows `outputs` of the weight, stored as before; None if unsupported."""
        return None
