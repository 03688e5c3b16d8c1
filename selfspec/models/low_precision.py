"""Quantised copies of linears for drafting, and such weights in the order in which `native.cpp` reads them.

Only weights are quantised, rounding to nearest: int8 with a scale for each output, int4 with a scale and a zero point
for each output and group of inputs. `kernel_for` chooses the `Kernel` that multiplies with them: the native one on a
CPU with a compiler, elsewhere by timing. The kernel `fake` multiplies with the dequantised weights in the model's
dtype; the results of all other kernels are within rounding of it. Rows of an input never affect each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.models.linears import Call, Group, InPlace, PartLinear, is_readable
from selfspec.models.native_library import KINDS, Kind, library

Bits = Literal[8, 4]
GROUPS = (64, 32)  # int4 group sizes; the first that divides the number of inputs is used
_ELEMENTS = 2**22  # weights to quantise at once


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantised weight `[out, in]`, by output and group of inputs (in int8, all inputs are one group).

    The weight is `values` * `scale` in int8, and (`values` - 8) * `scale` + `zero` in int4. `values` are int8
    `[out, in]`; `scale` and the zero point `zero` are bfloat16 `[out, groups]`, as kernels read them.
    """

    bits: Bits
    values: Tensor
    scale: Tensor
    zero: Tensor | None = None

    @property
    def bytes(self) -> int:
        """The bytes of the weight as kernels store it, including scales and zero points."""
        return self.values.numel() * self.bits // 8 + self.scale.numel() * (2 if self.zero is None else 4)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weight `[out, in]`, computed a few outputs at a time to save memory."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        weight = torch.empty(self.values.shape, dtype=dtype, device=self.values.device)
        rows = max(1, _ELEMENTS // weight.shape[1])
        tensors = (weight, self.values, self.scale, self.scale if self.zero is None else self.zero)
        for part, values, scale, zero in zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True):
            grouped = values.view(len(values), scale.shape[1], -1).to(exact)
            if self.zero is None:
                grouped.mul_(scale.to(exact).unsqueeze(-1))
            else:
                grouped.sub_(8).mul_(scale.to(exact).unsqueeze(-1)).add_(zero.to(exact).unsqueeze(-1))
            part.copy_(grouped.view(part.shape))
        return weight


