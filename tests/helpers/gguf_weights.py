"""Quantised weights of GGUF files, and what they stand for.

`gguf` reads the K types but does not write them: here they are rounded simply, not as well as llama.cpp's.
"""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from selfspec.models.gguf_blocks import TYPES
from selfspec.models.gguf_linear import BlockProduct, GGUFWeight

K_TYPES = {"Q4_K": Type.Q4_K, "Q5_K": Type.Q5_K, "Q6_K": Type.Q6_K}


def quantize(weights: np.ndarray, kind: Type) -> np.ndarray:
    """Rows `[.., in]` as the bytes of a type, a multiple of 256 inputs for the K types; of some, any values."""
    if kind in (Type.IQ4_NL, Type.Q2_K):
        return _any(weights, kind)
    if kind.name not in K_TYPES:
        return gguf.quants.quantize(weights, kind)
    blocks = weights.astype(np.float32).reshape(-1, 256)
    data = _q6(blocks) if kind == Type.Q6_K else _q45(blocks, kind == Type.Q5_K)
    return data.reshape(*weights.shape[:-1], -1)


def _any(weights: np.ndarray, kind: Type) -> np.ndarray:
    """Random values with scales of 1 / 512."""
    inputs, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (weights.size // inputs, size), dtype=np.uint8)
    halves = slice(0, 2) if kind == Type.IQ4_NL else slice(80, 84)
    data[:, halves] = np.full(data[:, halves].shape[1] // 2, 1 / 512, np.float16).view(np.uint8)
    return data.reshape(*weights.shape[:-1], -1)


def _bytes_of(halves: np.ndarray) -> np.ndarray:
    return halves.astype(np.float16).reshape(-1, 1).view(np.uint8)


def _over(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.where(scale == 0, 0, x / np.where(scale == 0, 1, scale))


def _q45(blocks: np.ndarray, fifth: bool) -> np.ndarray:
    groups = blocks.reshape(-1, 8, 32)
    most = 31 if fifth else 15
    low = np.minimum(groups.min(-1), 0)
    scale = (groups.max(-1) - low) / most
    of_scales, of_lows = (np.float16(a.max(-1, keepdims=True) / 63).astype(np.float32) for a in (scale, -low))
    scales, lows = (
        np.clip(np.rint(_over(a, of)), 0, 63).astype(np.uint8) for a, of in ((scale, of_scales), (-low, of_lows))
    )
    step, zero = of_scales * scales, of_lows * lows
    values = np.clip(np.rint(_over(groups + zero[..., None], step[..., None])), 0, most).astype(np.uint8)
    first = (scales[:, :4] | scales[:, 4:] >> 4 << 6, lows[:, :4] | lows[:, 4:] >> 4 << 6)
    packed = [*first, scales[:, 4:] & 15 | (lows[:, 4:] & 15) << 4]
    pairs = (values & 15).reshape(-1, 4, 2, 32)
    upper = [np.bitwise_or.reduce((values >> 4) << np.arange(8, dtype=np.uint8)[:, None], 1)] if fifth else []
    lower = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([_bytes_of(of_scales), _bytes_of(of_lows), *packed, *upper, lower], -1)


def _q6(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    scale = np.abs(groups).max(-1) / 31
    of_scales = np.float16(scale.max(-1, keepdims=True) / 127).astype(np.float32)
    scales = np.clip(np.rint(_over(scale, of_scales)), -128, 127).astype(np.int8)
    step = (of_scales * scales)[..., None]
    values = (np.clip(np.rint(_over(groups, step)), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = values & 15, values >> 4
    halves = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128)
    upper = np.bitwise_or.reduce(high << np.array([0, 2, 4, 6], np.uint8)[:, None], 2).reshape(-1, 64)
    return np.concatenate([halves, upper, scales.view(np.uint8), _bytes_of(of_scales)], -1)


def blocks_of(kind: str, seed: int, out: int, into: int, *, scale: float = 1.0) -> tuple[GGUFWeight, Tensor]:
    """Random blocks as a quantised weight's, and what `gguf` says they stand for."""
    weight = np.random.default_rng(seed).normal(size=(out, into)).astype(np.float32) * scale
    raw = quantize(weight, Type[kind])
    blocks = GGUFWeight(TYPES[kind].layout, *TYPES[kind].read(raw))
    return blocks, torch.from_numpy(gguf.quants.dequantize(raw, Type[kind]))


def multiplied(weight: GGUFWeight, exact: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """The native product, checked: as near as float32 sums are, and a row the same alone and among others."""
    product = BlockProduct(weight, bias)
    got = product(x)
    size = x.double().abs() @ exact.double().abs().t() + bias.abs()
    assert ((got.double() - (x.double() @ exact.double().t() + bias)).abs() <= (x.shape[1] + 8) * 2.0**-24 * size).all()
    assert torch.equal(got, torch.cat([product(row[None]) for row in x]))
    return got
