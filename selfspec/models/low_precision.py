"""Linears whose weights are held a second time, in few bits, for drafting.

Only weights are rounded: to the nearest, in 8 bits for each output, in 4 bits for groups of inputs. What multiplies
them (a `Kernel`) differs by machine and is measured; `fake` multiplies with the rounded weights in the model's own
dtype, exactly what the others approximate. Rows never see each other. Knows nothing of families and caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from selfspec.models.linears import Call, Group, InPlace, PartLinear, is_readable

Bits = Literal[8, 4]
GROUPS = (64, 32)  # inputs that share a scale and a zero in 4 bits, the first of them that divides the inputs


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight `[out, in]` in few bits, by output and group of inputs (in 8 bits all inputs are one group).

    It stands for `values` * `scale` in 8 bits, for (`values` - 8) * `scale` + `zero` in 4 bits. `values` are int8
    `[out, in]`, `scale` and `zero` `[out, groups]` of bfloat16, as which kernels read them.
    """

    bits: Bits
    values: Tensor
    scale: Tensor
    zero: Tensor | None = None

    def weight(self, dtype: torch.dtype) -> Tensor:
        """What the values stand for."""
        out, into = self.values.shape
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        grouped = self.values.view(out, self.scale.shape[1], -1).to(exact)
        if self.zero is None:
            weight = grouped.mul_(self.scale.to(exact).unsqueeze(-1))
        else:
            weight = grouped.sub_(8).mul_(self.scale.to(exact).unsqueeze(-1)).add_(self.zero.to(exact).unsqueeze(-1))
        return weight.view(out, into).to(dtype)


@torch.no_grad()
def quantize(weight: Tensor, bits: Bits) -> QuantizedWeight:
    """A weight `[out, in]`, each value rounded to the nearest.

    In 8 bits symmetrically for each output, in 4 bits between the least and the largest of each group of inputs.
    """
    out, into = weight.shape
    weight = weight.contiguous()
    if bits == 8:
        scale = (weight.abs().amax(1, keepdim=True).float() / 127).clamp(min=1e-12).bfloat16()
        values = (weight.float() / scale.float()).round_().clamp_(-127, 127).to(torch.int8)
        return QuantizedWeight(8, values, scale)
    grouped = weight.float().view(out, -1, groups_of(into) or into)
    low, high = grouped.amin(2), grouped.amax(2)
    scale = ((high - low) / 15).clamp(min=1e-12).bfloat16()
    zero = (low + 8 * scale.float()).bfloat16()
    first = (zero.float() - 8 * scale.float()).unsqueeze(-1)
    values = ((grouped - first) / scale.float().unsqueeze(-1)).round_().clamp_(0, 15).to(torch.int8)
    return QuantizedWeight(4, values.view(out, into), scale, zero)


def bytes_of(bits: Bits, out: int, into: int) -> int:
    """Memory that a weight `[out, in]` takes in so many bits, scales included.

    `fake` takes as much as the model's own weight, and a kernel may take it again when several rows first come.
    """
    return out * into + 2 * out if bits == 8 else out * into // 2 + 4 * out * (into // (groups_of(into) or into))


def roundable(modules: Sequence[Any], bits: Bits) -> bool:
    """Whether linears can be had in so many bits: their weights are at hand, in more bits, and fit into groups."""
    if not all(map(is_readable, modules)) or any((getattr(module, "bits", None) or 16) <= bits for module in modules):
        return False
    return bits == 8 or all(groups_of(module.in_features) for module in modules)


def groups_of(into: int) -> int | None:
    """How many inputs share a scale in 4 bits; None where they do not fit into groups."""
    return next((size for size in GROUPS if into % size == 0), None)


Kernel = Callable[[QuantizedWeight, torch.dtype], Call]
"""`kernel(rounded, dtype)` packs a weight; what it gives multiplies rows `[N, in]` of the dtype, or of bfloat16."""


def fake(weight: QuantizedWeight, dtype: torch.dtype) -> Call:
    """A product with the rounded weight in the model's dtype: what the others are measured by."""
    whole = weight.weight(dtype).t()
    return lambda x: x.to(dtype) @ whole


class FusedQuantizedLinear:
    """Weights `[out, in]` of linears that read the same input, one below the other, in few bits.

    They are rounded when `product` is first asked for.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: Bits, kernel: Kernel) -> None:
        self.out, self.dtype, self.device = len(weight), weight.dtype, weight.device
        self.bytes = bytes_of(bits, *weight.shape)
        self._made_of: tuple[Tensor, Tensor | None, Bits, Kernel] | None = (weight, bias, bits, kernel)

    @cached_property
    def product(self) -> Call:
        """What multiplies rows `[N, in]` with them."""
        assert self._made_of is not None
        (weight, bias, bits, kernel), self._made_of = self._made_of, None
        multiply = kernel(quantize(weight, bits), weight.dtype)
        if bias is not None and isinstance(multiply, InPlace):
            return multiply.with_bias(bias)
        return multiply if bias is None else lambda x: multiply(x).to(bias.dtype) + bias


class LowPrecisionLinear(PartLinear):
    """A linear in few bits, alone or with others over its input. `again(weight, bias)` rounds others as it was."""

    place: Tensor  # on the linear's device, of its dtype

    def __init__(
        self,
        whole: FusedQuantizedLinear,
        start: int,
        linear: Any,
        again: Callable[[Tensor, Tensor | None], FusedQuantizedLinear],
    ) -> None:
        super().__init__(whole, start, linear)
        self._again, self._source = again, [linear]  # in a list, so that it is no module of this one
        self.register_buffer("place", torch.empty(0, dtype=whole.dtype, device=whole.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The product with `x` `[.., in]`, of its dtype: kernels take rows, and tell one from several."""
        rows = super().forward(x.reshape(-1, self.in_features)).to(x.dtype)
        return rows.view(*x.shape[:-1], self.out_features) if x.dim() != 2 else rows

    def over(self, outputs: Tensor) -> Call:
        """The product with the weight's rows `outputs` alone."""
        (source,) = self._source
        bias = None if source.bias is None else source.bias.detach().index_select(0, outputs)
        return self._again(source.weight.detach().index_select(0, outputs), bias).product


@torch.no_grad()
def quantize_group(group: Group, bits: Bits, kernel: Kernel, change: Tensor | None = None) -> tuple[Group, int]:
    """A group of linears in few bits in the place of its own, which stay as they are; and the bytes that they take.

    `change` `[out, in]`, of all outputs one below the other, is added to the weights before they are rounded.
    """

    def whole(weight: Tensor, bias: Tensor | None) -> FusedQuantizedLinear:
        return FusedQuantizedLinear(weight, bias, bits, kernel)

    modules = group.modules
    weights = [module.weight.detach() for module in modules]
    bias: Tensor | None = None
    if any(module.bias is not None for module in modules):
        bias = torch.cat(
            [w.new_zeros(len(w)) if m.bias is None else m.bias for w, m in zip(weights, modules, strict=True)]
        )
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    together, start = whole(weight if change is None else weight + change.to(weight), bias), 0
    found: dict[str, LowPrecisionLinear] = {}
    for name, module in zip(group.names, modules, strict=True):
        found[name] = LowPrecisionLinear(together, start, module, whole)
        start += module.out_features
    return replace(group, parent=SimpleNamespace(**found)), together.bytes
