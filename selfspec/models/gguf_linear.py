"""GGUF weights in blocks of 32 inputs, with the file's bits, and the modules that multiply with them. CPU only.

Values are exactly the file's, and so are scales. With a C++ compiler, selfspec's own kernels read these blocks, sum in
float32, and give a row the same bits in a batch of any size. Without a compiler, each product dequantises the weight, a
slice of outputs at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from selfspec.models.gguf_blocks import BlockLayout
from selfspec.models.half_storage import HalfProduct, HalfWeight
from selfspec.models.linears import Call
from selfspec.models.native import NativeProduct, Weight
from selfspec.models.native_library import Kind, available
from selfspec.models.stored_linear import StoredLinear

_AT_ONCE = 1024  # outputs dequantised at a time without a compiler
_FIXED = "quantised GGUF weights stay on the CPU and in float32 models; load the model again, dequantised"


@dataclass(frozen=True, slots=True, eq=False)
class GGUFWeight:
    """A quantised weight `[out, in]` in blocks of 32 inputs.

    `values` is uint8 `[out, in * bits / 8]` (int8 for 8 bits), and `grid` holds the scales, `[out, ..]`; both as
    `layout` describes them.
    """

    layout: BlockLayout
    values: Tensor
    grid: Tensor
    fixed: ClassVar[str] = _FIXED

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return self.layout.bits

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        return len(self.values), self.values.shape[1] * 8 // self.bits

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.values.nbytes + self.grid.nbytes

    def rows(self, outputs: Tensor | slice) -> GGUFWeight:
        """Return the rows `outputs` of the weight; for a slice, a view."""
        return GGUFWeight(self.layout, self.values[outputs], self.grid[outputs])

    def weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dequantised weight, in float32 with the bits that `gguf` gives it."""
        return self.layout.dequantize(self.values, self.grid).view(self.shape).to(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> GGUFWeight:
        return self


Stored = GGUFWeight | HalfWeight
"""A weight as a GGUF file stores it."""


@dataclass(frozen=True, slots=True, eq=False)
class JoinedWeight:
    """Weights with the same inputs and of several types, whose outputs follow one another."""

    parts: tuple[Stored, ...]
    fixed: ClassVar[str] = _FIXED

    @property
    def values(self) -> Tensor:
        """The stored values of the first part."""
        return self.parts[0].values

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return sum(part.bytes for part in self.parts)

    def rows(self, outputs: Tensor | slice) -> Stored:
        """Return the part whose outputs are the slice `outputs`. Raises `KeyError` for other outputs."""
        ends, total = {}, 0
        for part in self.parts:
            ends[total, total := total + part.shape[0]] = part
        assert isinstance(outputs, slice)
        return ends[outputs.start, outputs.stop]

    def weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dequantised weight."""
        return torch.cat([part.weight(dtype) for part in self.parts])

    def __deepcopy__(self, memo: dict[int, Any]) -> JoinedWeight:
        return self


def concat_weights(parts: Sequence[Stored]) -> Stored | JoinedWeight:
    """Join the outputs of weights with the same inputs: in one weight if all have the same layout."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, GGUFWeight):
        same = [part for part in parts if isinstance(part, GGUFWeight) and part.layout is first.layout]
        if len(same) == len(parts):
            values, grid = torch.cat([part.values for part in same]), torch.cat([part.grid for part in same])
            return GGUFWeight(first.layout, values, grid)
    elif all(isinstance(part, HalfWeight) and part.values.dtype == first.values.dtype for part in parts):
        return HalfWeight(torch.cat([part.values for part in parts]))
    return JoinedWeight(tuple(parts))


class BlockProduct(NativeProduct):
    """The native product with a `GGUFWeight`; one kernel for any number of rows, so the weight is never dequantised."""

    def __init__(self, blocks: GGUFWeight, bias: Tensor | None = None) -> None:
        self.blocks: GGUFWeight | JoinedWeight = GGUFWeight(
            blocks.layout, blocks.values.contiguous(), blocks.grid.contiguous()
        )
        self.out, self.into = blocks.shape
        self._describe(blocks.layout.kind, 0, self.blocks.values, self.blocks.grid, bias)

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
        made: Any = type(self)
        product: BlockProduct = made(self.blocks, bias)
        return product

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.blocks, self.bias)


class JoinedProduct(BlockProduct):
    """The native product with a `JoinedWeight`: each part is multiplied as if it were alone."""

    def __init__(self, blocks: JoinedWeight, bias: Tensor | None = None) -> None:
        self.blocks = blocks
        self.out, self.into = blocks.shape
        sizes = [part.shape[0] for part in blocks.parts]
        biases = [None] * len(sizes) if bias is None else list(torch.split(bias, sizes))
        self._parts = [_product_of(part, own) for part, own in zip(blocks.parts, biases, strict=True)]
        self._array = (Weight * len(sizes))(*(part.described for part in self._parts))
        self._describe(Kind.JOINED, len(sizes), blocks.values, None, bias)
        self.described.values, self.described.bias = ctypes.addressof(self._array), None


class SlowBlockProduct:
    """The product with a `GGUFWeight` without a compiler: slow, in torch, dequantising `_AT_ONCE` outputs at a time."""

    def __init__(self, blocks: Stored | JoinedWeight, bias: Tensor | None = None) -> None:
        self.blocks, self.bias, (self.out, self.into) = blocks, bias, blocks.shape

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product `[N, out]`, in the dtype of `x` `[N, in]`."""
        chunks = [
            x @ part.rows(slice(o, o + _AT_ONCE)).weight(x.dtype).t()
            for part in (self.blocks.parts if isinstance(self.blocks, JoinedWeight) else [self.blocks])
            for o in range(0, part.shape[0], _AT_ONCE)
        ]
        product = torch.cat(chunks, -1)
        return product if self.bias is None else product + self.bias.to(x.dtype)

    @property
    def product(self) -> Call:
        """This object, which is itself the function from rows to their product."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SlowBlockProduct:
        return self


def _product_of(blocks: Stored, bias: Tensor | None) -> BlockProduct | HalfProduct:
    return BlockProduct(blocks, bias) if isinstance(blocks, GGUFWeight) else HalfProduct(blocks, bias)


def block_product(
    blocks: Stored | JoinedWeight, bias: Tensor | None = None
) -> BlockProduct | HalfProduct | SlowBlockProduct:
    """Return the native product with a weight, or a `SlowBlockProduct` if native code is not available."""
    if not available():
        return SlowBlockProduct(blocks, bias)
    return JoinedProduct(blocks, bias) if isinstance(blocks, JoinedWeight) else _product_of(blocks, bias)


class BlockLinear(StoredLinear):
    """Replacement of a linear whose weight stays quantised, alone or fused with linears that read the same input."""

    fused: BlockProduct | SlowBlockProduct

    def __init__(self, fused: BlockProduct | SlowBlockProduct, start: int, linear: Any) -> None:
        super().__init__(fused, start, linear)
        own = fused.blocks.rows(slice(start, start + self.out_features))
        self._own = own
        self.bits = own.bits if isinstance(own, GGUFWeight) else None

    def with_outputs(self, outputs: Tensor) -> Call:
        """Return the product with only the rows `outputs` of the weight, still quantised."""
        return block_product(self._own.rows(outputs), self._bias_at(outputs)).product
