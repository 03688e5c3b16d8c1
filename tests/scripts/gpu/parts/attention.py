"""Each backend of scaled_dot_product_attention at decoding's shapes: whether it runs, its first call, and its time."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from measuring import Part, replayed, synchronise
from torch.nn.attention import SDPBackend, sdpa_kernel

part = Part("attention")
device = part.device
LAYOUTS = ("as passes", "grouped", "copied")
part.line("setting", TORCH_CUDNN_SDPA_DEPRIORITIZED=os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "unset"))
heads, kv_heads, dim = (4, 2, 16) if part.toy else (32, 8, 128)
BACKENDS = {
    "default": None,
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def measure(rows: int, context: int, masked: bool, layout: str) -> None:
    """Write the microseconds of each backend, and the milliseconds of its first call, which prepares it."""
    about = {"rows": rows, "keys": context, "mask": masked, "layout": layout}
    q = torch.randn(1, heads, rows, dim, device=device, dtype=part.dtype)
    k, v = (torch.randn(1, kv_heads, context, dim, device=device, dtype=part.dtype) for _ in range(2))
    mask = torch.zeros(1, 1, rows, context, dtype=part.dtype, device=device) if masked else None
    group = heads // kv_heads
    if layout == "as passes":  # a key head's queries side by side, its keys repeated without a copy
        q = q.view(kv_heads, group, rows, dim)
        k, v = (x[0].unsqueeze(1).expand(kv_heads, group, context, dim) for x in (k, v))
    elif layout == "copied":
        k, v = (x.unsqueeze(2).expand(1, kv_heads, group, context, dim).flatten(1, 2) for x in (k, v))
    times, firsts = {}, {}

    def call() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=layout == "grouped")

    for name, backend in BACKENDS.items():
        only = nullcontext() if backend is None else sdpa_kernel(backend)
        with part.attempt("refused backend", backend=name, **about), torch.inference_mode(), only:
            synchronise(device)
            begun = time.perf_counter()
            call()
            synchronise(device)
            firsts[name] = 1e3 * (time.perf_counter() - begun)
            times[name] = 1e6 * replayed([call] * 20, device)
    part.line("microseconds", **about, **{name: times.get(name, "refused") for name in BACKENDS})
    part.line("first call, ms", **about, **{name: firsts.get(name, "refused") for name in BACKENDS})


for context in (64, 128) if part.toy else (256, 2048, 8192):
    for rows, masked, layout in itertools.product((1, 8), (True, False), LAYOUTS):
        if part.left() > 5:
            measure(rows, context, masked, layout)
