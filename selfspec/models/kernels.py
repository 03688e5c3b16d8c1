"""Kernels for quantised weights, selfspec's own and torch's, and the choice of the fastest kernel on this machine.

The fastest kernel depends on the processor: torch may have a kernel optimised for it, or only a reference kernel that
is slower than float32. Where selfspec's own cannot be compiled, kernels are therefore timed on a random weight like the
model's, and the choice is cached.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.basics.files import cached_file, read_cached, write_cached
from selfspec.basics.machine import release_memory
from selfspec.models.linears import Call
from selfspec.models.low_precision import Bits, Kernel, PackedWeight, QuantizedWeight, fake, quantize
from selfspec.models.native import NativeProduct
from selfspec.models.native_library import available, timing_key
from selfspec.models.triton_kernels.switch import triton_enabled


def seconds_of(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Return the mean seconds of one of `calls`, run one after the other on `device`.

    On CUDA they are captured as a graph, and its replay is timed by the device's own events. Raises `RuntimeError` if
    they cannot be captured.
    """
    if device.type != "cuda":
        begun = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - begun) / len(calls)
    graph, first, last = _captured(calls, device)
    graph.replay()  # the first replay also uploads the graph
    first.record()
    graph.replay()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / len(calls)


def _captured(
    calls: Sequence[Callable[[], object]], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, torch.cuda.Event, torch.cuda.Event]:
    """Return a graph of `calls`, and two events to time its replay."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for call in calls:
                call()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        return graph, first, last


_OUTPUTS, _VALUES = 4096, 2**26  # the timed weight has at least `_OUTPUTS` outputs, else at most `_VALUES` values
_REPEATS = 5
_COPIES, _CACHES = 24, 2**26  # timed copies: at most 24 of together 64 MiB, more than CPU caches hold, as in a step
_ENLARGED = 2.0**20  # factor on a single row for `int8_dynamic`
_WIDE = 24  # rows from which a product with the weight dequantised to bfloat16 is faster than the quantised kernel
COARSER = 1.1  # factor on float8's time, as its drafts are accepted less often: its weights are five times as far off
_CONVERTED = 2**22  # weights to convert to float8 at once
_ERROR = 0.05  # largest relative error of a kernel's product to that of the dequantised weight


def int8_weight_only(weight: QuantizedWeight, _dtype: torch.dtype) -> Call:
    """Pack int8 weights on the CPU, for rows that each call casts to bfloat16.

    torch's kernel reads 32 inputs at a time, past the end of a row, so inputs are padded with zeros to a multiple of
    32.
    """
    into = weight.values.shape[1]
    more = -into % 32
    values, scale = F.pad(weight.values, (0, more)) if more else weight.values, weight.scale.flatten()

    def product(x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(F.pad(x, (0, more)) if more else x, values, scale)

    return _wide_too(product, into)


def int8_dynamic(weight: QuantizedWeight, _dtype: torch.dtype) -> Call:
    """Pack int8 weights for rows that are quantised to int8 at each call, each row by its own largest value.

    torch's dynamic kernel is fastest for one row, but quantises all rows by one scale. Several rows are therefore
    quantised here, for oneDNN's kernel, which costs little more for each further row; the weights are packed for oneDNN
    at the first call with several rows. torch quantises a row with all values below 2^-6 too coarsely, so a single row
    is multiplied by `_ENLARGED`, and the weights' scales are divided by it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has deprecated its quantised tensor types
        scales, zeros = weight.scale.flatten().double() / _ENLARGED, torch.zeros(len(weight.scale), dtype=torch.long)
        quantized = torch._make_per_channel_quantized_tensor(weight.values, scales, zeros, 0)
        packed, scale = torch.ops.quantized.linear_prepack(quantized, None), weight.scale
        alone = torch.ops.quantized.linear_dynamic.default
    several: list[Call] = []

    def product(x: Tensor) -> Any:
        if len(x) == 1:
            return alone(x.float() * _ENLARGED, packed)
        if not several:
            several.append(_by_rows(torch.ops.quantized.linear_unpack(packed)[0].int_repr(), scale))
        return several[0](x)

    return product


def _by_rows(values: Tensor, scale: Tensor) -> Call:
    """Return the product with int8 `values` `[out, in]`, which have one `scale` for each output.

    Rows arrive in floating point; each call quantises them to 8 bits, each row by its own largest value.
    """
    packed = torch.ops.onednn.qlinear_prepack(values, None)
    scales, zeros = scale.flatten().float(), torch.zeros(len(scale), dtype=torch.int32)
    product = torch.ops.onednn.qlinear_pointwise.default

    def several(x: Tensor) -> Any:
        x = x.float()
        size = x.abs().amax(1, keepdim=True).clamp_(min=1e-30).div_(127)
        steps = torch.div(x, size).add_(128).round_().to(torch.uint8)
        return product(steps, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "").mul_(size)

    return several


