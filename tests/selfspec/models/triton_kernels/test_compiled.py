"""Every kernel compiled for GPUs that are not there: PTX and a binary, and what of a GPU a program needs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from wants import needs

pytestmark = [needs("triton", "Triton"), pytest.mark.long("kernels compiled for GPUs")]

SHARED = 99 * 1024  # bytes of a program's shared memory that every GPU from compute capability 8.0 on has
WEIGHTS = {"dense": ("bf16", 0, 0, 2), "int8": ("i8", 1, 0, 1), "float8": ("fp8e4nv", 1, 0, 1)}
WEIGHTS |= {f"int4, {group}": ("i32", 2, group, 4) for group in (64, 32)}
STRIDES = ("x_stride", "out_stride", "qkv_stride", "key_row", "key_head", "key_slot", "value_row", "value_head",
           "value_slot")  # fmt: skip
capabilities = pytest.mark.parametrize("capability", [80, 90])


def compiled(kernel: Any, capability: int, pointers: dict[str, str], constants: dict[str, Any], **options: int) -> Any:
    """A kernel for a GPU, with pointers and strides that are multiples of 16, and other arguments of 32 bits."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {}
    for name in kernel.arg_names:
        kind = pointers.get(name, "fp32" if name in ("eps", "scaling") else "i32")
        signature[name] = "constexpr" if name in constants else f"*{kind}" if name in pointers else kind
    even = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name in (*pointers, *STRIDES)}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=even)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert len(made.asm["cubin"]) > 1000
    assert made.metadata.shared <= SHARED
    return made


@pytest.mark.parametrize(
    ("capability", "name"),
    [(capability, name) for capability in (80, 90) for name in WEIGHTS if capability >= 89 or name != "float8"],
)
@pytest.mark.parametrize("epilogue", [0, 1, 2])
def test_products(capability, name, epilogue):
    kind, number, group, size = WEIGHTS[name]
    made = product(capability, kind, number, group, size, epilogue, "bf16", 2)
    assert made.asm["ptx"].count("mma.sync") >= 8  # the same instruction for any number of rows
    assert "wgmma" not in made.asm["ptx"]
    assert "cp.async" in made.asm["ptx"]  # weights are on their way while others are multiplied


def product(capability, kind, number, group, size, epilogue, rows, row_size):
    """`product_kernel` compiled for a kind of weights, of `size` bytes a value, and a dtype of rows."""
    import triton.language as tl

    from selfspec.models.triton_kernels.products import BLOCK_OUT, WARPS, product_kernel, stages_of, step_of

    stages, step = stages_of(number, epilogue), step_of(number, size, row_size)
    pointers = {"x": rows, "w": kind, "scales": "i32" if number == 2 else "bf16", "bias": rows, "out": rows}
    constants = {"OUT": 4096, "IN": 4096, "GROUP": group, "KIND": number, "EPILOGUE": epilogue, "BIASED": True}
    compute = {"bf16": tl.bfloat16, "fp32": tl.float32}[rows]
    constants |= {"COMPUTE": compute, "BLOCK_M": 16, "BLOCK_N": BLOCK_OUT, "BLOCK_K": step}
    constants |= {"FUSED": True}
    return compiled(product_kernel, capability, pointers, constants, num_warps=WARPS, num_stages=stages)


@pytest.mark.parametrize("epilogue", [0, 2])
@pytest.mark.parametrize("name", WEIGHTS)
def test_products_of_rows_in_float32_fit_in_shared_memory_too(name, epilogue):
    kind, number, group, size = ("fp32", 0, 0, 4) if name == "dense" else WEIGHTS[name]
    assert product(90, kind, number, group, size, epilogue, "fp32", 4).metadata.shared > 0


