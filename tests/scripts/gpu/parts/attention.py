"""Each backend of scaled_dot_product_attention at decoding's shapes: whether it runs, its first call, and its time."""

from __future__ import annotations

import itertools
import time
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from measuring import Part, queued, synchronise
from torch.nn.attention import SDPBackend, sdpa_kernel

part = Part("attention")
device = part.device
heads, kv_heads, dim = (4, 2, 16) if part.toy else (32, 8, 128)
BACKENDS = {
    "default": None,
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def measure(rows: int, context: int, masked: bool, grouped: bool) -> None:
    """Write the microseconds of each backend, and the milliseconds of its first call, which prepares it."""
    about = {"rows": rows, "keys": context, "mask": masked, "grouped": grouped}
    q = torch.randn(1, heads, rows, dim, device=device, dtype=part.dtype)
    k, v = (torch.randn(1, kv_heads, context, dim, device=device, dtype=part.dtype) for _ in range(2))
    mask = torch.ones(1, 1, rows, context, dtype=torch.bool, device=device) if masked else None
    if not grouped:
        k, v = (x.unsqueeze(2).expand(1, kv_heads, heads // kv_heads, context, dim).flatten(1, 2) for x in (k, v))
    times, firsts = {}, {}

    def call() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)

    for name, backend in BACKENDS.items():
        only = nullcontext() if backend is None else sdpa_kernel(backend)
        with part.attempt("refused backend", backend=name, **about), torch.inference_mode(), only:
            synchronise(device)
            begun = time.perf_counter()
            call()
            synchronise(device)
            firsts[name] = 1e3 * (time.perf_counter() - begun)
            times[name] = 1e6 * queued(call, device, repeats=20)[0]
    part.line("microseconds", **about, **{name: times.get(name, "refused") for name in BACKENDS})
    part.line("first call, ms", **about, **{name: firsts.get(name, "refused") for name in BACKENDS})


for context in (64, 128) if part.toy else (256, 2048, 8192):
    for rows, masked, grouped in itertools.product((1, 8), (True, False), (True, False)):
        if part.left() > 5:
            measure(rows, context, masked, grouped)
