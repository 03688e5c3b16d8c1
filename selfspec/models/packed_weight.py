"""Quantised weights in the order in which `native.cpp` reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.models.low_precision import Bits, QuantizedWeight, groups_of
from selfspec.models.native_library import KINDS, Kind, library

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
