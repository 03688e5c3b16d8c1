"""How the weights of a model that selfspec loaded lie in memory: what reads them fastest on this machine.

Decoding reads every weight for one row; verification does so for a few. Which order of the weights makes that cheap
depends on processor and sizes, so it is measured once for each kind of model, on its own weights, and remembered.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import cache_folder, read_cached, write_cached
from selfspec.basics.machine import machine
from selfspec.model.linears import (
    PackedLinear,
    groups,
    is_exact,
    join_,
    join_layer_,
    linear,
    pack_,
    pack_layer_,
    side_by_side,
)

LAYOUTS = ("rows", "columns", "onednn")
WIDTHS = (1, 2, 3, 4, 8, 128)  # rows: a decoding step, verifications, a prompt
_SAMPLE = 512 * 2**20  # bytes of weights that are tried, if there are as many: more than processors cache
_BUDGET = 1.5  # seconds for trying, but every layout is tried twice
_AS_RIGHT = 8  # times the error of torch's own product that another's may be
_CLEARLY = 0.97
_NO_DEARER = 1.03
_STEP = 0.35  # of a pass over one row: a draft step
# Draft steps, rows and tokens of usual rounds: of ten drafted tokens six are right, and one has its mending beside it.
_ROUNDS = ((1, 2, 1.65), (1, 3, 1.78), (2, 4, 2.13), (3, 8, 2.6))

Times = dict[str, dict[int, float]]


def check_layout(layout: str) -> None:
    """Raise `SelfspecError` when `layout` is none."""
    if layout not in ("auto", *LAYOUTS):
        raise SelfspecError(f"layout '{layout}' is not known; known: auto, {', '.join(LAYOUTS)}")


def lay_out_(model: Any, layout: str = "auto", *, drafting: bool = False) -> str:
    """Change how the linears' weights of a model lie in memory, and say how they lie now.

    `rows`: as they came, those that read the same input side by side. `columns`: so, but by columns. `onednn`: packed
    (`PackedLinear`), float32 on a CPU only; the packed weights take the place of the others, but for a head that is
    also the embedding, which is then there twice. `auto` measures: with `drafting` what serves drafts and their
    verification best, else what one row reads fastest. Raises `SelfspecError` for a layout that cannot be had.
    """
    check_layout(layout)
    if layout == "auto":
        layout = choose(layout_times(model), drafting=drafting)
    if layout != "onednn":
        join_(model, columns=layout == "columns")
        return layout
    if not _packable(model):
        raise SelfspecError("layout 'onednn' is for float32 weights on a CPU with oneDNN; want auto, rows or columns")
    for layer in model.model.layers:
        pack_layer_(layer)
    pack_([(model, "lm_head")])
    return layout


def weight_bytes(model: Any) -> int:
    """Bytes of all parameters and packed weights, each counted once."""
    storages = [p.untyped_storage() for p in model.parameters() if not p.is_meta]
    held: dict[int, int] = {storage.data_ptr(): storage.nbytes() for storage in storages}
    packed = {id(m.packed): m.packed for m in model.modules() if isinstance(m, PackedLinear)}
    return sum([*held.values(), *(p.bytes for p in packed.values())])


def _linears(model: Any) -> list[tuple[Any, str]]:
    """Where the linears of the layers and the head are."""
    return [(model, "lm_head"), *(where for layer in model.model.layers for group in groups(layer) for where in group)]


def _packable(model: Any) -> bool:
    modules = [getattr(*where) for where in _linears(model)]
    exact = all(is_exact(m) and m.weight.device.type == "cpu" and m.weight.dtype == torch.float32 for m in modules)
    return exact and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def layout_times(model: Any) -> Times:
    """`measure_layouts`, or what it gave before for this kind of model; nothing where there is nothing to choose."""
    if not _packable(model):
        return {}
    path = _path(model)
    times = _sound(read_cached(path))
    if times is None:
        times = measure_layouts(model)
        if times:
            write_cached(path, times)
    return times


def choose(times: Times, *, drafting: bool) -> str:
    """The layout that serves best by `times[layout][width]` in seconds; `rows` unless another is clearly faster.

    For a prompt of 128 tokens and 64 new ones: plain decoding reads one row 64 times; drafting is taken to have the
    rounds that are cheapest a token. A layout that reads one row more slowly than plain decoding's is not for drafting
    either: where drafts are wrong, decoding in it would be slower than plain decoding, whatever the guard does.
    """
    if not times:
        return "rows"

    def plain(layout: str) -> float:
        return times[layout][128] + 64 * times[layout][1]

    def drafted(layout: str) -> float:
        t = times[layout]
        return t[128] + 64 * min((steps * _STEP * t[1] + t[rows]) / tokens for steps, rows, tokens in _ROUNDS)

    if not drafting:
        return _clearest(plain, times)
    alone = times[_clearest(plain, times)][1]
    return _clearest(drafted, {name: t for name, t in times.items() if t[1] <= _NO_DEARER * alone})


def _clearest(cost: Callable[[str], float], times: Times) -> str:
    """The cheapest layout; `rows`, if it is there, unless another is clearly cheaper."""
    best = min(times, key=cost)
    return best if "rows" not in times or cost(best) < _CLEARLY * cost("rows") else "rows"


@torch.inference_mode()
def measure_layouts(model: Any) -> Times:
    """Seconds that the linears of a sample of the model's layers take, by layout and number of rows.

    A layout that cannot be had, or whose products are not right, is left out; nothing where even rows cannot be tried.
    """
    layers, held = [], 0
    for layer in model.model.layers:
        if held < _SAMPLE:
            layers.append(layer)
            held += sum(p.numel() * p.element_size() for p in layer.parameters())
    tried = {layout: calls for layout in LAYOUTS if (calls := _calls(layers, layout))}
    if "rows" not in tried:
        return {}
    wrong = [name for name, calls in tried.items() if name != "rows" and not _right(calls, tried["rows"])]
    for layout in wrong:
        del tried[layout]
    times: Times = {layout: dict.fromkeys(WIDTHS, float("inf")) for layout in tried}
    start, sweeps = time.perf_counter(), 0
    while sweeps < 2 or (sweeps < 8 and time.perf_counter() - start < _BUDGET):
        for width in WIDTHS:
            for layout, calls in tried.items():
                for seconds in _timed(calls, width), _timed(calls, width):  # once more, with what caches then hold
                    times[layout][width] = min(times[layout][width], seconds)
        sweeps += 1
    return times


@dataclass(frozen=True, slots=True)
class _Call:
    """The product of `modules` that read the same input: `run(x)` of `x` `[n, in]`; one `x`, of the most rows."""

    x: Tensor
    run: Callable[[Tensor], Tensor]
    modules: Sequence[Any]


def _timed(calls: Sequence[_Call], width: int) -> float:
    start = time.perf_counter()
    for call in calls:
        call.run(call.x[:width])
    return time.perf_counter() - start


def _calls(layers: Sequence[Any], layout: str) -> list[_Call]:
    """The products of copies of `layers` in a layout; none where that is not to be had."""
    try:
        copies = [_copy(layer) for layer in layers]
        for layer in copies:
            if layout == "onednn":
                pack_layer_(layer)
            else:
                join_layer_(layer, columns=layout == "columns")
        calls = [_call([getattr(*where) for where in group]) for layer in copies for group in groups(layer)]
        for call in calls[:4]:
            call.run(call.x)
    except (RuntimeError, AttributeError):
        return []
    return calls


def _call(modules: Sequence[Any]) -> _Call:
    x = torch.randn(max(WIDTHS), modules[0].in_features, generator=torch.Generator().manual_seed(0))
    if len(modules) == 1:
        return _Call(x, linear(modules[0]), modules)
    into, out = side_by_side(modules), torch.empty(len(x), sum(m.out_features for m in modules))

    def run(x: Tensor) -> Tensor:
        into(x, out[: len(x)])
        return out[: len(x)]

    return _Call(x, run, modules)


def _right(calls: Sequence[_Call], usual: Sequence[_Call]) -> bool:
    """Whether the first layer's products are as near to the exact ones as the usual ones are, nearly."""
    for mine, theirs in zip(calls[:4], usual[:4], strict=True):
        weight = torch.cat([m.weight for m in theirs.modules]).double()
        bias = [m.bias for m in theirs.modules if m.bias is not None]
        exact = mine.x.double() @ weight.t() + (torch.cat(bias).double() if bias else 0)
        errors = [float((call.run(call.x) - exact).abs().max()) for call in (mine, theirs)]
        if not errors[0] <= _AS_RIGHT * errors[1]:
            return False
    return True


