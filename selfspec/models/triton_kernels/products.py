"""Products of few rows with a weight in 16 bits, or quantised to int8, float8 or int4, as one kernel each.

A program computes 32 outputs of 16 rows on tensor cores, over all inputs in order: no split over inputs or rows, so
that a row's bits depend on nothing else. Fewer rows are padded, as it is reading the weight that takes time. Quantised
weights are dequantised in registers, rounded as `QuantizedWeight.weight` rounds them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.models.triton_kernels.launching import BLOCK_ROWS, compute_dtype
from selfspec.models.triton_kernels.switch import ROWS

SCALED, INT4 = 1, 2  # kinds of weights, with 0 for one that is multiplied as it is
STORE, ADD, GATE = 0, 1, 2  # what becomes of a product, see `product_kernel`
BLOCK_OUT, BLOCK_BYTES = 32, 256  # outputs of a program, and bytes of an output's weights in a step
WARPS, STAGES = 4, 4


@triton.jit
def _dot(x, weight, acc, COMPUTE: tl.constexpr):
    return tl.dot(x.to(COMPUTE), tl.trans(weight.to(COMPUTE)), acc, input_precision="ieee")


@triton.jit
def _int4(
    values, scale, zero, outputs, in_out, k,
    IN: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Return the weights in float32 of int4 `values` `[BLOCK_N, HALF]`, for the inputs from `k` on."""
    GROUPS: tl.constexpr = (HALF + GROUP - 1) // GROUP
    at = outputs[:, None] * (IN // GROUP) + (k // GROUP + tl.arange(0, GROUPS))[None, :]
    factor = tl.load(scale + at, mask=in_out[:, None], other=0.0).to(tl.float32)
    shift = tl.load(zero + at, mask=in_out[:, None], other=0.0).to(tl.float32)
    factor = tl.broadcast_to(factor[:, :, None], (BLOCK_N, GROUPS, HALF // GROUPS)).reshape(BLOCK_N, HALF)
    shift = tl.broadcast_to(shift[:, :, None], (BLOCK_N, GROUPS, HALF // GROUPS)).reshape(BLOCK_N, HALF)
    return (values.to(tl.float32) - 8.0) * factor + shift


@triton.jit
def _partial(
    x, w, scale, zero, outputs, rows, in_out, in_rows, k, x_stride,
    IN: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    COMPUTE: tl.constexpr, acc,
):  # fmt: skip
    """Return `acc` plus the product over `BLOCK_K` inputs from `k` on."""
    if KIND == 2:  # a byte holds an input of the block's first half and, in the higher bits, one of its second half
        HALF: tl.constexpr = BLOCK_K // 2
        at = tl.arange(0, HALF)
        packed = tl.load(
            w + outputs[:, None].to(tl.int64) * (IN // 2) + (k // 2 + at)[None, :], mask=in_out[:, None], other=0,
            eviction_policy="evict_first",
        )  # fmt: skip
        x_at = x + rows[:, None] * x_stride + (k + at)[None, :]
        low = _int4(packed & 15, scale, zero, outputs, in_out, k, IN, GROUP, BLOCK_N, HALF).to(x.dtype.element_ty)
        acc = _dot(tl.load(x_at, mask=in_rows[:, None], other=0.0), low, acc, COMPUTE)
        high = _int4(packed >> 4, scale, zero, outputs, in_out, k + HALF, IN, GROUP, BLOCK_N, HALF)
        acc = _dot(tl.load(x_at + HALF, mask=in_rows[:, None], other=0.0), high.to(x.dtype.element_ty), acc, COMPUTE)
    else:
        inputs = k + tl.arange(0, BLOCK_K)
        inside = inputs < IN
        weight = tl.load(
            w + outputs[:, None].to(tl.int64) * IN + inputs[None, :],
            mask=in_out[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first",
        )  # fmt: skip
        x_at, x_in = x + rows[:, None] * x_stride + inputs[None, :], in_rows[:, None] & inside[None, :]
        acc = _dot(tl.load(x_at, mask=x_in, other=0.0), weight, acc, COMPUTE)
    return acc


@triton.jit
def product_kernel(
    x, w, scale, zero, bias, out, n, x_stride, out_stride,
    OUT: tl.constexpr, IN: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, EPILOGUE: tl.constexpr,
    BIASED: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute `OUT` outputs of `n` rows `x` with the weight `w`.

    `EPILOGUE`: 0 writes the product to `out`, 1 adds it to `out`, and 2 writes silu(gate) * up, where the weight's
    first `OUT` outputs are the gate and the next `OUT` outputs are up.
    """
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_out, in_rows = outputs < OUT, rows < n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, IN, BLOCK_K):
        acc = _partial(
            x, w, scale, zero, outputs, rows, in_out, in_rows, k, x_stride, IN, GROUP, KIND, BLOCK_N, BLOCK_K, COMPUTE,
            acc,
        )  # fmt: skip
        if EPILOGUE == 2:
            up = _partial(
                x, w, scale, zero, outputs + OUT, rows, in_out, in_rows, k, x_stride, IN, GROUP, KIND, BLOCK_N,
                BLOCK_K, COMPUTE, up,
            )  # fmt: skip
    if KIND == 1:
        acc = acc * tl.load(scale + outputs, mask=in_out, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        acc = acc + tl.load(bias + outputs, mask=in_out, other=0.0).to(tl.float32)[None, :]
    if EPILOGUE == 2:
        if KIND == 1:
            up = up * tl.load(scale + OUT + outputs, mask=in_out, other=0.0).to(tl.float32)[None, :]
        if BIASED:
            up = up + tl.load(bias + OUT + outputs, mask=in_out, other=0.0).to(tl.float32)[None, :]
        acc = acc / (1.0 + tl.exp(-acc)) * up
    at = out + rows[:, None] * out_stride + outputs[None, :]
    inside = in_rows[:, None] & in_out[None, :]
    if EPILOGUE == 1:
        acc = acc + tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True, eq=False)
class TritonProduct:
    """The product with a weight `[out, in]`, in the dtype of the rows `[n, in]`.

    Of more than `ROWS` rows, a weight that is not quantised is multiplied by torch. `values` are the weight itself in
    16 or 32 bits (`kind` 0); int8 or float8 values with a scale for each output (`SCALED`); or packed int4 values with
    scales and zero points for each output and group of inputs (`INT4`).
    """

    values: Tensor
    out: int
    into: int
    kind: int = 0
    scale: Tensor | None = None
    zero: Tensor | None = None
    bias: Tensor | None = None

    @classmethod
    def dense(cls, weight: Tensor, bias: Tensor | None = None) -> TritonProduct:
        """Return the product with a weight in float32 or 16 bits, which is not copied."""
        out, into = weight.shape
        return cls(weight, out, into, bias=bias)

    @classmethod
    def quantized(cls, values: Tensor, scale: Tensor, zero: Tensor | None) -> TritonProduct:
        """Return the product with an int8 or int4 weight, given as in `QuantizedWeight`."""
        out, into = values.shape
        if zero is None:
            return cls(values, out, into, SCALED, scale)
        halves = values.to(torch.uint8).view(out, -1, 2, _int4_step(into) // 2)
        packed = (halves[:, :, 0] | halves[:, :, 1] << 4).view(out, into // 2)
        return cls(packed, out, into, INT4, scale.contiguous(), zero.contiguous())

    @classmethod
    def float8(cls, weight: Tensor) -> TritonProduct:
        """Return the product with a float32 weight converted to float8 (e4m3), each output by a scale of its own."""
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / torch.finfo(torch.float8_e4m3fn).max
        return cls((weight / scale).to(torch.float8_e4m3fn), len(weight), weight.shape[1], SCALED, scale)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product `[n, out]` with rows `x`."""
        out = x.new_empty(len(x), self.out)
        self.write(x, out)
        return out

    def float32(self, x: Tensor) -> Tensor:
        """Return the product `[n, out]` with rows `x` in float32, as it was accumulated."""
        out = torch.empty(len(x), self.out, dtype=torch.float32, device=x.device)
        self._launch(x, out, STORE, self.out)
        return out

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write the product with rows `x` to `out` `[n, out]`, rounded to the dtype of `out`."""
        if self.kind or len(x) <= ROWS:
            self._launch(x, out, STORE, self.out)
        elif self.bias is None:
            torch.mm(x, self.values.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.values.t(), out=out)

    def add(self, base: Tensor, x: Tensor) -> None:
        """Add the product with rows `x` to `base` `[n, out]`, rounding once."""
        if self.kind or self.bias is not None or len(x) <= ROWS:
            self._launch(x, base, ADD, self.out)
        else:
            base.addmm_(x, self.values.t())

    def gate(self, x: Tensor, out: Tensor) -> None:
        """Write silu(gate) * up to `out` `[n, out / 2]`, where the outputs are gate and up side by side."""
        self._launch(x, out, GATE, self.out // 2)

    def with_bias(self, bias: Tensor) -> TritonProduct:
        """Return a product with the same weight and a bias."""
        return replace(self, bias=bias)

    def _launch(self, x: Tensor, out: Tensor, epilogue: int, outputs: int) -> None:
        n = len(x)
        step = _int4_step(self.into) if self.kind == INT4 else BLOCK_BYTES // self.values.element_size()
        group = 0 if self.scale is None or self.kind != INT4 else self.into // self.scale.shape[1]
        grid = (triton.cdiv(outputs, BLOCK_OUT), triton.cdiv(n, BLOCK_ROWS))
        product_kernel[grid](
            x, self.values, self.scale, self.zero, self.bias, out, n, x.stride(0), out.stride(0),
            OUT=outputs, IN=self.into, GROUP=group, KIND=self.kind, EPILOGUE=epilogue, BIASED=self.bias is not None,
            COMPUTE=compute_dtype(x.dtype), BLOCK_M=BLOCK_ROWS, BLOCK_N=BLOCK_OUT, BLOCK_K=step,
            num_warps=WARPS, num_stages=STAGES - (epilogue == GATE),  # two weights fill a GPU's shared memory sooner
        )  # fmt: skip


def _int4_step(into: int) -> int:
    """Return the inputs of a step for an int4 weight: the largest power of two up to `2 * BLOCK_BYTES` that fits."""
    return math.gcd(into, 2 * BLOCK_BYTES)
