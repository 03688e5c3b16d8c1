"""The Triton kernels with blocks of other sizes, at the shapes of Llama 3 8B: microseconds of 1 and 9 rows.

Kernels are compiled by several processes, each for some of the sizes, and then timed one after the other.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
from measuring import Part, replayed

SHAPES = {"o": (4096, 4096), "gate": (28672, 4096), "down": (4096, 14336)}
SIZES = [  # outputs of a program, bytes of an output's weights in a step, warps, stages
    (32, 256, 4, 4), (16, 256, 4, 4), (16, 256, 2, 4), (16, 512, 4, 3), (16, 128, 4, 5), (16, 512, 8, 3),
    (32, 128, 4, 5), (32, 512, 8, 3), (32, 256, 8, 4), (64, 128, 4, 4), (64, 128, 8, 4), (16, 1024, 4, 2),
    (16, 128, 2, 6),
]  # fmt: skip
ATTENTION = list(
    itertools.product((64, 128, 256), (32, 64), (2, 4), (2,))
)  # slots of a chunk, of a step, warps, stages
KEYS = (2048, 8192)
WORKERS = 10


def made(case, device, dtype, copies=1):
    """Return the product's calls for a case, each with weights of its own, and the bytes of one."""
    from selfspec.models.low_precision import quantize
    from selfspec.models.triton_kernels import products

    kind, shape, (products.BLOCK_OUT, products.BLOCK_BYTES, products.WARPS, products.STAGES) = case
    out, into = SHAPES[shape]
    torch.manual_seed(0)
    weight = torch.randn(out, into, device=device).to(dtype)
    if kind == "bfloat16":
        one = [products.TritonProduct.dense(weight.clone()) for _ in range(copies)]
    else:
        held = quantize(weight, 8 if kind == "int8" else 4)
        one = [products.TritonProduct.quantized(held.values, held.scale, held.zero) for _ in range(copies)]

    def calls(rows):
        x = torch.randn(rows, into, device=device).to(dtype)
        target = torch.zeros(rows, out // 2 if shape == "gate" else out, device=device, dtype=dtype)
        if shape == "gate":
            return [partial(each.gate, x, target) for each in one]
        if shape == "down":
            return [partial(each.add, target, x) for each in one]
        return [partial(each.write, x, target) for each in one]

    return calls, one[0].values.nbytes


def attending(case, device, dtype, copies=1):
    """Return the calls of attention for a case."""
    from selfspec.models.triton_kernels import attention

    keys, (attention.CHUNK, attention.BLOCK_SLOTS, attention.WARPS, attention.STAGES) = case
    attention.CHUNKS = 8192 // attention.CHUNK + 1
    caches = [torch.randn(2, 1, 8, keys + 16, 128, device=device).to(dtype).unbind(0) for _ in range(copies)]

    def calls(rows):
        q = torch.randn(8, 4, rows, 128, device=device).to(dtype)
        slots = torch.arange(keys, keys + rows, device=device)[None]
        out = torch.empty(rows, 4096, device=device, dtype=dtype)
        how = {"scaling": 128**-0.5, "kv_len": keys + 16}
        return [partial(attention.decode_attention, q, cache, slots, out, **how) for cache in caches]

    return calls, caches[0][0].nbytes * 2


def compiled(case):
    """Compile the kernels of a case, and return what was wrong."""
    try:
        maker = made if len(case) == 3 else attending
        calls, _ = maker(case, torch.device("cuda", 0), torch.bfloat16)
        for rows in (1, 9):
            calls(rows)[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{case}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def main():
    part = Part("tuning")
    kinds = ("int4", "bfloat16", "int8")
    cases = [*itertools.product(kinds, SHAPES, SIZES), *itertools.product(KEYS, ATTENTION)]
    if part.toy:
        part.line("tuning", said="needs a GPU", cases=len(cases))
        return
    begun, failed = time.perf_counter(), set()
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        for case, wrong in zip(cases, pool.map(compiled, cases, chunksize=4), strict=True):
            if wrong:
                failed.add(case)
                part.line("compiled", failure=wrong)
    part.line("compiled", cases=len(cases), seconds=time.perf_counter() - begun)
    for case in cases:
        if part.left() < 3:
            break
        if case in failed:
            continue
        maker = made if len(case) == 3 else attending
        with part.attempt("blocks", case=str(case)), torch.inference_mode():
            calls, size = maker(case, part.device, part.dtype)
            calls, size = maker(case, part.device, part.dtype, max(4, min(16, -(-(2**27) // size))))
            found = {f"us, {rows}": 1e6 * replayed(calls(rows), part.device) for rows in (1, 9)}
            part.line("blocks", kernel=str(case[:-1]), sizes=str(case[-1]), mb=size / 1e6,
                      gb_per_s=size / found["us, 1"] / 1e3, **found)  # fmt: skip


if __name__ == "__main__":
    main()
