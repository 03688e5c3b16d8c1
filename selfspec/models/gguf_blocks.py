"""Layouts of quantised GGUF weights in memory: the file's bits, in the order in which kernels read them.

Of 32 inputs, 16 bytes hold the lowest four bits: of inputs 0 to 15 in the low halves, of 16 to 31 in the high halves.
The upper bits follow, input 0 lowest: 4 bytes for values of 5 bits, and 8 bytes for values of 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfspec.models.native_library import Kind

BLOCK, SUPER = 32, 256  # inputs of a block, and of a super-block of the K types
_AT_ONCE = 2**22  # bytes converted at a time

Bytes = NDArray[Any]
"""Numbers of type uint8."""
Scales = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True, eq=False)
class BlockLayout:
    """How weights are stored: `bits` of a value less `offset`, and the scales of `inputs` inputs.

    `scales` takes the bytes of scales `[.., bytes]` and returns float32 scales, and what is added to the products with
    them or None, each `[.., m, 1]` for m equal parts of the inputs.
    """

    kind: Kind
    bits: int
    inputs: int
    scales: Callable[[Tensor], Scales]
    offset: int = 0

    def dequantize(self, values: Tensor, grid: Tensor) -> Tensor:
        """Return float32 weights `[out, n, ..]` with `gguf`'s bits: a product that is exact, and one rounded sum."""
        out = len(values)
        if self.bits == 8:
            numbers = values.view(out, -1, BLOCK)
        else:
            more = self.bits - 4
            blocks = values.view(out, -1, BLOCK * self.bits // 8)
            low = blocks[..., :16]
            numbers = torch.cat([low & 15, low >> 4], -1)
            if more:
                shifts = torch.arange(0, 8, more, dtype=torch.uint8)
                upper = blocks[..., 16:].unsqueeze(-1) >> shifts & (1 << more) - 1
                numbers |= upper.flatten(-2) << 4
        scale, zero = self.scales(grid.view(out, values.shape[1] * 8 // self.bits // self.inputs, -1))
        weight = (numbers.float() - self.offset).view(out, -1, self.inputs).view(*scale.shape[:-1], -1).mul_(scale)
        return weight if zero is None else weight.add_(zero)


def _halves(grid: Tensor) -> Tensor:
    """Return the two float16 numbers that scales begin with, as float32 `[.., 2]`."""
    return grid[..., :4].contiguous().view(torch.float16).float()


def _scale_only(grid: Tensor) -> Scales:
    return grid.contiguous().view(torch.float16).float().unsqueeze(-1), None


def _scale_and_zero(grid: Tensor) -> Scales:
    halves = _halves(grid)
    return halves[..., :1, None], halves[..., 1:, None]


def _super_scales(grid: Tensor) -> Scales:
    halves = _halves(grid)
    return (
        (halves[..., :1] * grid[..., 4:12].float()).unsqueeze(-1),
        (-halves[..., 1:] * grid[..., 12:].float()).unsqueeze(-1),
    )


def _signed_scales(grid: Tensor) -> Scales:
    scale = grid[..., :2].contiguous().view(torch.float16).float()
    return (scale * grid[..., 2:].contiguous().view(torch.int8).float()).unsqueeze(-1), None


LAYOUT8 = BlockLayout(Kind.BLOCKS8, 8, BLOCK, _scale_only)
LAYOUT4 = BlockLayout(Kind.BLOCKS4, 4, BLOCK, _scale_and_zero)
LAYOUT5 = BlockLayout(Kind.BLOCKS5, 5, BLOCK, _scale_and_zero)
SUPER4 = BlockLayout(Kind.SUPER4, 4, SUPER, _super_scales)
SUPER5 = BlockLayout(Kind.SUPER5, 5, SUPER, _super_scales)
SUPER6 = BlockLayout(Kind.SUPER6, 6, SUPER, _signed_scales, 32)


def _with_zero(scale: Bytes, times: int) -> Bytes:
    """Return float16 scales `[n, 2]` as bytes, followed by their products with `times`."""
    halves = np.ascontiguousarray(scale).view(np.float16)
    return np.concatenate([scale, (times * halves).view(np.uint8)], -1)


def _packed(values: Bytes, bits: int) -> Bytes:
    """Pack values `[n, groups, 32]` as the module describes, to `[n, bytes]`."""
    low = values & 15
    parts = [low[..., :16] | low[..., 16:] << 4]
    if bits > 4:
        each = 8 // (bits - 4)  # values whose upper bits share a byte
        upper = (values >> 4).reshape(*values.shape[:2], -1, each)
        shifts = np.arange(each, dtype=np.uint8) * np.uint8(bits - 4)
        parts.append(np.bitwise_or.reduce(upper << shifts, -1))
    return np.concatenate(parts, -1).reshape(len(values), -1)


def _halves_of_bytes(data: Bytes, size: int) -> Bytes:
    """Return the low, then the high halves of each `size` bytes of `[n, bytes]`, as `[n, groups, 32]`."""
    parts = data.reshape(len(data), -1, 1, size)
    return (parts >> np.array([0, 4], np.uint8)[:, None] & 15).reshape(len(data), -1, BLOCK)


def _split_super(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """Return the scales of Q4_K and Q5_K, each in a byte of its own, and the other bytes."""
    scale, zero, both = np.split(blocks[:, 4:16], 3, -1)
    scales = [scale & 63, (both & 15) | (scale >> 2 & 48), zero & 63, (both >> 4) | (zero >> 2 & 48)]
    return np.concatenate([blocks[:, :4], *scales], -1), blocks[:, 16:]


def _split_q4_k(blocks: Bytes) -> tuple[Bytes, Bytes]:
    grid, rest = _split_super(blocks)
    return _packed(_halves_of_bytes(rest, 32), 4), grid


def _split_q5_k(blocks: Bytes) -> tuple[Bytes, Bytes]:
    grid, rest = _split_super(blocks)
    upper = rest[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _packed(_halves_of_bytes(rest[:, 32:], 32) | upper << 4, 5), grid


def _split_q6_k(blocks: Bytes) -> tuple[Bytes, Bytes]:
    upper = blocks[:, 128:192].reshape(len(blocks), 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    values = _halves_of_bytes(blocks[:, :128], 64) | upper.reshape(len(blocks), -1, 32) << 4
    return _packed(values, 6), np.concatenate([blocks[:, 208:], blocks[:, 192:208]], -1)


def _split_q5(blocks: Bytes) -> Bytes:
    """Return values of 5 bits, the fifth bits behind the others."""
    return np.concatenate([blocks[:, -16:], blocks[:, -20:-16]], -1)


@dataclass(frozen=True, slots=True, eq=False)
class FileType:
    """A type of GGUF files: `split` returns the values and scales of n blocks `[n, size]`, as `layout` stores them."""

    layout: BlockLayout
    size: int
    split: Callable[[Bytes], tuple[Bytes, Bytes]]

    @property
    def inputs(self) -> int:
        """Inputs of a block; a row has a multiple of them."""
        return self.layout.inputs

    def read(self, rows: Bytes, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the values and scales of a file's rows `[out, bytes]`, or of its rows `order`, some at a time."""
        out = len(rows)
        at_once = max(1, _AT_ONCE // rows.shape[1])
        whole: list[Tensor] = []
        for start in range(0, out, at_once):
            stop = min(start + at_once, out)
            part = rows[start:stop] if order is None else rows[order[start:stop].numpy()]
            split = [torch.from_numpy(np.ascontiguousarray(a)) for a in self.split(part.reshape(-1, self.size))]
            split = [a.view(stop - start, -1) for a in split]
            whole = whole or [a.new_empty(out, a.shape[1]) for a in split]
            for to, a in zip(whole, split, strict=True):
                to[start:stop] = a
        values, grid = whole
        return values.view(torch.int8) if self.layout.bits == 8 else values, grid


TYPES: Mapping[str, FileType] = {
    "Q8_0": FileType(LAYOUT8, 34, lambda b: (b[:, 2:], b[:, :2])),
    "Q4_0": FileType(LAYOUT4, 18, lambda b: (b[:, 2:], _with_zero(b[:, :2], -8))),
    "Q4_1": FileType(LAYOUT4, 20, lambda b: (b[:, 4:], b[:, :4])),
    "Q5_0": FileType(LAYOUT5, 22, lambda b: (_split_q5(b), _with_zero(b[:, :2], -16))),
    "Q5_1": FileType(LAYOUT5, 24, lambda b: (_split_q5(b), b[:, :4])),
    "Q4_K": FileType(SUPER4, 144, _split_q4_k),
    "Q5_K": FileType(SUPER5, 176, _split_q5_k),
    "Q6_K": FileType(SUPER6, 210, _split_q6_k),
}
"""The types whose weights can stay as in the file."""