def _copy(layer: Any) -> Any:
    """A layer's linears in modules of their own, over the same weights; nothing else of it."""
    fake = SimpleNamespace(self_attn=SimpleNamespace(), mlp=SimpleNamespace())
    for mine, theirs in zip(groups(fake), groups(layer), strict=True):
        for (to, name), where in zip(mine, theirs, strict=True):
            old = getattr(*where)
            new = nn.Linear(old.in_features, old.out_features, bias=False, device="meta")
            new.weight = nn.Parameter(old.weight.detach(), requires_grad=False)
            if old.bias is not None:
                new.bias = nn.Parameter(old.bias.detach(), requires_grad=False)
            setattr(to, name, new)
    return fake


def _path(model: Any) -> Path:
    """Where the times for this kind of model, with these threads, on this machine, are kept."""
    layer = model.model.layers[0]
    shapes = [tuple(getattr(*where).weight.shape) for group in groups(layer) for where in group]
    settings = [os.environ.get(name) for name in ("THP_MEM_ALLOC_ENABLE", "ONEDNN_MAX_CPU_ISA")]
    what = [
        *settings,
        machine(torch.device("cpu")),
        torch.get_num_threads(),
        torch.__version__,
        len(model.model.layers),
        shapes,
    ]
    return cache_folder() / "layouts" / f"{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]}.json"


def _sound(data: Any) -> Times | None:
    """Times read back: widths are text in JSON."""
    try:
        times = {str(layout): {int(w): float(t) for w, t in row.items()} for layout, row in data.items()}
    except (AttributeError, TypeError, ValueError):
        return None
    sound = "rows" in times and all(layout in LAYOUTS and set(row) == set(WIDTHS) for layout, row in times.items())
    return times if sound and all(0 < t < float("inf") for row in times.values() for t in row.values()) else None
