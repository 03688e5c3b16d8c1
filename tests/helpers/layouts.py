"""How weights lie in memory in tests: `auto` is told what it would have measured, so no test rests on the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from wants import reason

from selfspec.models.layout import LAYOUTS, WIDTHS, Times, layout_times
from selfspec.models.loading import load_model
from selfspec.models.native_library import available
from selfspec.runtime.base import Runtime

HAS_ONEDNN = bool(torch.backends.mkldnn.is_available())
HAS_NATIVE = available()
_LACKING = {"onednn": not HAS_ONEDNN, "native": not HAS_NATIVE}
AVAILABLE = [name for name in LAYOUTS if not _LACKING.get(name)]
CHOOSABLE = AVAILABLE if HAS_ONEDNN or HAS_NATIVE else ["rows"]  # by `auto`, which else has nothing to choose from
HAS_BFLOAT16 = HAS_ONEDNN and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
needs_native = pytest.mark.skipif(not HAS_NATIVE, reason=reason("a C++ compiler"))
needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason=reason("oneDNN"))
needs_bfloat16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="oneDNN computes in bfloat16 on newer processors only")


def fastest(plain: str, drafting: str | None = None) -> Times:
    """Times by which `choose` takes one layout for plain decoding, and `drafting` (or the same) for drafts.

    Both read one row about as fast, as a layout for drafting must; `drafting` reads more rows faster.
    """
    times: Times = {name: dict.fromkeys(WIDTHS, 4.0) for name in AVAILABLE}
    times[plain] = {width: 1.0 if width == 1 else 2.0 for width in WIDTHS}
    if drafting is not None and drafting != plain:
        times[drafting] = {width: 2.0 if width == max(WIDTHS) else 1.02 for width in WIDTHS}
    return times


def seconds_by_rows(by_rows: float, by_columns: float) -> Callable[..., float]:
    """What a pass is to be told to have taken, by how the weights of the runtime's model lie."""

    def forward_seconds(runtime: Runtime, *_: Any, **__: Any) -> float:
        weight = runtime.model.model.layers[0].self_attn.q_proj.weight
        return by_rows if weight.is_contiguous() else by_columns

    return forward_seconds


def tell_commands() -> None:
    """Keep what this process was told in the cache for the built-in model, where commands in other processes look."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THP_MEM_ALLOC_ENABLE", "1")  # as the command sets it: times are kept for each setting
        model, _ = load_model("builtin", device="cpu", dtype="float32")
        layout_times(model)
