"""The Triton kernels: values, whether rows have the bits that they have alone, products and passes beside torch's.

In a rehearsal the driver sets `SELFSPEC_TRITON=1` and `TRITON_INTERPRET=1`: an interpreter's times say nothing, and a
row's bits depend on its place there.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product as every

import torch
from measuring import Part, queued, read_bandwidth, replayed
from subjects import SHAPES, paths, random_llama, size_cache

from selfspec.models.kernels import kernels_on, triton
from selfspec.models.low_precision import QuantizedWeight, quantize
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.draft_path import FULL

part = Part("triton_kernels")
if find_spec("triton") is None:
    part.line("kernels", said="triton is not installed: left out")
    sys.exit(0)
device, dtype = part.device, part.dtype
shrink = 64 if part.toy else 1
ROWS = (1, 3, 9, 16)


def kinds(weight: torch.Tensor):
    """Yield the name, the maker, the weight that is meant and the bytes of each Triton product of a weight."""
    from selfspec.models.triton_kernels.products import TritonProduct

    yield "bfloat16", lambda: TritonProduct.dense(weight.clone()), weight.double(), weight.nbytes
    for bits in (8, 4):
        held = quantize(weight, bits)
        for name, kernel in kernels_on(device, bits).items():
            if "triton" in name:
                make = partial(_copied, kernel, held)
                yield f"int{bits}, {name}", make, held.weight(torch.float64), weight.numel() * bits // 8


def _copied(kernel, held: QuantizedWeight):
    """Return the product of a copy of a weight."""
    return kernel(replace(held, values=held.values.clone()), dtype)


def as_alone(call, x: torch.Tensor) -> bool:
    """Whether every row of `x` has the bits that it has alone."""
    return torch.equal(call(x), torch.cat([call(row[None]) for row in x]))


def products() -> None:
    """Write the errors of each kind of product, with its epilogues."""
    for out, into in ((48, 64), (40, 576)) if part.toy else ((48, 64), (1000, 1536), (4096, 4096), (4096, 14336)):
        torch.manual_seed(out)
        weight, x = (torch.randn(n, into, device=device).to(dtype) for n in (out, 16))
        for name, make, exact, _ in kinds(weight):
            about = {"product": name, "outputs": out, "inputs": into}
            with part.attempt("product", **about):
                product, right = make(), x.double() @ exact.t()
                errors = {f"error, {n} rows": _off(product(x[:n]), right[:n]) for n in ROWS}
                added, gated = x.new_ones(16, out), x.new_empty(16, out // 2)
                product.add(added, x)
                product.gate(x, gated)
                gate, up = right.chunk(2, 1)
                part.line(
                    "product", **about, **errors, added=_off(added, right + 1), float32=_off(product.float32(x), right),
                    gated=_off(gated, torch.nn.functional.silu(gate) * up), rows_as_alone=as_alone(product, x[:9]),
                )  # fmt: skip


def attention() -> None:
    """Write the errors of attention over a chain and a tree."""
    from selfspec.models.triton_kernels.attention import decode_attention

    heads, group, dim = (1, 2, 16) if part.toy else (8, 4, 128)
    for context, masked in every((40, 300) if part.toy else (40, 2048, 8192), (False, True)):
        about = {"keys": context, "tree": masked}
        with part.attempt("attention", **about):
            torch.manual_seed(context)
            n, slots = 9, context + 16
            q = torch.randn(heads, group, n, dim, device=device).to(dtype)
            keys, values = (torch.randn(1, heads, slots, dim, device=device).to(dtype) for _ in range(2))
            own = torch.arange(context, context + n, device=device)[None]
            seen = torch.arange(slots, device=device) <= own[..., None]
            if masked:
                seen &= (torch.rand(seen.shape, device=device) < 0.7) | (torch.arange(slots, device=device) < 5)

            def attend(tokens: slice, q=q, kv=(keys, values), own=own, seen=seen, masked=masked) -> torch.Tensor:
                some = q[:, :, tokens].contiguous()
                out = some.new_empty(some.shape[2], heads * group * dim)
                mask = seen[:, tokens].contiguous() if masked else None
                some_own = own[:, tokens].contiguous()
                decode_attention(some, kv, some_own, out, scaling=dim**-0.5, kv_len=kv[0].shape[2], mask=mask)
                return out

            scores = torch.einsum("hgnd,hsd->hgns", q.double(), keys[0].double()) * dim**-0.5
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            right = torch.einsum("hgns,hsd->nhgd", weights, values[0].double()).flatten(1)
            ours, alone = attend(slice(None)), [attend(slice(i, i + 1)) for i in range(n)]
            part.line("attention", **about, error=_off(ours, right), rows_as_alone=torch.equal(ours, torch.cat(alone)))


def _off(ours: torch.Tensor, right: torch.Tensor) -> float:
    return float((ours.double() - right.double()).norm() / right.double().norm())


def speeds() -> None:
    """Write GB/s at the shapes of Llama 3 8B, from graphs over rotated weights."""
    enough, shapes = 2**28 // shrink**2, {"o": SHAPES["o"]} if part.toy else SHAPES
    part.line("bandwidth", gb_per_s=read_bandwidth(device, max(enough, 2**16)) / 1e9)
    for shape, (out, into) in shapes.items():
        weight = torch.randn(out // shrink, into // shrink, device=device).to(dtype)
        for name, make, _, size in kinds(weight):
            if part.left() < 20:
                return
            with part.attempt("GB/s by rows", shape=shape, product=name):
                copies = [make() for _ in range(2 if part.toy else max(2, min(16, -(-enough // size))))]
                found = {}
                for rows in ROWS[:: 3 if part.toy else 1]:
                    x = torch.randn(rows, into // shrink, device=device).to(dtype)
                    found[f"{rows}"] = size / replayed([lambda c=c, x=x: c(x) for c in copies], device) / 1e9
                part.line("GB/s by rows", shape=shape, product=name, **found)


def passes() -> None:
    """Write passes of eight layers of Llama 3 8B beside torch's: times, differences, and bits of verification."""
    model = random_llama(part, positions=4096, layers=8)
    ours = LeanRuntime(model, kernel=triton)
    os.environ["SELFSPEC_TRITON"] = "0"
    theirs = LeanRuntime(model)
    os.environ["SELFSPEC_TRITON"] = "1"
    contexts = (40,) if part.toy else (256, 2048)
    for runtime in (ours, theirs):
        size_cache(runtime, contexts[-1] + 32)
    int4 = ours.compile(paths(ours.layers)["int4"])
    tokens = torch.randint(model.config.vocab_size, (1, contexts[-1] + 9), device=device)
    for context in contexts:
        if part.left() < 8:
            return
        with part.attempt("pass", keys=context):
            found = {}
            for name, runtime in (("triton", ours), ("torch", theirs)):
                with runtime.session(context + 9):
                    runtime.forward(tokens[:, :context], 0, logits=None)
                    nine = tokens[:, context : context + 9]
                    alone = torch.cat([runtime.forward(nine[:, i : i + 1], context + i).logits for i in range(9)], 1)
                    together = runtime.forward(nine, context).logits
                    found[name] = (alone, together)
                    times = {}
                    full = runtime.compile(FULL)
                    for kind, path, n in (("1", full, 1), ("9", full, 9), ("int4", int4, 1)):
                        if kind != "int4" or name == "triton":
                            call = partial(runtime.forward, nine[:, :n], context, path=path)
                            times[f"ms, {kind}"] = 1e3 * queued(call, device, repeats=2 if part.toy else 20)[0]
                part.line(
                    "pass", by=name, keys=context, **times, rows_as_alone=int((alone == together).all(-1).sum()),
                    off_from_triton=_off(together, found["triton"][1]),
                )  # fmt: skip


with torch.inference_mode():
    for measure in (products, attention, passes, speeds):
        with part.attempt(measure.__name__):
            measure()
