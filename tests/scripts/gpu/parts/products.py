"""Products alone at the shapes of Llama 3 8B, replayed from a graph over rotated weights: GB/s of weights by rows."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from measuring import Part, read_bandwidth, replayed
from subjects import SHAPES, as_on_cuda

from selfspec.models.kernels import BY_DEVICE
from selfspec.models.low_precision import quantize

part = Part("products")
as_on_cuda(part)
device = part.device
ROWS = (1, 2, 4, 8, 16)
HEAD = {"head": (128256, 4096)}  # outputs and inputs
ENOUGH = 2**28  # bytes of weights that are read in turn: more than any cache holds
shrink = 32 if part.toy else 1
part.line("bandwidth", of="a sum, GB/s", gb_per_s=read_bandwidth(device, ENOUGH // shrink) / 1e9)


def in_bfloat16(weight: torch.Tensor):
    """Return the product of a copy of a weight."""
    copy = weight.clone()
    return lambda x: F.linear(x, copy)


def products(weight: torch.Tensor):
    """Yield the name, the bytes and a maker of each product of a weight; each call of a maker holds a copy."""
    yield "bfloat16", weight.nbytes, lambda: in_bfloat16(weight)
    for bits in (8, 4):
        held = quantize(weight, bits)
        for name, kernel in BY_DEVICE[device.type][bits].items():
            size = weight.numel() * bits // 8
            yield (
                f"int{bits}, {name}",
                size,
                lambda k=kernel, h=held: k(replace(h, values=h.values.clone()), part.dtype),
            )


for shape, (out, into) in (SHAPES | HEAD).items():
    weight = torch.randn(out // shrink, into // shrink, device=device).to(part.dtype)
    for name, size, make in products(weight):
        if part.left() < 8:
            break
        about = {"shape": shape, "product": name}
        with part.attempt("GB/s by rows", **about), torch.inference_mode():
            copies = [make() for _ in range(2 if part.toy else max(2, min(16, -(-ENOUGH // size))))]
            speeds, micros = {}, 0.0
            for rows in ROWS:
                x = torch.randn(rows, into // shrink, device=device).to(part.dtype)
                seconds = replayed([lambda c=c, x=x: c(x) for c in copies], device)
                micros = micros or 1e6 * seconds
                speeds[f"{rows}"] = size / seconds / 1e9
            part.line("GB/s by rows", **about, mib=size / 2**20, us_for_1=micros, **speeds)
        copies = []
        if not part.toy:
            torch.cuda.empty_cache()