@torch.no_grad()
def quantize(weight: Tensor, bits: Bits) -> QuantizedWeight:
    """Quantise a weight `[out, in]`, rounding to nearest, a few outputs at a time to save memory.

    int8 is symmetric, with a scale for each output; int4 spans the range from the smallest to the largest value of each
    group of inputs.
    """
    parts = [_quantize_rows(rows, bits) for rows in torch.split(weight, max(1, _ELEMENTS // weight.shape[1]))]
    values, scale = torch.cat([part.values for part in parts]), torch.cat([part.scale for part in parts])
    zeros = [part.zero for part in parts if part.zero is not None]
    return QuantizedWeight(bits, values, scale, torch.cat(zeros) if zeros else None)


def _quantize_rows(weight: Tensor, bits: Bits) -> QuantizedWeight:
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
    """Return the bytes of a quantised weight `[out, in]`, including scales.

    Not counted: `fake` keeps the weight in the model's dtype, and a kernel may keep another copy of the weight once it
    has multiplied several rows.
    """
    return out * into + 2 * out if bits == 8 else out * into // 2 + 4 * out * (into // (groups_of(into) or into))


def is_quantizable(modules: Sequence[Any], bits: Bits) -> bool:
    """Return whether linears can be quantised: readable, of more than `bits` bits, with inputs that fit int4 groups."""
    if not all(map(is_readable, modules)) or any((getattr(module, "bits", None) or 16) <= bits for module in modules):
        return False
    return bits == 8 or all(groups_of(module.in_features) for module in modules)


def groups_of(into: int) -> int | None:
    """Return the int4 group size for `into` inputs; None if no size in `GROUPS` divides them."""
    return next((size for size in GROUPS if into % size == 0), None)


Kernel = Callable[[QuantizedWeight, torch.dtype], Call]
"""`kernel(weight, dtype)` packs a weight for a model of `dtype`, and returns its product with rows `[N, in]`.

The product may have another dtype.
"""


@runtime_checkable
class Rounding(Protocol):
    """A kernel that rounds weights to nearest itself, faster than `quantize`."""

    def rounded(self, weight: Tensor, bits: Bits) -> Call | None:
        """Return the product with `quantize(weight, bits)`; None if the kernel cannot round the weight."""


def fake(weight: QuantizedWeight, dtype: torch.dtype) -> Call:
    """Return the product with the dequantised weight in `dtype`: the reference for other kernels, and no faster."""
    dequantized = weight.weight(dtype).t()
    return lambda x: x.to(dtype) @ dequantized


class FusedQuantizedLinear:
    """The quantised weights `[out, in]` of linears that read the same input, concatenated by outputs.

    The weights are quantised when `product` is first read, unless they are `quantized` already.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, bits: Bits, kernel: Kernel, quantized: QuantizedWeight | None = None
    ) -> None:
        self.out, self.dtype, self.device = len(weight), weight.dtype, weight.device
        self.bytes = bytes_of(bits, *weight.shape) if quantized is None else quantized.bytes
        self._made_of: tuple[Tensor | QuantizedWeight, Tensor | None, Bits, Kernel] | None
        self._made_of = (weight if quantized is None else quantized, bias, bits, kernel)

    @cached_property
    def product(self) -> Call:
        """The product of rows `[N, in]` with the quantised weights."""
        assert self._made_of is not None
        (weight, bias, bits, kernel), self._made_of = self._made_of, None
        multiply = kernel.rounded(weight, bits) if isinstance(weight, Tensor) and isinstance(kernel, Rounding) else None
        if multiply is None:
            multiply = kernel(weight if isinstance(weight, QuantizedWeight) else quantize(weight, bits), self.dtype)
        if bias is not None and isinstance(multiply, InPlace):
            return multiply.with_bias(bias)
        return multiply if bias is None else lambda x: multiply(x).to(bias.dtype) + bias


class LowPrecisionLinear(PartLinear):
    """A quantised linear, alone or fused with other linears that read the same input.

    `again(weight, bias)` quantises another weight to the same bits, for the same kernel.
    """

    place: Tensor  # an empty tensor with the linear's device and dtype

    def __init__(
        self,
        fused: FusedQuantizedLinear,
        start: int,
        linear: Any,
        again: Callable[[Tensor, Tensor | None], FusedQuantizedLinear],
    ) -> None:
        super().__init__(fused, start, linear)
        self._again, self._source = again, [linear]  # in a list, so that it is not registered as a submodule
        self.register_buffer("place", torch.empty(0, dtype=fused.dtype, device=fused.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product `[.., out]` in the dtype of `x` `[.., in]`, flattened to the rows that kernels take."""
        rows = super().forward(x.reshape(-1, self.in_features)).to(x.dtype)
        return rows.view(*x.shape[:-1], self.out_features) if x.dim() != 2 else rows

    def with_outputs(self, outputs: Tensor) -> Call:
        """Return the product with only the rows `outputs` of the original weight, quantised again."""
        (source,) = self._source
        bias = None if source.bias is None else source.bias.detach().index_select(0, outputs)
        return self._again(source.weight.detach().index_select(0, outputs), bias).product


@torch.no_grad()
def quantize_group(
    group: Group,
    bits: Bits,
    kernel: Kernel,
    change: Tensor | None = None,
    quantized: QuantizedWeight | None = None,
) -> tuple[Group, int]:
    """Return a group of quantised copies of a group's linears, and their bytes; the group itself is not changed.

    `change` `[out, in]`, over the concatenated outputs, is added to the weights before they are quantised. `quantized`:
    the concatenated weights, quantised before; without it they are rounded to nearest.
    """

    def fused_linear(weight: Tensor, bias: Tensor | None) -> FusedQuantizedLinear:
        return FusedQuantizedLinear(weight, bias, bits, kernel)

    modules = group.modules
    weights = [module.weight.detach() for module in modules]
    bias: Tensor | None = None
    if any(module.bias is not None for module in modules):
        bias = torch.cat(
            [w.new_zeros(len(w)) if m.bias is None else m.bias for w, m in zip(weights, modules, strict=True)]
        )
    weight, start = weights[0] if len(weights) == 1 else torch.cat(weights), 0
    weight = weight if change is None else weight + change.to(weight)
    together = FusedQuantizedLinear(weight, bias, bits, kernel, quantized)
    linears: dict[str, LowPrecisionLinear] = {}
    for name, module in zip(group.names, modules, strict=True):
        linears[name] = LowPrecisionLinear(together, start, module, fused_linear)
        start += module.out_features
    return replace(group, parent=SimpleNamespace(**linears)), together.bytes


_TILE, _BLOCK = 16, 32  # outputs of a tile; inputs of a row that share a scale


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A quantised weight `[out, into]` in tiles of 16 outputs.

    `values`: in int8 the values plus 128 as `[tiles, inputs / 4, 16, 4]`; in int4 `[tiles, inputs / 8, 16, 4]`, two to
    a byte. `scale`: in int8 the scales `[outputs]`; in int4 the scales and the zero points `[tiles, groups, 2, 16]`.
    Outputs are padded to a multiple of 16, and the inputs of an int8 weight to a multiple of 32.
    """

    values: Tensor
    scale: Tensor
    out: int
    into: int

    @classmethod
    def of(cls, weight: QuantizedWeight) -> PackedWeight:
        """Pack a quantised weight."""
        out, into = weight.values.shape
        more = -out % _TILE
        if weight.zero is None:
            values = F.pad(weight.values, (0, -into % _BLOCK, 0, more))
            tiles = values.view(-1, _TILE, values.shape[1] // 4, 4).transpose(1, 2)
            return cls((tiles.to(torch.uint8) ^ 128).contiguous(), F.pad(weight.scale.flatten(), (0, more)), out, into)
        fours = F.pad(weight.values, (0, 0, 0, more)).to(torch.uint8).view(-1, _TILE, into // 8, 2, 4)
        values = (fours[..., 0, :] | fours[..., 1, :] << 4).transpose(1, 2)
        both = torch.stack([F.pad(part, (0, 0, 0, more)) for part in (weight.scale, weight.zero)])
        grid = both.view(2, -1, _TILE, both.shape[2]).permute(1, 3, 0, 2)
        return cls(values.contiguous(), grid.contiguous(), out, into)

    @classmethod
    def rounded(cls, weight: Tensor, bits: Bits) -> PackedWeight:
        """Return `of(quantize(weight, bits))`, computed by native code in a fraction of the time.

        `weight` `[out, into]` is float32 or bfloat16, on the CPU.
        """
        out, into = weight.shape
        tiles, weight = -(-out // _TILE), weight.contiguous()
        if bits == 8:
            group, values = 1, torch.empty(tiles, -(-into // _BLOCK) * _BLOCK // 4, _TILE, 4, dtype=torch.uint8)
            scale = torch.empty(tiles * _TILE, dtype=torch.bfloat16)
        else:
            group, values = groups_of(into) or into, torch.empty(tiles, into // 8, _TILE, 4, dtype=torch.uint8)
            scale = torch.empty(tiles, into // group, 2, _TILE, dtype=torch.bfloat16)
        sizes = KINDS[weight.dtype], _kind(bits), weight.data_ptr(), out, into, group.bit_length() - 1
        library().selfspec_quantize(*sizes, values.data_ptr(), scale.data_ptr(), torch.get_num_threads())
        return cls(values, scale, out, into)

    @property
    def bits(self) -> Bits:
        """The bits of a value: 8 or 4."""
        return 8 if self.scale.dim() == 1 else 4

    @property
    def kind(self) -> Kind:
        """How native code is to read the weight."""
        return _kind(self.bits)

    @property
    def group(self) -> int:
        """The binary logarithm of the int4 group size; 0 in int8."""
        return 0 if self.bits == 8 else (self.into // self.scale.shape[1]).bit_length() - 1

    def unpacked(self) -> QuantizedWeight:
        """Return the weight that was packed."""
        tiles = self.values.transpose(1, 2)  # [tiles, 16, inputs / 4 or / 8, 4]
        if self.bits == 8:
            plain = (tiles ^ 128).reshape(len(self.scale), -1)[: self.out, : self.into].to(torch.int8)
            return QuantizedWeight(8, plain.contiguous(), self.scale[: self.out].view(-1, 1))
        plain = torch.stack([tiles & 15, tiles >> 4], 3).reshape(-1, self.into)[: self.out].to(torch.int8)
        both = self.scale.permute(2, 0, 3, 1).reshape(2, -1, self.scale.shape[1])[:, : self.out]
        return QuantizedWeight(4, plain.contiguous(), both[0].contiguous(), both[1].contiguous())


def _kind(bits: Bits) -> Kind:
    return Kind.INT8 if bits == 8 else Kind.INT4
