"""The attention inputs of a forward pass: rotary factors, visible keys and values, mask, and slots to write."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from selfspec.basics.errors import SelfspecError
from selfspec.models.families.base import AttentionSpec, Rope, Sizes
from selfspec.models.skeleton import Skeleton
from selfspec.runtime.cache import Cache


class PassInputs(NamedTuple):
    """Shape, positions, slots, mask and cache rows of a pass over tokens `[batch, n]`; see `Runtime.forward`.

    `causal`: whether `mask` shows a token exactly the slots up to its own, which equal their tokens' positions; padding
    alone is written elsewhere, see `Cache.spare`.
    """

    batch: int
    n: int
    positions: int | Tensor
    slots: int | Tensor
    mask: Tensor | None
    rows: slice
    causal: bool = False


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Attention inputs of N = B * n tokens `[B, n]`: RoPE, visible keys and values, mask and slots to write.

    `rotation` is the RoPE rotation: a matrix per token `[N, d, d]`, one matrix `[d, d]` if N is 1, or cosines and sines
    `[N, 1, d]`. `partner` `[d]` is the index of the dimension that each dimension is rotated with (None: the dimension
    d / 2 away). `direct`: whether attention is computed by explicit products, instead of fused attention. `keys` and
    `values` are lists by layer, from `Cache.kv_views` if `direct`, else from `Cache.repeated_views`. `to` is either
    views by layer of the keys and values to write `[B, H_kv, n, d]`, or scattered slot numbers `[B, n]`. `causal`:
    whether fused attention applies its own causal mask.
    """

    rotation: Tensor | tuple[Tensor, Tensor]
    partner: Tensor | None
    to: tuple[Sequence[Tensor], Sequence[Tensor]] | Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    mask: Tensor | None  # additive: [1 or B * H_kv, G * n, S] if direct, else [1 or B * H_kv, 1, n, S] or [n, S]
    direct: bool
    causal: bool
    rows: slice


def build_attention_inputs(
    attention_spec: AttentionSpec,
    rotary_table: RotaryTable,
    cache: Cache,
    masks: Masks,
    pass_inputs: PassInputs,
    *,
    narrow: bool,
) -> AttentionInputs:
    """Return the attention inputs of a pass for the layers that share `attention_spec`.

    `narrow`: rotate by matrices and compute attention by explicit products, which is fastest for few tokens.
    """
    batch, n, positions, slots, mask, rows, _ = pass_inputs
    window, direct = attention_spec.window, narrow or attention_spec.custom_attention
    rotation = rotary_table.rotation(positions, batch, n, matrix=narrow)
    first, causal, additive = 0, False, None
    if mask is None and isinstance(slots, Tensor):
        mask = torch.arange(int(slots.max()) + 1, device=slots.device) <= slots.unsqueeze(-1)
    if mask is not None:
        kv_len = mask.shape[-1]
        if window is not None:
            mask = mask & cache.window_mask(window, positions, n, kv_len, rows)
        additive = masks.additive(mask)
    else:
        assert isinstance(slots, int)
        kv_len, first = slots + n, 0 if window is None else max(0, slots + 1 - window)
        causal = n > 1 and slots == 0 and not direct and (window is None or kv_len <= window)
        additive = masks.chain(n, kv_len - first, window) if n > 1 and not causal else None
    if direct and additive is not None:
        additive = masks.grouped(additive)
    keys, values = (cache.kv_views if direct else cache.repeated_views)(kv_len, rows, first)
    to = slots if isinstance(slots, Tensor) else cache.writable_views(slots, n, rows)
    return AttentionInputs(rotation, rotary_table.partner, to, keys, values, additive, direct, causal, rows)


def to_device(inputs: AttentionInputs, device: torch.device) -> AttentionInputs:
    """Return a copy with rotation, mask and slots on `device`; keys and values stay on the devices of their layers."""
    rotation = (
        inputs.rotation.to(device)
        if isinstance(inputs.rotation, Tensor)
        else tuple(t.to(device) for t in inputs.rotation)
    )
    moved: dict[str, Any] = {"rotation": rotation}
    if isinstance(inputs.to, Tensor):
        moved["to"] = inputs.to.to(device)
    if inputs.partner is not None:
        moved["partner"] = inputs.partner.to(device)
    if inputs.mask is not None:
        moved["mask"] = inputs.mask.to(device)
    return replace(inputs, **moved)


# cuDNN's would come first on Hopper GPUs. It takes 20 to 40 ms to prepare for a new shape, as each decode step has.
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def fused_backends(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which fused attention on `device` uses one of `BACKENDS`; elsewhere than on CUDA, any."""
    return sdpa_kernel([*BACKENDS]) if device.type == "cuda" else nullcontext()


_ALIGNED = 8  # slots: CUDA's fused attention copies a mask whose rows do not start at multiples


class Masks:
    """Masks of one model on one device, in its dtype: 0 where a slot is visible, -inf where it is hidden.

    The rows of a mask start at multiples of `aligned` slots (None: of 8 on CUDA, of 1 elsewhere).
    """

    def __init__(self, sizes: Sizes, device: torch.device, *, aligned: int | None = None) -> None:
        self._aligned = aligned or (_ALIGNED if device.type == "cuda" else 1)
        self._kv_heads, self._group = sizes.kv_heads, sizes.heads // sizes.kv_heads
        self._dtype, self._device = sizes.dtype, device
        self._later = self._triangle(64)

    def _triangle(self, n: int) -> Tensor:
        return torch.full((n, n), -torch.inf, dtype=self._dtype, device=self._device).triu(1)

    def chain(self, n: int, end: int, window: int | None = None) -> Tensor:
        """Return the causal mask `[n, end]` of n consecutive tokens in the last n of `end` slots.

        With `window`, each token attends to only the last `window` slots, which include its own slot.
        """
        later = self._later if n <= len(self._later) else self._triangle(n)
        mask = F.pad(later[:n, :n], (end - n, -end % self._aligned))[:, :end]
        if window is None or end <= window:
            return mask
        return mask.add_(torch.full_like(mask, -torch.inf).tril(end - n - window))

    def additive(self, mask: Tensor) -> Tensor:
        """Convert a boolean mask `[B, n, S]` (true: visible) to an additive mask `[B * H_kv, 1, n, S]`.

        If B is 1, the additive mask is `[1, 1, n, S]`.
        """
        batch, n, slots = mask.shape
        repeats = 1 if batch == 1 else self._kv_heads
        padded = (batch, repeats, n, -(-slots // self._aligned) * self._aligned)
        additive = torch.zeros(padded, dtype=self._dtype, device=self._device)[..., :slots]
        return additive.masked_fill_(mask.logical_not().unsqueeze(1), -torch.inf).flatten(0, 1).unsqueeze(1)

    def grouped(self, additive: Tensor) -> Tensor:
        """Repeat a mask from `chain` or `additive` for the G query heads of a KV head: `[1 or B * H_kv, G * n, S]`."""
        return additive.view(-1, *additive.shape[-2:]).repeat(1, self._group, 1)


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
