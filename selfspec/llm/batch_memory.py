"""How much memory a batch has for keys and values, and the runtime that has it."""

from __future__ import annotations

import os

import torch

from selfspec.basics.errors import SelfspecError
from selfspec.runtime.forward import Runtime
from selfspec.runtime.paged import BLOCK
from selfspec.types.limits import WIDEST_DRAFT

USUAL = 2048  # tokens of a text for which there is room where it is not said how much
SHARE = 0.5  # of the memory that is free, at the most
FEWEST = 256  # tokens that a row is to have room for
GIB = 2**30


def slot_bytes(runtime: Runtime) -> int:
    """Of one token's keys and values at all layers."""
    s = runtime.skeleton.sizes
    return 2 * runtime.layers * s.kv_heads * s.head_dim * s.dtype.itemsize


def runtime_for(
    runtime: Runtime, *, rows: int, memory: float | None = None, beside: int = 0, blocks: bool = True
) -> Runtime:
    """One over the same model with a cache for `rows` sequences that never grows.

    It is a pool of blocks where passes are native and `blocks` is true, else `rows` contiguous rows of one length,
    fewer where there is not the memory for as many. `memory`: GiB for it; `beside`: further bytes for each token place,
    of a draft model's keys. Raises `SelfspecError` where there is not the memory for one row.
    """
    if rows < 1:
        raise SelfspecError(f"rows {rows}: expected at least 1")
    if memory is not None and not memory > 0:
        raise SelfspecError(f"memory {memory} GiB: expected more than 0")
    each, context = slot_bytes(runtime) + beside, runtime.skeleton.context
    if memory is None:
        wanted = rows * (min(context, USUAL) + WIDEST_DRAFT)
        tokens = min(wanted, int(SHARE * free_bytes(runtime.device)) // each)
    else:
        tokens = int(memory * GIB) // each
    least = min(FEWEST, context)
    if tokens < least + WIDEST_DRAFT:
        raise SelfspecError(
            f"keys and values of {least} tokens and a draft take {(least + WIDEST_DRAFT) * each / GIB:.3g} GiB, and "
            f"there are {tokens * each / GIB:.3g}; give more memory"
        )
    if blocks and runtime.native:
        return runtime.with_new_cache(rows=rows, blocks=tokens // BLOCK)
    rows = min(rows, tokens // (least + WIDEST_DRAFT))
    found = runtime.with_new_cache(rows=rows)
    with found.session(min(tokens // rows, context + WIDEST_DRAFT)):
        return found


def free_bytes(device: torch.device) -> int:
    """Memory that nobody uses on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not everywhere
        return 8 * GIB
