"""Tables of a model's RoPE, and the factors that rotate queries and keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.models.families.base import AttentionSpec, Rope
from selfspec.models.skeleton import Skeleton


class RotaryTable:
    """Cosines and sines `[positions, 1, d]` of one RoPE, times `scale`: rotated x is x * cos + x[`partner`] * sin.

    `partner` `[d]` is the index of the dimension that each dimension is rotated with (None: the dimension d / 2 away).
    Only the first `rotary_dim` dimensions are rotated, `interleaved` or not, see `Rope`. `keep` is the identity matrix
    `[d, d]`, in the dtype and on the device of the model's first layer.
    """

    def __init__(self, rope: Rope, positions: int, keep: Tensor, scale: float) -> None:
        d = len(keep)
        position_ids = torch.arange(max(positions, 1), device=keep.device)[None]
        cos, sin = (
            t[0].to(keep) for t in rope.rotary(keep, position_ids)
        )  # the rotary module may be on another device
        rotary_dim = cos.shape[-1]
        if rotary_dim > d or rotary_dim % 2:
            raise SelfspecError(f"rope covers {rotary_dim} of {d} dimensions; expected an even number of them")
        partner = torch.arange(d, device=keep.device)
        if rope.interleaved:
            partner[:rotary_dim] = partner[:rotary_dim] ^ 1
        else:
            partner[:rotary_dim] = partner[:rotary_dim].roll(rotary_dim // 2)
        sign = (partner > torch.arange(d, device=keep.device)).to(keep) * -2 + 1  # of a pair, x1 gets -x2 * sin
        rest = d - rotary_dim
        self.cos = F.pad(cos, (0, rest), value=1.0).unsqueeze(1) * scale
        self.sin = (F.pad(sin, (0, rest)) * sign).unsqueeze(1) * scale
        self.partner = partner if rope.interleaved or rest else None
        self.rotary_dim, self.interleaved = rotary_dim, rope.interleaved
        self._keep, self._swap = keep, keep[partner]

    def rotation(self, positions: int | Tensor, batch: int, n: int, *, matrix: bool) -> Tensor | tuple[Tensor, Tensor]:
        """Return the rotation of tokens at `positions`, as matrices if `matrix`; shapes as in `AttentionInputs`."""
        if isinstance(positions, int):
            cos, sin = self.cos.narrow(0, positions, n), self.sin.narrow(0, positions, n)
            if batch > 1:
                cos, sin = cos.repeat(batch, 1, 1), sin.repeat(batch, 1, 1)
        else:
            cos, sin = self.cos[positions].flatten(0, 1), self.sin[positions].flatten(0, 1)  # [N, 1, d]
        if not matrix:
            return cos, sin
        rotation = torch.mul(self._keep, cos).addcmul_(self._swap, sin)
        return rotation[0] if len(rotation) == 1 else rotation


def rotary_tables(skeleton: Skeleton, positions: int, scale: float) -> list[tuple[AttentionSpec, RotaryTable]]:
    """Return each of the model's attention specs with its rotary table; `scale` multiplies all cosines and sines."""
    keep = torch.eye(skeleton.sizes.head_dim, dtype=skeleton.sizes.dtype, device=skeleton.device)
    ropes = {
        attention_spec.rope: RotaryTable(attention_spec.rope, positions, keep, scale)
        for attention_spec in skeleton.attention_specs
    }
    return [(attention_spec, ropes[attention_spec.rope]) for attention_spec in skeleton.attention_specs]
