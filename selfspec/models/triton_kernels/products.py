"""Products of few rows with a weight in 16 bits, or quantised to int8, float8 or int4, as one kernel each.

A program of `product_kernel` computes 32 outputs of 16 rows on tensor cores, over all inputs in order: no split over
inputs or rows, so that a row's bits depend on nothing else. Fewer rows are padded, as it is reading the weight that
takes time. Quantised weights are dequantised in registers, rounded as `QuantizedWeight.weight` rounds them.

One row and int4 weights, as in a draft step, have a kernel of their own: reading them takes so little time that
padding, rounding and shared memory would take longer. Sizes of blocks are those that were fastest on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.models.triton_kernels.elementwise import BLOCK_ROWS, compute_dtype, power_of_two
from selfspec.models.triton_kernels.switch import ROWS

SCALED, INT4 = 1, 2  # kinds of weights, with 0 for one that is multiplied as it is
STORE, ADD, GATE = 0, 1, 2  # what becomes of a product, see `product_kernel`
BLOCK_OUT, BLOCK_BYTES, WARPS = 32, 256, 4  # outputs of a program, bytes of an output's weights in a step
BLOCK_OUT_OF_ROW, WORDS_OF_ROW, WORDS_OF_WARP = 16, 1024, 128  # outputs, and most words of an output in a step
IN_16 = tl.constexpr("lop3.b32 $0, $1, 0x00780000, 0x41800000, 0xEA;")  # (bits & mask) | 16.0, in one instruction
IN_256 = tl.constexpr("lop3.b32 $0, $1, 0x00078000, 0x43800000, 0xEA;")


@triton.jit
def _dot(x, weight, acc, COMPUTE: tl.constexpr):
    return tl.dot(x.to(COMPUTE), tl.trans(weight.to(COMPUTE)), acc, input_precision="ieee")


@triton.jit
def _int4(words, i: tl.constexpr, FUSED: tl.constexpr):
    """Return value `i` of 0 to 7 of packed `words` in float32, plus 16 if `i` is odd, plus 256 if it is even.

    A value's bits become the lowest whole bits of the number 16 or 256, so that no conversion is needed.
    `FUSED`: masked and set by one instruction, which Triton's interpreter does not have.
    """
    if i < 2:
        bits = words << 15
    elif i < 4:
        bits = words << 7
    elif i < 6:
        bits = words >> 1
    else:
        bits = words >> 9
    if i % 2 == 1:
        if FUSED:
            number = tl.inline_asm_elementwise(IN_16, "=r,r", [bits], tl.float32, True, 1)
        else:
            number = ((bits & 0x780000) | 0x41800000).to(tl.float32, bitcast=True)
    elif FUSED:
        number = tl.inline_asm_elementwise(IN_256, "=r,r", [bits], tl.float32, True, 1)
    else:
        number = ((bits & 0x78000) | 0x43800000).to(tl.float32, bitcast=True)
    return number


@triton.jit
def _scale_and_zero(scales, outputs, groups, in_out, in_groups, GROUPS: tl.constexpr):
    """Return scales and zero points `[outputs, groups]` in float32, from words that hold one of each in bfloat16."""
    inside = in_out[:, None] & in_groups[None, :]
    both = tl.load(scales + outputs[:, None] * GROUPS + groups[None, :], mask=inside, other=0)
    return (both & -65536).to(tl.float32, bitcast=True), (both << 16).to(tl.float32, bitcast=True)


@triton.jit
def _first_inputs(words, RUN: tl.constexpr):
    """Return the input that is value 0 of each word; value i is `i * RUN` inputs after it."""
    return tl.max_contiguous(tl.multiple_of(words // RUN * (RUN * 8) + words % RUN, RUN), RUN)


@triton.jit
def _partial(
    x, w, scales, outputs, rows, in_out, in_rows, k, x_stride,
    IN: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    COMPUTE: tl.constexpr, FUSED: tl.constexpr, acc,
):  # fmt: skip
    """Return `acc` plus the product over `BLOCK_K` inputs, or words of 8 inputs, from `k` on."""
    inputs = k + tl.arange(0, BLOCK_K)
    if KIND == 2:
        RUN: tl.constexpr = GROUP // 8
        inside = inputs < IN // 8
        at = w + outputs[:, None].to(tl.int64) * (IN // 8) + inputs[None, :]
        words = tl.load(at, mask=in_out[:, None] & inside[None, :], other=0, eviction_policy="evict_first")
        groups = k // RUN + tl.arange(0, BLOCK_K // RUN)
        factor, shift = _scale_and_zero(scales, outputs, groups, in_out, groups < IN // GROUP, IN // GROUP)
        FULL: tl.constexpr = (BLOCK_N, BLOCK_K // RUN, RUN)
        factor = tl.reshape(tl.broadcast_to(factor[:, :, None], FULL), (BLOCK_N, BLOCK_K))
        shift = tl.reshape(tl.broadcast_to(shift[:, :, None], FULL), (BLOCK_N, BLOCK_K))
        odd, even = shift - 24.0 * factor, shift - 264.0 * factor  # values are stored plus 8
        x_at = x + rows[:, None] * x_stride + _first_inputs(inputs, RUN)[None, :]
        for i in tl.static_range(8):
            plus = odd if i % 2 == 1 else even
            weight = (_int4(words, i, FUSED) * factor + plus).to(x.dtype.element_ty)
            xs = tl.load(x_at + i * RUN, mask=in_rows[:, None] & inside[None, :], other=0.0)
            acc = _dot(xs, weight, acc, COMPUTE)
    else:
        inside = inputs < IN
        at = w + outputs[:, None].to(tl.int64) * IN + inputs[None, :]
        weight = tl.load(at, mask=in_out[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
        x_at, x_in = x + rows[:, None] * x_stride + inputs[None, :], in_rows[:, None] & inside[None, :]
        acc = _dot(tl.load(x_at, mask=x_in, other=0.0), weight, acc, COMPUTE)
    return acc


@triton.jit
def product_kernel(
    x, w, scales, bias, out, n, x_stride, out_stride,
    OUT: tl.constexpr, IN: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, EPILOGUE: tl.constexpr,
    BIASED: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FUSED: tl.constexpr,
):  # fmt: skip
    """Compute `OUT` outputs of `n` rows `x` with the weight `w`.

    `EPILOGUE`: 0 writes the product to `out`, 1 adds it to `out`, and 2 writes silu(gate) * up, where the weight's
    first `OUT` outputs are the gate and the next `OUT` outputs are up.
    """
    STEPS: tl.constexpr = IN // 8 if KIND == 2 else IN
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first, rows = tl.program_id(1) * BLOCK_M, tl.arange(0, BLOCK_M)
    in_out, in_rows = outputs < OUT, first + rows < n
    x += first.to(tl.int64) * x_stride
    out += first.to(tl.int64) * out_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, STEPS, BLOCK_K):
        acc = _partial(
            x, w, scales, outputs, rows, in_out, in_rows, k, x_stride, IN, GROUP, KIND, BLOCK_N, BLOCK_K, COMPUTE,
            FUSED, acc,
        )  # fmt: skip
        if EPILOGUE == 2:
            up = _partial(
                x, w, scales, outputs + OUT, rows, in_out, in_rows, k, x_stride, IN, GROUP, KIND, BLOCK_N, BLOCK_K,
                COMPUTE, FUSED, up,
            )  # fmt: skip
    if KIND == 1:
        acc = acc * tl.load(scales + outputs, mask=in_out, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        acc = acc + tl.load(bias + outputs, mask=in_out, other=0.0).to(tl.float32)[None, :]
    if EPILOGUE == 2:
        if KIND == 1:
            up = up * tl.load(scales + OUT + outputs, mask=in_out, other=0.0).to(tl.float32)[None, :]
        if BIASED:
            up = up + tl.load(bias + OUT + outputs, mask=in_out, other=0.0).to(tl.float32)[None, :]
        acc = acc / (1.0 + tl.exp(-acc)) * up
    at = out + rows[:, None] * out_stride + outputs[None, :]
    inside = in_rows[:, None] & in_out[None, :]
    if EPILOGUE == 1:
        acc = acc + tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def row_kernel(
    x, w, scales, bias, out,
    OUT: tl.constexpr, IN: tl.constexpr, GROUP: tl.constexpr, EPILOGUE: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Compute `OUT` outputs of one row `x` with an int4 weight `w`, without tensor cores; see `product_kernel`.

    A program computes `BLOCK_N` outputs; for a gate, half of them are the gate's and the other half those of up.
    """
    RUN: tl.constexpr = GROUP // 8
    WORDS: tl.constexpr = IN // 8
    block = tl.arange(0, BLOCK_N)
    if EPILOGUE == 2:
        first = tl.program_id(0) * (BLOCK_N // 2) + block // 2
        in_out = first < OUT
        outputs = first + block % 2 * OUT
    else:
        outputs = tl.program_id(0) * BLOCK_N + block
        in_out = outputs < OUT
    GROUPS: tl.constexpr = BLOCK_W // RUN
    acc = tl.zeros((BLOCK_N, GROUPS), tl.float32)
    line = w + outputs[:, None].to(tl.int64) * WORDS
    for k in range(0, WORDS, BLOCK_W):
        at = k + tl.arange(0, BLOCK_W)
        inside = at < WORDS
        words = tl.load(
            line + at[None, :], mask=in_out[:, None] & inside[None, :], other=0, eviction_policy="evict_first"
        )
        groups = k // RUN + tl.arange(0, GROUPS)
        factor, shift = _scale_and_zero(scales, outputs, groups, in_out, groups < IN // GROUP, IN // GROUP)
        x_at = x + _first_inputs(at, RUN)
        part = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
        odd = tl.zeros((BLOCK_W,), tl.float32)
        even = tl.zeros((BLOCK_W,), tl.float32)
        for i in tl.static_range(8):
            xs = tl.load(x_at + i * RUN, mask=inside, other=0.0).to(tl.float32)
            part += _int4(words, i, FUSED) * xs[None, :]
            if i % 2 == 1:
                odd += xs
            else:
                even += xs
        odd, even = tl.sum(tl.reshape(odd, (GROUPS, RUN)), 1), tl.sum(tl.reshape(even, (GROUPS, RUN)), 1)
        part = tl.sum(tl.reshape(part, (BLOCK_N, GROUPS, RUN)), 2) - (24.0 * odd + 264.0 * even)[None, :]
        acc += part * factor + (odd + even)[None, :] * shift  # values are stored plus 8
    y = tl.sum(acc, 1)
    if BIASED:
        y = y + tl.load(bias + outputs, mask=in_out, other=0.0).to(tl.float32)
    if EPILOGUE == 2:
        gate, up = tl.split(tl.reshape(y, (BLOCK_N // 2, 2)))
        y = gate / (1.0 + tl.exp(-gate)) * up
        outputs = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        in_out = outputs < OUT
    if EPILOGUE == 1:
        y = y + tl.load(out + outputs, mask=in_out, other=0.0).to(tl.float32)
    tl.store(out + outputs, y.to(out.dtype.element_ty), mask=in_out)


@dataclass(frozen=True, slots=True, eq=False)
class TritonProduct:
    """The product with a weight `[out, in]`, in the dtype of the rows `[n, in]`.

    Of more than `ROWS` rows, a weight that is not quantised is multiplied by torch. `values` are the weight itself in
    16 or 32 bits (`kind` 0); int8 or float8 values with a scale for each output (`SCALED`); or words `[out, in / 8]` of
    eight int4 values each (`INT4`), whose `scale` is words `[out, groups]` of a scale and a zero point in bfloat16.
    """

    values: Tensor
    out: int
    into: int
    kind: int = 0
    scale: Tensor | None = None
    bias: Tensor | None = None

    @classmethod
    def dense(cls, weight: Tensor, bias: Tensor | None = None) -> TritonProduct:
        """Return the product with a weight in float32 or 16 bits, which is not copied."""
        out, into = weight.shape
        return cls(weight, out, into, bias=bias)

    @classmethod
    def quantized(cls, values: Tensor, scale: Tensor, zero: Tensor | None) -> TritonProduct:
        """Return the product with an int8, float8 or int4 weight, given as in `QuantizedWeight`."""
        out, into = values.shape
        if zero is None:
            return cls(values, out, into, SCALED, scale)
        run = into // scale.shape[1] // 8  # words of a group of inputs, whose values i are inputs side by side
        nibbles = values.view(out, -1, 8, run).to(torch.int32)
        words = nibbles[:, :, 0].clone()
        for i in range(1, 8):
            words |= nibbles[:, :, i] << 4 * i
        high, low = (each.contiguous().view(torch.int16).to(torch.int32) for each in (scale, zero))
        return cls(words.view(out, into // 8), out, into, INT4, high << 16 | low & 0xFFFF)

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
        n, group = len(x), 0 if self.scale is None or self.kind != INT4 else self.into // self.scale.shape[1]
        shape = {"OUT": outputs, "IN": self.into, "GROUP": group, "EPILOGUE": epilogue, "BIASED": self.bias is not None}
        shape["FUSED"] = not triton.knobs.runtime.interpret
        with torch.cuda.device_of(x):
            if self.kind == INT4 and n == 1:
                words = min(power_of_two(self.into // 8, WORDS_OF_WARP), WORDS_OF_ROW)
                each = BLOCK_OUT_OF_ROW // 2 if epilogue == GATE else BLOCK_OUT_OF_ROW
                row_kernel[(triton.cdiv(outputs, each),)](
                    x, self.values, self.scale, self.bias, out, **shape, BLOCK_N=BLOCK_OUT_OF_ROW, BLOCK_W=words,
                    num_warps=words // WORDS_OF_WARP,
                )  # fmt: skip
                return
            stages = stages_of(self.kind, epilogue)
            grid = (triton.cdiv(outputs, BLOCK_OUT), triton.cdiv(n, BLOCK_ROWS))
            product_kernel[grid](
                x, self.values, self.scale, self.bias, out, n, x.stride(0), out.stride(0), **shape, KIND=self.kind,
                COMPUTE=compute_dtype(x.dtype), BLOCK_M=BLOCK_ROWS, BLOCK_N=BLOCK_OUT,
                BLOCK_K=step_of(self.kind, self.values.element_size(), x.element_size()), num_warps=WARPS,
                num_stages=stages,
            )  # fmt: skip


def step_of(kind: int, size: int, row_size: int) -> int:
    """Return how many inputs, or int4 words of 8 inputs, `product_kernel` multiplies in a step.

    `size` and `row_size`: the bytes of a weight and of a row's element. For quantised weights and rows in float32 a
    step has half as many inputs, so that all steps fit in shared memory.
    """
    return 32 if kind == INT4 else BLOCK_BYTES // max(size, row_size // 2)


def stages_of(kind: int, epilogue: int) -> int:
    """Return the steps of `product_kernel` whose weights are on their way at once: two weights, for a gate, have 3."""
    return 3 if epilogue == GATE else 4 if kind else 6
