"""Weights kept as a GGUF file holds them, in blocks of 32 inputs, and the modules that multiply with them.

The values are the file's, exactly: scales stay float16. With a C++ compiler products are selfspec's own, which read the
weights as they are, sums are float32's, and a row gives the same bits alone and among others; without one, weights are
dequantised some outputs at a time, each time. On processors only. Knows nothing of files, families and caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError
from selfspec.models.linears import Call, PartLinear
from selfspec.models.native import NativeProduct
from selfspec.models.native_library import available

BLOCK = 32  # inputs that share a scale
_KINDS = {8: 4, 4: 5}  # of `native.cpp`, by bits
_AT_ONCE = 1024  # outputs that are dequantised at a time, without a compiler


@dataclass(frozen=True, slots=True, eq=False)
class GGUFWeight:
    """A weight `[out, in]` of which each output's 32 inputs share a scale, and in 4 bits a zero.

    It stands for values * scale in 8 bits: `values` int8 `[out, in]`, `grid` float16 `[out, in / 32, 1]`. In 4 bits
    for values * scale + zero: `values` uint8 `[out, in / 2]`, of 32 inputs the first 16 as low halves of 16 bytes, the
    others as high ones; `grid` `[out, in / 32, 2]`, the scale first.
    """

    bits: Literal[8, 4]
    values: Tensor
    grid: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self.values), self.grid.shape[1] * BLOCK

    @property
    def bytes(self) -> int:
        """Memory held."""
        return self.values.nbytes + self.grid.nbytes

    def rows(self, outputs: Tensor | slice) -> GGUFWeight:
        """Some outputs' weights; of a slice, no copy."""
        return GGUFWeight(self.bits, self.values[outputs], self.grid[outputs])

    def weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What it stands for: exact in float32, rounded once where a zero is far smaller than its scale."""
        grid = self.grid.float()
        if self.bits == 8:
            values = self.values.view(*self.grid.shape[:2], BLOCK).float().mul_(grid)
        else:
            halves = self.values.view(*self.grid.shape[:2], BLOCK // 2)
            values = torch.cat([halves & 15, halves >> 4], -1).float().mul_(grid[..., :1]).add_(grid[..., 1:])
        return values.view(self.shape).to(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> GGUFWeight:
        return self


def together(parts: Sequence[GGUFWeight]) -> GGUFWeight:
    """Weights of the same bits over one input, one below the other."""
    if len(parts) == 1:
        return parts[0]
    return GGUFWeight(parts[0].bits, torch.cat([p.values for p in parts]), torch.cat([p.grid for p in parts]))


class BlockProduct(NativeProduct):
    """The native product with such a weight, of any number of rows alike: no other copy of it is ever made."""

    def __init__(self, blocks: GGUFWeight, bias: Tensor | None = None) -> None:
        self.blocks = GGUFWeight(blocks.bits, blocks.values.contiguous(), blocks.grid.contiguous())
        self.out, self.into = blocks.shape
        self._describe(_KINDS[blocks.bits], 0, self.blocks.values, self.blocks.grid, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """The product, of the dtype of `x`."""
        return self.batch_invariant(x)

    def write(self, x: Tensor, out: Tensor) -> None:
        """The product, written to `out` `[N, out]`."""
        if out.dtype == torch.float32:
            self._run(x, out, add=False)
        else:
            out.copy_(self(x))

    def add(self, base: Tensor, x: Tensor) -> None:
        """The product, added to `base` `[N, out]`."""
        if base.dtype == torch.float32:
            self._run(x, base, add=True)
        else:
            base.add_(self(x))

    def with_bias(self, bias: Tensor) -> BlockProduct:
        """The same with a bias `[out]`."""
        return BlockProduct(self.blocks, bias)

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockProduct, (self.blocks, self.bias)


class SlowBlockProduct:
    """The same in torch's own operations, where nothing can be compiled: slow, and no memory but for some outputs."""

    def __init__(self, blocks: GGUFWeight, bias: Tensor | None = None) -> None:
        self.blocks, self.bias, (self.out, self.into) = blocks, bias, blocks.shape

    def __call__(self, x: Tensor) -> Tensor:
        """The product, of the dtype of `x`."""
        found = [x @ self.blocks.rows(slice(o, o + _AT_ONCE)).weight(x.dtype).t() for o in range(0, self.out, _AT_ONCE)]
        product = torch.cat(found, -1)
        return product if self.bias is None else product + self.bias.to(x.dtype)

    @property
    def product(self) -> Call:
        """Itself."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SlowBlockProduct:
        return self


def block_product(blocks: GGUFWeight, bias: Tensor | None = None) -> BlockProduct | SlowBlockProduct:
    """The product with a weight, natively where that is to be had."""
    return BlockProduct(blocks, bias) if available() else SlowBlockProduct(blocks, bias)


class BlockLinear(PartLinear):
    """Stands for a linear whose weight is kept, alone or with others over its input.

    `weight` dequantises it each time it is read: it is no parameter. A model with these can be called, copied and saved
    as if it were dequantised, but neither trained nor moved.
    """

    whole: BlockProduct | SlowBlockProduct
    readable: ClassVar[bool] = True

    def __init__(self, whole: BlockProduct | SlowBlockProduct, start: int, linear: Any) -> None:
        super().__init__(whole, start, linear)
        self.bits = whole.blocks.bits
        self.bias = None if whole.bias is None else whole.bias.narrow(0, start, self.out_features)

    @property
    def blocks(self) -> GGUFWeight:
        """The weights of all its parts."""
        return self.whole.blocks

    @property
    def weight(self) -> Tensor:
        """The weight `[out, in]`, dequantised."""
        return self.blocks.rows(slice(self.start, self.start + self.out_features)).weight()

    def over(self, outputs: Tensor) -> Call:
        """The product with the weight's rows `outputs` alone, kept as they are."""
        bias = None if self.bias is None else self.bias.index_select(0, outputs)
        return block_product(self.blocks.rows(outputs + self.start), bias).product

    def forward(self, x: Tensor) -> Tensor:
        """The product with `x` `[.., in]`."""
        rows = super().forward(x.reshape(-1, self.in_features))
        return rows.reshape(*x.shape[:-1], self.out_features)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BlockLinear:
        _stays(fn)
        return self


class BlockEmbedding(nn.Module):
    """Stands for an embedding whose weight is kept; the head may share it."""

    def __init__(self, blocks: GGUFWeight) -> None:
        super().__init__()
        self.blocks = blocks
        self.num_embeddings, self.embedding_dim = blocks.shape

    @property
    def weight(self) -> Tensor:
        """The weight `[tokens, D]`, dequantised."""
        return self.blocks.weight()

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of token ids `[.., n]`."""
        return self.blocks.rows(ids.flatten()).weight().view(*ids.shape, self.embedding_dim)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BlockEmbedding:
        _stays(fn)
        return self


def _stays(fn: Callable[[Tensor], Tensor]) -> None:
    """Raise `SelfspecError` where something would move or cast weights."""
    moved = fn(torch.zeros(1))
    if moved.dtype != torch.float32 or moved.device.type != "cpu":
        raise SelfspecError(
            "weights kept as in the file stay on the CPU, for float32; load the model anew, dequantised"
        )
