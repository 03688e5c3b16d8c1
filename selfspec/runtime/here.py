"""What rounds take on this very runtime, for where it must be known and no clock may be asked: with a seed."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selfspec.basics.files import cached_file, read_cached, write_cached
from selfspec.basics.machine import machine, synchronise
from selfspec.facts.acceptance import Outlook
from selfspec.facts.draft_path import FULL, DraftPath
from selfspec.model.families import parts_of
from selfspec.runtime.forward import Runtime

KEYS = 128  # that passes attend to, or half the context
FULLY, DRAFTED = (1, 2, 4, 8, 16), (1, 4, 8)  # tokens at once that are timed in full, and along a draft path
SECONDS, LEAST = 1.0, 3  # that timing may take; sweeps that it takes at least
GRAIN = 20  # shares are rounded up to a 20th: measuring again is to give the same

Shares = dict[str, dict[int, float]]
"""What passes `full` and along the `draft` path take, by tokens at once, in passes of the whole model over one."""


def as_here(outlook: Outlook, runtime: Runtime, path: DraftPath) -> Outlook:
    """`outlook`, with what is dearer on this runtime as dear as it is here.

    What a profile says was measured on some machine, with weights that lay as suited it. Passes are timed once for each
    kind of model and path on this machine, and remembered, so that texts with a seed are the same from run to run.
    Raises `BusyError` while the runtime has a stream.
    """
    file = _file(runtime, path)
    known = _sound(read_cached(file))
    if known is None:
        known = measured(runtime, path)
        write_cached(file, known)
    full, draft = known["full"], known["draft"]
    rounds = tuple(max(told, _at(full, rows)) for rows, told in enumerate(outlook.rounds))
    told = outlook.wider or (outlook.draft,) if path.cheaper else ()
    wider = tuple(max(share, _at(draft, rows)) for rows, share in enumerate(told, start=1))
    return replace(outlook, rounds=rounds, draft=wider[0] if wider else outlook.draft, wider=wider)


@torch.inference_mode()
def measured(runtime: Runtime, path: DraftPath) -> Shares:
    """Passes timed in turn, the least time of each. Raises `BusyError` while the runtime has a stream."""
    keys = min(KEYS, runtime.skeleton.context // 2)
    most = max(runtime.skeleton.context - keys, 1)
    passes = [("full", runtime.compile(FULL), rows) for rows in FULLY if rows <= most]
    if path.cheaper:
        passes += [("draft", runtime.compile(path), rows) for rows in DRAFTED if rows <= most]
    seconds = dict.fromkeys(((name, rows) for name, _, rows in passes), math.inf)
    with runtime.session(keys + max(FULLY)):
        begun, sweeps = time.perf_counter(), 0
        while sweeps < LEAST or time.perf_counter() - begun < SECONDS:
            for name, way, rows in passes:
                tokens = torch.zeros((1, rows), dtype=torch.long, device=runtime.device)
                synchronise(runtime.device)
                start = time.perf_counter()
                runtime.forward(tokens, keys, path=way)
                synchronise(runtime.device)
                seconds[name, rows] = min(seconds[name, rows], time.perf_counter() - start)
            sweeps += 1
    one, shares = seconds["full", 1], Shares(full={}, draft={})
    for (name, rows), took in seconds.items():
        shares[name][rows] = math.ceil(took / one * GRAIN) / GRAIN
    return shares


def _at(shares: Mapping[int, float], rows: int) -> float:
    """The share at so many rows: between what was timed, and beyond, a line; 0 where nothing was."""
    known = sorted(shares.items())
    if rows < 1 or not known:
        return 0.0
    before = [place for place in known if place[0] <= rows] or known[:1]
    after = [place for place in known if place[0] > rows]
    (a, x), (b, y) = (before[-1], after[0]) if after else (known[-2] if len(known) > 1 else (0, 0.0), known[-1])
    return max(x + (y - x) * (rows - a) / (b - a), x)


def _file(runtime: Runtime, path: DraftPath) -> Path:
    """Where the shares of this kind of model and path, with these threads, on this machine, are kept."""
    linears = [module for group in parts_of(runtime.model).layers[0].groups for module in group.modules]
    lie = [type(m).__name__ + (str(m.weight.stride()) if isinstance(m, nn.Linear) else "") for m in linears]
    settings = [os.environ.get(name) for name in ("THP_MEM_ALLOC_ENABLE", "ONEDNN_MAX_CPU_ISA")]
    what = [
        *settings,
        machine(runtime.device),
        torch.get_num_threads(),
        torch.__version__,
        str(runtime.dtype),
        repr(runtime.skeleton.identity),
        lie,
        repr(path),
    ]
    return cached_file("costs", what)


def _sound(data: Any) -> Shares | None:
    """Shares read from JSON, whose keys are text; None where they are not what `measured` gives."""
    try:
        shares = {str(name): {int(rows): float(share) for rows, share in of.items()} for name, of in data.items()}
    except (AttributeError, TypeError, ValueError):
        return None
    sound = set(shares) == {"full", "draft"} and 1 in shares["full"]
    return shares if sound and all(0 < x < math.inf for of in shares.values() for x in of.values()) else None