def int4_weight_only(weight: QuantizedWeight, _dtype: torch.dtype) -> Call:
    """Pack int4 weights on the CPU, for rows that each call casts to bfloat16.

    Weights have a scale and a zero point for each output and group of inputs. Outputs are padded to a multiple of 16,
    as torch requires; products do not include the padding.
    """
    assert weight.zero is not None
    out, into = weight.values.shape
    values = F.pad(weight.values, (0, 0, 0, -out % 16))
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int(), 1)
    both = F.pad(torch.stack([weight.scale, weight.zero], -1), (0, 0, 0, 0, 0, -out % 16)).transpose(0, 1).contiguous()
    product, group = torch.ops.aten._weight_int4pack_mm_for_cpu.default, into // weight.scale.shape[1]
    return _wide_too(lambda x: product(x, packed, group, both).narrow(1, 0, out), into)


def int4_weight_only_cuda(weight: QuantizedWeight, _dtype: torch.dtype) -> Call:
    """Pack int4 weights on CUDA (compute capability 8.0 or higher), for rows that each call casts to bfloat16.

    Outputs are padded to a multiple of 8, as torch requires; products do not include the padding. The number of inputs
    has to be a multiple of 32. Any number of rows is multiplied with the packed weight: a copy of it in bfloat16 for
    many rows, as on the CPU, would take four times as much of the GPU's memory.
    """
    assert weight.zero is not None
    out, into = weight.values.shape
    more = -out % 8
    values = F.pad(weight.values, (0, 0, 0, more)).to(torch.uint8)
    tiles = next(n for n in (8, 4, 2) if into % (16 * n) == 0)
    packed = torch.ops.aten._convert_weight_to_int4pack(values[:, ::2] << 4 | values[:, 1::2], tiles)
    both = F.pad(torch.stack([weight.scale, weight.zero], -1), (0, 0, 0, 0, 0, more)).transpose(0, 1).contiguous()
    product, group = torch.ops.aten._weight_int4pack_mm.default, into // weight.scale.shape[1]
    return lambda x: product(x.to(torch.bfloat16), packed, group, both).narrow(1, 0, out)


