"""Memory of a batch's KV cache, and the runtime with that cache."""

from __future__ import annotations

import math

import torch

from selfspec.basics.errors import SelfspecError, short
from selfspec.basics.machine import available_memory
from selfspec.runtime.base import Runtime
from selfspec.runtime.cache import slot_copy_bytes
from selfspec.runtime.paged import BLOCK
from selfspec.types.methods import WIDEST_DRAFT

USUAL = 2048  # default capacity for each row in tokens
SHARE = 0.5  # largest share of the available memory that the default capacity takes
FEWEST = 256  # minimum capacity of a row in tokens
GIB = 2**30


def slot_bytes(runtime: Runtime) -> int:
    """Return the bytes of one token's keys and values in all layers, without their int8 copies."""
    return runtime.layers * runtime.skeleton.sizes.slot_bytes


def copy_bytes(layers: int, kv_heads: int, head_dim: int) -> int:
    """Return the bytes of the int8 copies of one token's keys and values in all layers, which drafts may read."""
    return layers * slot_copy_bytes(kv_heads, head_dim)


def runtime_for(
    runtime: Runtime,
    *,
    rows: int,
    memory: float | None = None,
    longest: int | None = None,
    extra_slot_bytes: int = 0,
    blocks: bool = True,
) -> Runtime:
    """Return a runtime over the same model with a KV cache of fixed size for `rows` sequences.

    The cache is paged if the runtime runs native passes and `blocks` is true, else it has `rows` contiguous rows of
    equal length, or fewer rows if memory is short. `memory`: GiB for the cache (None: see `Batch`). `longest`: tokens
    of the longest sequence; by default the context length if the cache is paged, else at most `USUAL`.
    `extra_slot_bytes`: further bytes for each token, for a draft model's keys and values, or for int8 copies. Raises
    `SelfspecError` if there is not enough memory for one row.
    """
    if rows < 1:
        raise SelfspecError(f"rows {rows}: expected at least 1")
    if memory is not None and not (isinstance(memory, int | float) and 0 < memory < math.inf):
        raise SelfspecError(f"memory {short(memory)} GiB: expected a number of more than 0")
    each, context = slot_bytes(runtime) + extra_slot_bytes, runtime.skeleton.context
    blocks = blocks and runtime.native
    longest = min(context, longest or (context if blocks else USUAL)) + WIDEST_DRAFT
    if memory is None:
        wanted = max(rows * (min(context, USUAL) + WIDEST_DRAFT), longest)
        tokens = min(wanted, int(SHARE * free_bytes(runtime.device)) // each)
    else:
        tokens = int(memory * GIB) // each
    least = min(FEWEST, context)
    if tokens < least + WIDEST_DRAFT:
        raise SelfspecError(
            f"memory for the KV cache: {tokens * each / GIB:.3g} GiB; expected at least "
            f"{(least + WIDEST_DRAFT) * each / GIB:.3g} GiB, for {least} tokens and a draft; give more memory"
        )
    if blocks:
        return runtime.with_new_cache(rows=rows, blocks=tokens // BLOCK)
    rows = max(1, min(rows, tokens // max(least + WIDEST_DRAFT, min(longest, tokens))))
    batch_runtime = runtime.with_new_cache(rows=rows)
    batch_runtime.grows = False
    with batch_runtime.session(min(tokens // rows, context + WIDEST_DRAFT)):
        return batch_runtime


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a device's memory that can be had; 8 GiB if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = available_memory()
    return 8 * GIB if math.isinf(available) else int(available)
