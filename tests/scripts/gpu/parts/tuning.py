"""The Triton kernels with blocks of other sizes, at the shapes of Llama 3 8B: microseconds of 1 and 9 rows.

Kernels are compiled by several processes, each for some of the sizes, and then timed one after the other.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from measuring import Part, replayed
from subjects import SHAPES

NAMES = ("o", "gate and up", "down")  # of the shapes that are measured
SIZES = [  # outputs of a program, bytes of an output's weights in a step, warps, stages
    (32, 256, 4, 4), (32, 256, 4, 3), (32, 256, 4, 6), (16, 256, 2, 4), (16, 512, 4, 3), (32, 128, 4, 5),
    (32, 512, 8, 3), (64, 128, 8, 4), (16, 128, 2, 6),
]  # fmt: skip
ROW = [(16, 1024, 128), (16, 512, 128), (8, 512, 128), (8, 1024, 128), (8, 256, 64)]  # outputs, words, words of a warp
ATTENTION = list(itertools.product((64, 128, 256), (32, 64), (2, 4), (2,)))  # slots of a chunk, a step, warps, stages
WORKERS = 10


class Case(NamedTuple):
    """A kernel (`bfloat16`, `int8`, `row` or `attention`), a shape or number of keys, and sizes of its blocks."""

    kernel: str
    shape: str | int
    sizes: tuple[int, ...]


CASES = [
    *(Case(*case) for case in itertools.product(("bfloat16", "int8"), NAMES, SIZES)),
    *(Case("row", *case) for case in itertools.product(NAMES, ROW)),
    *(Case("attention", *case) for case in itertools.product((2048, 8192), ATTENTION)),
]


def product(case: Case, device: torch.device, copies: int) -> tuple[Callable[[int], list[Any]], int]:
    """Return a maker of the calls of a product with `copies` weights, by rows, and the bytes of one weight."""
    from selfspec.models.low_precision import quantize
    from selfspec.models.triton_kernels import products

    if case.kernel == "row":
        products.BLOCK_OUT_OF_ROW, products.WORDS_OF_ROW, products.WORDS_OF_WARP = case.sizes
    else:
        products.BLOCK_OUT, products.BLOCK_BYTES, products.WARPS, stages = case.sizes
        products.stages_of = lambda kind, epilogue: stages
    torch.manual_seed(0)
    weight = torch.randn(*SHAPES[str(case.shape)], device=device).bfloat16()
    made = []
    for _ in range(copies):
        if case.kernel == "bfloat16":
            made.append(products.TritonProduct.dense(weight.clone()))
        else:
            held = quantize(weight, 8 if case.kernel == "int8" else 4)
            made.append(products.TritonProduct.quantized(held.values, held.scale, held.zero))
    out, into = weight.shape

    def calls(rows: int) -> list[Any]:
        x = torch.randn(rows, into, device=device).bfloat16()
        if case.shape == "gate and up":
            return [partial(each.gate, x, x.new_empty(rows, out // 2)) for each in made]
        if case.shape == "down":
            return [partial(each.add, x.new_zeros(rows, out), x) for each in made]
        return [partial(each.write, x, x.new_empty(rows, out)) for each in made]

    return calls, made[0].values.nbytes


def attending(case: Case, device: torch.device, copies: int) -> tuple[Callable[[int], list[Any]], int]:
    """Return a maker of the calls of attention over `copies` caches, by rows, and the bytes of one cache."""
    from selfspec.models.triton_kernels import attention

    attention.CHUNK, attention.BLOCK_SLOTS, attention.WARPS, attention.STAGES = case.sizes
    attention.CHUNKS, keys = 2**20, int(case.shape)  # no chunk is larger
    caches = [torch.randn(2, 1, 8, keys + 16, 128, device=device).bfloat16().unbind(0) for _ in range(copies)]

    def calls(rows: int) -> list[Any]:
        q = torch.randn(8, 4, rows, 128, device=device).bfloat16()
        slots = torch.arange(keys, keys + rows, device=device)[None]
        how: Mapping[str, Any] = {"scaling": 128**-0.5, "kv_len": keys + 16}
        out = q.new_empty(rows, 4096)
        return [partial(attention.decode_attention, q, cache, slots, out, **how) for cache in caches]

    return calls, 2 * caches[0][0].nbytes


def made(case: Case, device: torch.device, copies: int = 1) -> tuple[Callable[[int], list[Any]], int]:
    """Return a maker of the calls of a case, and the bytes that one call reads."""
    return (attending if case.kernel == "attention" else product)(case, device, copies)


def rows_of(case: Case) -> tuple[int, ...]:
    """Return the numbers of rows with which a case is measured."""
    return (1,) if case.kernel == "row" else (1, 9)


def compiled(case: Case) -> str:
    """Compile the kernels of a case, and return what was wrong."""
    try:
        calls, _ = made(case, torch.device("cuda", 0))
        for rows in rows_of(case):
            calls(rows)[0]()
        torch.cuda.synchronize()
    except Exception as error:  # of the compiler, or too much shared memory
        return f"{case}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def main() -> None:
    """Compile and time all cases."""
    part = Part("tuning")
    if part.toy:
        part.line("tuning", said="needs a GPU", cases=len(CASES))
        return
    begun, failed = time.perf_counter(), set()
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        for case, wrong in zip(CASES, pool.map(compiled, CASES, chunksize=4), strict=True):
            if wrong:
                failed.add(case)
                part.line("compiled", failure=wrong)
    part.line("compiled", cases=len(CASES), seconds=time.perf_counter() - begun)
    for case in (case for case in CASES if case not in failed):
        if part.left() < 3:
            break
        with part.attempt("blocks", case=str(case)), torch.inference_mode():
            size = made(case, part.device)[1]
            calls, _ = made(case, part.device, max(4, min(16, -(-(2**27) // size))))
            found = {f"us, {rows}": 1e6 * replayed(calls(rows), part.device) for rows in rows_of(case)}
            about = {"kernel": case.kernel, "shape": case.shape, "sizes": str(case.sizes)}
            part.line("blocks", **about, mb=size / 1e6, gb_per_s=size / found["us, 1"] / 1e3, **found)


if __name__ == "__main__":
    main()