@capabilities
@pytest.mark.parametrize("group", [64, 32])
@pytest.mark.parametrize("epilogue", [0, 1, 2])
def test_products_of_one_row(capability, group, epilogue):
    from selfspec.models.triton_kernels.products import BLOCK_OUT_OF_ROW, row_kernel

    pointers = {"x": "bf16", "w": "i32", "scales": "i32", "bias": "bf16", "out": "bf16"}
    constants = {"OUT": 4096, "IN": 4096, "GROUP": group, "EPILOGUE": epilogue, "BIASED": True, "FUSED": True}
    constants |= {"BLOCK_N": BLOCK_OUT_OF_ROW, "BLOCK_W": 512}
    made = compiled(row_kernel, capability, pointers, constants, num_warps=4)
    assert made.asm["ptx"].count("lop3.b32") == 4 * 8 * BLOCK_OUT_OF_ROW  # one for each of a thread's values
    assert "mma.sync" not in made.asm["ptx"]
    assert "v4.b32" in made.asm["ptx"]  # four words of a thread at once


@capabilities
@pytest.mark.parametrize("added", [False, True])
def test_norms(capability, added):
    from selfspec.models.triton_kernels.elementwise import norm_kernel

    pointers = {"x": "bf16", "weight": "bf16", "out": "bf16"} | ({"add": "bf16"} if added else {})
    constants = {"WIDTH": 4096, "ADDED": added, "BLOCK": 4096} | ({} if added else {"add": None})
    compiled(norm_kernel, capability, pointers, constants, num_warps=8)


@capabilities
def test_rope(capability):
    from selfspec.models.triton_kernels.elementwise import rope_kernel

    pointers = dict.fromkeys(("qkv", "cos", "sin", "q", "keys", "values"), "bf16")
    pointers |= dict.fromkeys(("partner", "positions", "slots"), "i64")
    constants = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "BLOCK": 128}
    compiled(rope_kernel, capability, pointers, constants, num_warps=1)


@pytest.mark.parametrize(
    ("dtype", "size", "dim"), [("bf16", 2, 256), ("bf16", 2, 512), ("fp32", 4, 256), ("fp32", 4, 512)]
)
def test_attention_of_wide_heads_fits_in_shared_memory(dtype, size, dim):
    import triton.language as tl

    from selfspec.models.triton_kernels.attention import chunk_kernel, slots_of_step

    pointers = {"q": dtype, "keys": dtype, "values": dtype, "slots": "i64"}
    pointers |= dict.fromkeys(("out", "largest", "total"), "fp32")
    constants = {"KV_HEADS": 8, "GROUP": 4, "DIM": dim, "CHUNK": 1024, "BLOCK_D": dim, "BLOCK_T": 16, "WINDOW": 0}
    constants |= {"MASKED": False, "mask": None, "COMPUTE": {"bf16": tl.bfloat16, "fp32": tl.float32}[dtype]}
    constants |= {"BLOCK_M": 16, "BLOCK_S": slots_of_step(dim, size)}
    compiled(chunk_kernel, 80, pointers, constants, num_warps=4, num_stages=2)


@capabilities
@pytest.mark.parametrize(("masked", "window"), [*itertools.product([False, True], [0, 1024])])
def test_attention(capability, masked, window):
    import triton.language as tl

    from selfspec.models.triton_kernels.attention import BLOCK_SLOTS, CHUNK, chunk_kernel, combine_kernel

    shape = {"KV_HEADS": 8, "GROUP": 4, "DIM": 128, "CHUNK": CHUNK, "BLOCK_D": 128, "BLOCK_T": 16}
    results = {"largest": "fp32", "total": "fp32", "slots": "i64", "out": "fp32"}
    pointers = {"q": "bf16", "keys": "bf16", "values": "bf16", **results} | ({"mask": "u8"} if masked else {})
    constants = shape | {"WINDOW": window, "MASKED": masked, "COMPUTE": tl.bfloat16, "BLOCK_M": 16}
    constants |= {"BLOCK_S": BLOCK_SLOTS} | ({} if masked else {"mask": None})
    made = compiled(chunk_kernel, capability, pointers, constants, num_warps=4, num_stages=2)
    assert "mma.sync" in made.asm["ptx"]
    pointers = {"parts": "fp32", **results, "out": "bf16"}
    compiled(combine_kernel, capability, pointers, {**shape, "BLOCK_C": 32}, num_warps=4)