def float8(weight: QuantizedWeight, _dtype: torch.dtype) -> Call:
    """Pack weights in float8 (e4m3) with a scale for each output, for rows that each call casts to float8.

    Each row gets a scale of its own. For CUDA, compute capability 8.9 or higher. Outputs and inputs are padded to
    multiples of 16, as torch requires; products do not include the padding.
    """
    out, into = weight.values.shape
    more = -into % 16
    values, scale = _in_float8(F.pad(weight.weight(torch.float32), (0, more, 0, -out % 16)))
    across, scales = values.t(), scale.t().contiguous()

    def product(x: Tensor) -> Tensor:
        rows, size = _in_float8(F.pad(x.float(), (0, more)) if more else x.float())
        result = torch._scaled_mm(
            rows, across, scale_a=size, scale_b=scales, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return result.narrow(1, 0, out)

    return product


def triton(weight: QuantizedWeight, _dtype: torch.dtype) -> Call:
    """Return the product of a Triton kernel, which dequantises the weight to the dtype of the rows."""
    from selfspec.models.triton_kernels.products import TritonProduct

    return TritonProduct.quantized(weight.values, weight.scale, weight.zero)


def triton_float8(weight: QuantizedWeight, _dtype: torch.dtype) -> Call:
    """Return the product of a Triton kernel with the weight in float8 (compute capability 8.9 or higher).

    It is converted a few outputs at a time: a head's weight in float32 would take more memory than all draft weights.
    """
    from selfspec.models.triton_kernels.products import TritonProduct

    values = torch.empty_like(weight.values, dtype=torch.float8_e4m3fn)
    scale = torch.empty_like(weight.scale, dtype=torch.float32)
    rows = max(1, _CONVERTED // values.shape[1])
    tensors = (values, scale, weight.values, weight.scale)
    for to_values, to_scale, of_values, of_scale in zip(*(torch.split(t, rows) for t in tensors), strict=True):
        part, size = _in_float8(replace(weight, values=of_values, scale=of_scale).weight(torch.float32))
        to_values.copy_(part)
        to_scale.copy_(size)
    return TritonProduct.quantized(values, scale, None)


def _in_float8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows `[n, d]` in float8, and their scales `[n, 1]`."""
    size = rows.abs().amax(1, keepdim=True).clamp(min=1e-30) / torch.finfo(torch.float8_e4m3fn).max
    return (rows / size).to(torch.float8_e4m3fn), size


def _wide_too(product: Call, into: int) -> Call:
    """Return a function that calls `product` for fewer than `_WIDE` rows; more rows use the weight in bfloat16.

    `into` is the number of inputs. The weight is dequantised to bfloat16 at the first call with `_WIDE` rows or more
    (as in a search's replay), and kept.
    """
    dequantized: list[Tensor] = []

    def either(x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16)
        if len(x) < _WIDE:
            return product(x)
        if not dequantized:
            eye = torch.eye(into, dtype=torch.bfloat16, device=x.device)
            dequantized.append(torch.cat([product(rows) for rows in torch.split(eye, 64)]))  # the transposed weight
        return x @ dequantized[0]

    return either


class _Native:
    """selfspec's own kernel for int8 or int4 weights, with float32 rows; it also rounds weights to nearest."""

    def __call__(self, weight: QuantizedWeight, _dtype: torch.dtype) -> Call:
        return NativeProduct(weight)

    def rounded(self, weight: Tensor, bits: Bits) -> Call | None:
        """Return the product with `quantize(weight, bits)`; None for weights that native code does not round."""
        if weight.dtype not in (torch.float32, torch.bfloat16) or weight.device.type != "cpu":
            return None
        return NativeProduct(PackedWeight.rounded(weight, bits))


native = _Native()
# Without 8-bit dot product instructions (VNNI), torch's kernel accumulates in 16 bits, which overflow: it is left out.
_DOT_PRODUCTS = {"int8 dynamic": int8_dynamic} if torch.cpu._is_vnni_supported() else {}
KERNELS: Mapping[Bits, Mapping[str, Kernel]] = {
    8: {"native": native, "weights only": int8_weight_only, **_DOT_PRODUCTS},
    4: {"native": native, "weights only": int4_weight_only},
}
# torch's own int8 product computes an output in one thread on CUDA, and is slower than bfloat16: it is left out.
ON_CUDA: Mapping[Bits, Mapping[str, Kernel]] = {
    8: {"float8": float8, "fake": fake},
    4: {"weights only": int4_weight_only_cuda, "fake": fake},
}
BY_DEVICE = {"cpu": KERNELS, "cuda": ON_CUDA}  # by device type


def kernels_on(device: torch.device, bits: Bits) -> Mapping[str, Kernel]:
    """Return the kernels to choose from on the CPU or a CUDA device, by name."""
    kernels = BY_DEVICE[device.type][bits]
    if not triton_enabled(device):
        return kernels
    more: dict[str, Kernel] = {"triton": triton}
    if bits == 8 and (device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)):
        more["triton float8"] = triton_float8
    return {**kernels, **more}


def kernel_for(weight: Tensor, bits: Bits) -> Kernel:
    """Return the kernel for products of few rows with weights of this shape, dtype and device.

    It is selfspec's own on a CPU with a C++ compiler, where it was the fastest on every processor that was measured;
    else the fastest one for one row (timed, cached). Returns `fake` if no kernel works, if all are slower on CUDA, and
    on devices other than the CPU and CUDA: quantised drafts are then no faster than drafts in full precision, and their
    weights take as much memory.
    """
    if weight.device.type not in BY_DEVICE:
        return fake
    kernels, path = kernels_on(weight.device, bits), _path(weight, bits)
    if "native" in kernels and available():
        return kernels["native"]
    known = read_cached(path)
    if isinstance(known, str) and known in (*kernels, "fake"):
        return kernels.get(known, fake)
    try:
        times = kernel_times(weight, bits)
    except torch.OutOfMemoryError:  # not kept: another time there may be memory
        return fake
    for name in ("float8", "triton float8"):
        if name in times:
            times[name] *= COARSER
    release_memory()
    best = min(times, key=lambda name: times[name]) if times else "fake"
    write_cached(path, best)
    return kernels.get(best, fake)


@torch.inference_mode()
def kernel_times(weight: Tensor, bits: Bits) -> dict[str, float]:
    """Return the seconds of a product of one row with a random weight like `weight`, by name of the kernel.

    Weights are read from memory and not from CPU caches, as in a decode step. Kernels that raise an error or are
    inaccurate, with one row or with several, are left out. Raises `torch.OutOfMemoryError`.
    """
    generator = torch.Generator().manual_seed(0)
    into = weight.shape[1]
    out = max(min(len(weight), _VALUES // into), _OUTPUTS)
    like = torch.randn(out, into, generator=generator).to(weight)
    several = torch.randn(3, into, generator=generator).to(weight)
    x = several[:1]
    quantized = quantize(like, bits)
    exact = several.float() @ quantized.weight(torch.float32).t()
    copies = [
        quantized,
        *(_copy(quantized) for _ in range(min(_COPIES, _CACHES // (quantized.values.numel() * bits // 8)) - 1)),
    ]
    calls: dict[str, list[Call]] = {}
    for name, kernel in kernels_on(weight.device, bits).items():
        try:
            call = kernel(quantized, weight.dtype)
            if _near(call(several), exact) and _near(call(several[:1]), exact[:1]):
                calls[name] = [call, *(kernel(copy, weight.dtype) for copy in copies[1:])]
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever torch, Triton and compilers raise
            continue
    times = dict.fromkeys(calls, float("inf"))
    for _ in range(_REPEATS):
        for name, products in calls.items():
            times[name] = min(times[name], seconds_of([partial(call, x) for call in products], weight.device))
    return times


def _copy(weight: QuantizedWeight) -> QuantizedWeight:
    """Return a copy of a weight whose `values` do not share memory with the original."""
    return replace(weight, values=weight.values.clone())


def _near(ours: Tensor, exact: Tensor) -> bool:
    return float((ours.float() - exact).norm()) < _ERROR * float(exact.norm())


def _path(weight: Tensor, bits: Bits) -> Path:
    what = [*timing_key(weight.device), bits, list(weight.shape), str(weight.dtype), *kernels_on(weight.device, bits)]
    return cached_file("kernels", what)
