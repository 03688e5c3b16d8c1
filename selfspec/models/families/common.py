"""Building blocks of sub-layers shared by several families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from selfspec.models.families.base import Attention, Block, DenseMlp, GatedMlp, Mlp, Rotary
from selfspec.models.linears import Call, Into, Onto, linear

Part = TypeVar("Part", Attention, GatedMlp)


def windows_of(config: Any, layers: int) -> list[int | None]:
    """Return the sliding window of each layer; None for a layer whose type in the config is not `sliding_attention`.

    A configuration may have an entry `sliding_window` that its class, and so its model's attention, does not know.
    """
    window = getattr(config, "sliding_window", None) if _knows_windows(type(config)) else None
    window = window if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds[:layers]]


def _knows_windows(kind: type) -> bool:
    try:
        return hasattr(kind(), "sliding_window")
    except Exception:  # without defaults
        return True


def no_rotation(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty cosines and sines: a `Rotary` that rotates no dimension."""
    nothing = x.new_zeros((*positions.shape, 0))
    return nothing, nothing


def repeated_halves(rotary: Rotary) -> Rotary:
    """Return a `Rotary` that repeats the cosines and sines of `rotary` for both halves of a head."""

    def both(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary(x, positions)
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    return both


def interleaved_rotary(rotary: Rotary) -> Rotary:
    """Return a `Rotary` that reorders cosines and sines, given for a head's two halves, for adjacent pairs."""

    def interleaved(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, -1) for t in rotary(x, positions))
        return cos, sin

    return interleaved


def normed_heads(into: Into, q_norm: Call, k_norm: Call, shape: tuple[int, int, int]) -> Into:
    """Return the linear `into` with each query and key head normalised; `shape` is (H, H_kv, d)."""
    heads, kv_heads, d = shape

    def qkv(x: Tensor, out: Tensor) -> None:
        into(x, out)
        out_heads = out.view(len(out), -1, d)
        q, k = out_heads.narrow(1, 0, heads), out_heads.narrow(1, heads, kv_heads)
        q.copy_(q_norm(q))
        k.copy_(k_norm(k))

    return qkv


def normed_projections(into: Into, q_norm: Call, k_norm: Call, shape: tuple[int, int, int]) -> Into:
    """Return `into` with all query heads normalised as one vector, and all key heads; `shape` is (H, H_kv, d)."""
    heads, kv_heads, d = shape

    def qkv(x: Tensor, out: Tensor) -> None:
        into(x, out)
        q, k = out.narrow(1, 0, heads * d), out.narrow(1, heads * d, kv_heads * d)
        q.copy_(q_norm(q))
        k.copy_(k_norm(k))

    return qkv


def normed_onto(module: Any, norm: Call) -> Onto:
    """Return a linear whose output is normalised before it is added to the residual stream."""
    call = linear(module)
    return lambda base, x: base.add_(norm(call(x)))


def scaled_onto(module: Any, factor: float) -> Onto:
    """Return a linear whose output is multiplied by `factor` before it is added to the residual stream."""
    call = linear(module)
    return lambda base, x: base.add_(call(x), alpha=factor)


def with_native(part: Part, **changes: Any) -> Part:
    """Return a sub-layer whose description for native passes has these changes, if it has a description."""
    return part if part.native is None else replace(part, native=replace(part.native, **changes))


def identity_norm(x: Tensor, _x_with_eps: Tensor, _out: Tensor) -> Tensor:
    """Return `x` itself: the `Norm` of a sub-layer whose input is not normalised."""
    return x


def scaled(factor: float) -> Call:
    """Return the multiplication of logits by `factor`."""
    return lambda logits: logits * factor


def capped(limit: float) -> Call:
    """Return the soft cap of logits, tanh(logits / limit) * limit, which preserves -inf."""

    def cap(logits: Tensor) -> Tensor:
        return torch.where(logits == -torch.inf, logits, torch.tanh(logits / limit) * limit)

    return cap


def capped_weights(limit: float) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return attention weights: the softmax of soft-capped scores, tanh(scores / limit) * limit."""

    def weights(scores: Tensor, mask: Tensor | None) -> Tensor:
        scores = scores.div_(limit).tanh_().mul_(limit)
        return softmax(scores if mask is None else scores.add_(mask))

    return weights


def softmax(scores: Tensor) -> Tensor:
    """Return the softmax over the last dimension, computed in at least float32."""
    half = scores.dtype in (torch.bfloat16, torch.float16)
    return scores.softmax(-1, torch.float32).to(scores.dtype) if half else scores.softmax(-1)


class ParallelBlock(Block):
    """A block whose sub-layers both read the layer's input, each through its own norm or both through the same norm."""

    def running(self, *, attention: bool, mlp: bool) -> tuple[Attention | None, Mlp | None]:
        """Return the sub-layers to run; if both do, attention's norm leaves the MLP's input in `Workspace.normed`."""
        if not (attention and mlp):
            return (self.attention if attention else None), (self.mlp if mlp else None)
        assert isinstance(self.mlp, DenseMlp)
        first, second = self.attention.norm, self.mlp.norm

        def of_both(x: Tensor, x_with_eps: Tensor, out: Tensor) -> Tensor:
            read = first(x, x_with_eps, torch.empty_like(out))
            out.copy_(read if second is first else second(x, x_with_eps, out))
            return read

        native = None if self.mlp.native is None else replace(self.mlp.native, parallel=True)
        return replace(self.attention, norm=of_both), replace(self.mlp, norm=_left, native=native)


def _left(_x: Tensor, _x_with_eps: Tensor, out: Tensor) -> Tensor:
    return out
