"""GGUF weights in blocks of 32 inputs, as in the file, and the modules that multiply with these weights. CPU only.

Values are exactly the file's, and scales stay float16. With a C++ compiler, selfspec's own kernels read these blocks,
sum in float32, and give a row the same bits in a batch of any size. Without a compiler, each product dequantises the
weight, a slice of outputs at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from selfspec.models.linears import Call
from selfspec.models.native import NativeProduct
from selfspec.models.native_library import Kind, available
from selfspec.models.stored_linear import StoredLinear

BLOCK = 32  # inputs that share a scale
_KINDS = {8: Kind.BLOCKS8, 4: Kind.BLOCKS4}  # by bits
_AT_ONCE = 1024  # outputs dequantised at a time without a compiler


@dataclass(frozen=True, slots=True, eq=False)
class GGUFWeight:
    """A quantised weight `[out, in]` in groups of 32 inputs, which share a scale and, in int4, a zero point.

    In int8, the weight is `values` * scale: `values` is int8 `[out, in]`, and `grid` holds the scales, float16
    `[out, in / 32, 1]`. In int4, it is `values` * scale + zero: `values` is uint8 `[out, in / 2]`, where 16 bytes hold
    a group's inputs 0 to 15 in the low four bits and 16 to 31 in the high four bits; `grid` holds (scale, zero),
    float16 `[out, in / 32, 2]`.
    """

    bits: Literal[8, 4]
    values: Tensor
    grid: Tensor
    fixed: ClassVar[str] = (
        "quantised GGUF weights stay on the CPU and in float32 models; load the model again, dequantised"
    )

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        return len(self.values), self.grid.shape[1] * BLOCK

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.values.nbytes + self.grid.nbytes

    def rows(self, outputs: Tensor | slice) -> GGUFWeight:
        """Return the rows `outputs` of the weight; for a slice, a view."""
        return GGUFWeight(self.bits, self.values[outputs], self.grid[outputs])

    def weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dequantised weight: exact in float32, or rounded once if a zero point is far below its scale."""
        grid = self.grid.float()
        if self.bits == 8:
            values = self.values.view(*self.grid.shape[:2], BLOCK).float().mul_(grid)
        else:
            halves = self.values.view(*self.grid.shape[:2], BLOCK // 2)
            values = torch.cat([halves & 15, halves >> 4], -1).float().mul_(grid[..., :1]).add_(grid[..., 1:])
        return values.view(self.shape).to(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> GGUFWeight:
        return self


def concat_weights(parts: Sequence[GGUFWeight]) -> GGUFWeight:
    """Concatenate the outputs of weights with the same bits and inputs."""
    if len(parts) == 1:
        return parts[0]
    return GGUFWeight(parts[0].bits, torch.cat([p.values for p in parts]), torch.cat([p.grid for p in parts]))


class BlockProduct(NativeProduct):
    """The native product with a `GGUFWeight`; one kernel for any number of rows, so the weight is never dequantised."""

    def __init__(self, blocks: GGUFWeight, bias: Tensor | None = None) -> None:
        self.blocks = GGUFWeight(blocks.bits, blocks.values.contiguous(), blocks.grid.contiguous())
        self.out, self.into = blocks.shape
        self._describe(_KINDS[blocks.bits], 0, self.blocks.values, self.blocks.grid, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product `[N, out]`, in the dtype of `x` `[N, in]`."""
        return self.batch_invariant(x)

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write the product with `x` `[N, in]` to `out` `[N, out]`."""
        if out.dtype == torch.float32:
            self._run(x, out, add=False)
        else:
            out.copy_(self(x))

    def add(self, base: Tensor, x: Tensor) -> None:
        """Add the product with `x` `[N, in]` to `base` `[N, out]`."""
        if base.dtype == torch.float32:
            self._run(x, base, add=True)
        else:
            base.add_(self(x))

    def with_bias(self, bias: Tensor) -> BlockProduct:
        """Return a product with the same weight and a bias `[out]`."""
        return BlockProduct(self.blocks, bias)

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockProduct, (self.blocks, self.bias)


class SlowBlockProduct:
    """The product with a `GGUFWeight` without a compiler: slow, in torch, dequantising `_AT_ONCE` outputs at a time."""

    def __init__(self, blocks: GGUFWeight, bias: Tensor | None = None) -> None:
        self.blocks, self.bias, (self.out, self.into) = blocks, bias, blocks.shape

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product `[N, out]`, in the dtype of `x` `[N, in]`."""
        chunks = [
            x @ self.blocks.rows(slice(o, o + _AT_ONCE)).weight(x.dtype).t() for o in range(0, self.out, _AT_ONCE)
        ]
        product = torch.cat(chunks, -1)
        return product if self.bias is None else product + self.bias.to(x.dtype)

    @property
    def product(self) -> Call:
        """This object, which is itself the function from rows to their product."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SlowBlockProduct:
        return self


def block_product(blocks: GGUFWeight, bias: Tensor | None = None) -> BlockProduct | SlowBlockProduct:
    """Return the native product with a weight, or a `SlowBlockProduct` if native code is not available."""
    return BlockProduct(blocks, bias) if available() else SlowBlockProduct(blocks, bias)


class BlockLinear(StoredLinear):
    """Replacement of a linear whose weight stays quantised, alone or fused with linears that read the same input."""

    fused: BlockProduct | SlowBlockProduct

    def __init__(self, fused: BlockProduct | SlowBlockProduct, start: int, linear: Any) -> None:
        super().__init__(fused, start, linear)
        self.bits = fused.blocks.bits

    def with_outputs(self, outputs: Tensor) -> Call:
        """Return the product with only the rows `outputs` of the weight, still quantised."""
        return block_product(self.fused.blocks.rows(outputs + self.start), self._bias_at(outputs)).product

    def forward(self, x: Tensor) -> Tensor:
        """Return the product `[.., out]` with `x` `[.., in]`."""
        rows = super().forward(x.reshape(-1, self.in_features))
        return rows.reshape(*x.shape[:-1], self.out_features)
