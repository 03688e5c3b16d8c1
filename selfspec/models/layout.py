"""Weight layouts: the order in which the weights of a loaded model are stored in memory.

A decode step without drafts multiplies every weight with one row, a verification pass with a few rows. Layout `native`
was the fastest on every processor that was measured. Without a C++ compiler the fastest layout depends on the processor
and the sizes, so layouts are timed on the model's own weights. The times are cached for models of the same sizes and
dtype.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import cached_file, read_cached, table_of, write_cached
from selfspec.basics.machine import release_memory
from selfspec.models.families import Parts, is_lean, parts_of
from selfspec.models.half_storage import half_of, nativise_exactly_, nativise_model_
from selfspec.models.linears import Group, is_exact, join_, linear, side_by_side
from selfspec.models.native import IN_A_PASS, ROWS, NativeProduct
from selfspec.models.native_library import KINDS, available, library, timing_key
from selfspec.models.shards import local_weight
from selfspec.models.stored_linear import PackedLinear, StoredEmbedding, StoredLinear, pack_

LAYOUTS = ("rows", "columns", "onednn", "native")
WIDTHS = (1, 2, 3, 4, 8, 128)  # timed numbers of rows: a decode step's (1), verification passes' (2 to 8), a prefill's
_SAMPLE = 512 * 2**20  # bytes of weights to time: more than CPU caches hold
_SMALL = 200 * 10**6  # bytes of a model of which all weights are timed
_SHARE = 0.35  # share of a larger model's weights to time: there is a copy for each layout, beside the model itself
_BUDGET = 1.5  # seconds of timing; every layout is timed at least twice
_ERROR = 8  # largest allowed error of a layout's products, as a multiple of the error in layout `rows`
MUCH = 2.0  # times longer than the plausible time by more than this factor are not cached (`_disturbed`)
_CLEARLY = 0.97  # a layout replaces `rows` only if it costs less than this share of the cost of `rows`
_NO_DEARER = 1.03  # largest one-row time of a layout for drafting, relative to the layout chosen for plain decoding
_STEP = 0.35  # cost of a draft step relative to a full pass over one row
# Draft rounds for which layouts are compared: (draft steps, rows verified, mean tokens emitted at an acceptance rate of
# 0.6). Rows beyond the drafted tokens and the last committed token are further candidates of a token tree.
_ROUNDS = ((1, 2, 1.65), (1, 3, 1.78), (2, 4, 2.13), (3, 8, 2.6))
# `_STEP` and `_ROUNDS` of quantised drafts: the acceptance rate is 0.95, and draft steps cost the same in each layout.
_LOW_STEP, _LOW_ROUNDS = 0.45, ((3, 4, 3.7), (7, 8, 6.6))

_UNTIMED = True  # whether layout `native` is taken without timing

_LAY: dict[str, Callable[[Group], None]] = {
    "rows": join_,
    "columns": partial(join_, columns=True),
    "onednn": pack_,
    "native": nativise_exactly_,
}

Times = dict[str, dict[int, float]]
"""Seconds to multiply by the timed weights once, by layout and number of rows."""


def check_layout(layout: str) -> None:
    """Raise `SelfspecError` if `layout` is neither `auto` nor the name of a layout."""
    if layout not in ("auto", *LAYOUTS):
        raise SelfspecError(f"layout '{layout}' is not known; known: auto, {', '.join(LAYOUTS)}")


def apply_layout_(model: Any, layout: str = "auto", *, drafting: bool = False, quantized_drafts: bool = False) -> str:
    """Change the layout of the weights of a model's linears in place, and return the new layout.

    `rows`: stored by rows, as loaded; linears that read the same input are joined in one tensor. `columns`: joined in
    the same way, and stored by columns. `onednn`: packed (`PackedLinear`), for float32 and bfloat16 on a CPU only; the
    unpacked weights are freed, but a head tied to the embedding is then stored twice. `native`: stored by rows for
    selfspec's own CPU kernels (`native.py`), for the dtypes of `onednn`; needs a C++ compiler. Float32 weights are then
    held in 16 bits where that is exact (`half_storage.py`), and can be neither moved nor cast. `auto`: `native` if the
    model can have it, else the layout timed as fastest on this machine for plain decoding; with `drafting`, for
    drafting and verification; with `quantized_drafts` in addition, for quantised drafts. A model outside `FAMILIES`
    keeps `rows`. Raises `SelfspecError` for an unknown layout, and for a layout that this model cannot have.
    """
    check_layout(layout)
    if not is_lean(model):  # the model runs through its own forward, on its weights as loaded
        if layout not in ("auto", "rows"):
            raise SelfspecError(f"layout '{layout}' is not for {type(model).__name__}; expected auto or rows")
        return "rows"
    if layout == "auto":
        layout = choose(layout_times(model), drafting=drafting, quantized_drafts=quantized_drafts)
    if layout == "columns" and not any(map(is_exact, parts_of(model).linears())):
        raise SelfspecError("layout 'columns' is for plain weights, and this model has none; expected auto or rows")
    if layout in ("rows", "columns"):
        join_all_(model, columns=layout == "columns")
        return layout
    parts = parts_of(model)
    if layout == "onednn" and not _packable(parts):
        raise SelfspecError(
            "layout 'onednn' is for float32 and bfloat16 weights on a CPU with oneDNN; expected auto, rows or columns"
        )
    if layout == "native":
        library()
        if not _plain(parts):
            raise SelfspecError(
                "layout 'native' is for float32 and bfloat16 weights on a CPU; expected auto, rows or columns"
            )
        nativise_model_(model, parts)
    else:
        for group in (*parts.groups(), parts.head):
            _LAY[layout](group)
    return layout


def join_all_(model: Any, *, columns: bool = False) -> None:
    """Join the parameters of linears that read the same input (`join_`) throughout a model, in place.

    With `columns`, all linears' weights are stored by columns, but still written to files by rows. A head tied to the
    embedding is stored by columns too: the head reads all of the weight, the embedding only one row for each token.
    """
    parts = parts_of(model)
    for group in parts.groups():
        join_(group, columns=columns)
    if columns:
        join_(parts.head, columns=True)
        model.register_state_dict_post_hook(_by_rows)


def _by_rows(_module: nn.Module, state: dict[str, Any], _prefix: str, _metadata: dict[str, Any]) -> None:
    """Convert every weight of a state dictionary to storage by rows, for saving; tied weights stay one tensor."""
    stored: dict[int, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and not value.is_contiguous():
            state[name] = stored.setdefault(value.data_ptr(), value.contiguous())


def weight_bytes(model: Any) -> int:
    """Return the bytes of all parameters and packed weights; shared memory counts once, meta tensors not at all."""
    storages = [local_weight(p).untyped_storage() for p in model.parameters() if not p.is_meta]
    bytes_by_storage: dict[int, int] = {storage.data_ptr(): storage.nbytes() for storage in storages}
    packed = {id(m.packed): m.packed for m in model.modules() if isinstance(m, PackedLinear)}
    blocks = [m.blocks for m in model.modules() if isinstance(m, (StoredLinear, StoredEmbedding))]
    unique_blocks = {b.values.data_ptr(): b for b in blocks}
    return sum(
        [*bytes_by_storage.values(), *(p.bytes for p in packed.values()), *(b.bytes for b in unique_blocks.values())]
    )


def _plain(parts: Parts) -> bool:
    """Return whether all weights are on the CPU, and all float32 or all bfloat16."""
    modules = [*parts.linears()]
    if not all(map(is_exact, modules)) or (dtype := modules[0].weight.dtype) not in (torch.float32, torch.bfloat16):
        return False
    return all(m.weight.device.type == "cpu" and m.weight.dtype == dtype for m in modules)


def _packable(parts: Parts) -> bool:
    if not _plain(parts):
        return False
    dtype = parts.head.module.weight.dtype
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def takes_native() -> bool:
    """Return whether `auto` is layout `native` for each model that can have it, without timing."""
    return _UNTIMED and available()


def layout_times(model: Any) -> Times:
    """Return `measure_layouts(model)`, cached; empty if the model can have neither layout `onednn` nor `native`.

    Where the model can have layout `native`, that is the only one, and not timed: timing could only err, on a busy
    machine.
    """
    if not is_lean(model):
        return {}
    parts = parts_of(model)
    if not _plain(parts) or not (available() or _packable(parts)):
        return {}
    if takes_native():
        return {"native": dict.fromkeys(WIDTHS, 0.0)}
    path = _path(parts)
    times = _sound(read_cached(path))
    if times is None:
        times = measure_layouts(model)
        release_memory()
        if times and not _disturbed(times):
            write_cached(path, times)
    return times


def choose(times: Times, *, drafting: bool, quantized_drafts: bool = False) -> str:
    """Return the fastest layout for a prompt of 128 tokens and 64 new tokens; `rows` unless it is clearly slower.

    Plain decoding (without drafts) takes 64 passes over one row. Drafting is assumed to run the rounds of `_ROUNDS`
    that cost least per token. A layout for drafting must be as fast for one row as the layout for plain decoding:
    otherwise, decoding with rejected drafts would be slower than plain decoding. Quantised drafts are hardly ever
    rejected, so `quantized_drafts` drops this condition.
    """
    if not times:
        return "rows"

    def plain(layout: str) -> float:
        return times[layout][128] + 64 * times[layout][1]

    def drafted(layout: str) -> float:
        t = times[layout]
        return t[128] + 64 * min((steps * _STEP * t[1] + t[rows]) / tokens for steps, rows, tokens in _ROUNDS)

    def drafted_in_few_bits(layout: str) -> float:
        t = times[layout]
        return t[128] + 64 * min((steps * _LOW_STEP * alone + t[rows]) / tokens for steps, rows, tokens in _LOW_ROUNDS)

    if not drafting:
        return _clearest(plain, times)
    alone = times[_clearest(plain, times)][1]
    if quantized_drafts:
        return _clearest(drafted_in_few_bits, times)
    return _clearest(drafted, {name: t for name, t in times.items() if t[1] <= _NO_DEARER * alone})


def _clearest(cost: Callable[[str], float], times: Times) -> str:
    """Return the layout of the lowest cost; `rows`, if it was timed, unless that layout is clearly cheaper."""
    best = min(times, key=cost)
    return best if "rows" not in times or cost(best) < _CLEARLY * cost("rows") else "rows"


@torch.inference_mode()
def measure_layouts(model: Any) -> Times:
    """Time the linears of the model's first layers, in seconds by layout and number of rows.

    The sample is at most about `_SAMPLE` bytes, and of a model larger than `_SMALL` at most about `_SHARE` of it.

    A layout that the model cannot have, or whose products are wrong, is left out; the result is empty if `rows` cannot
    be timed. Times of `native` for few rows are scaled by `IN_A_PASS`.
    """
    layers: list[tuple[Group, ...]] = []
    sampled_bytes, size = 0, weight_bytes(model)
    most = _SAMPLE if size <= _SMALL else min(_SAMPLE, _SHARE * size)
    for layer in parts_of(model).layers:
        if sampled_bytes < most:
            layers.append(layer.groups)
            sampled_bytes += sum(p.numel() * p.element_size() for p in layer.module.parameters())
    tried = {layout: products for layout in LAYOUTS if (products := _products(layers, layout))}
    return _measured(tried, len(layers[0])) if "rows" in tried else {}


def _measured(tried: dict[str, list[_Product]], checked: int) -> Times:
    """Time the products of each layout; a layout is left out if one of its first `checked` products is wrong."""
    by_rows = tried["rows"][:checked]
    tried = {name: tried[name] for name in tried if name == "rows" or _right(tried[name][:checked], by_rows)}
    times: Times = {layout: dict.fromkeys(WIDTHS, float("inf")) for layout in tried}
    start, sweeps = time.perf_counter(), 0
    while sweeps < 2 or (sweeps < 8 and time.perf_counter() - start < _BUDGET):
        for width in WIDTHS:
            for layout, products in tried.items():
                for seconds in _timed(products, width), _timed(products, width):  # the second with warm caches
                    times[layout][width] = min(times[layout][width], seconds)
        sweeps += 1
    for width in WIDTHS if "native" in times else ():
        times["native"][width] *= IN_A_PASS if width <= ROWS else 1.0
    return times


def suits_native(linears: Sequence[nn.Linear]) -> bool:
    """Return whether native products with these linears' own weights are faster than torch's for drafting (timed once).

    The weights are neither copied nor changed. False for weights that native products cannot read as they are stored.
    """
    if not linears or not all(map(is_native_readable, linears)) or not available():
        return False
    shapes = sorted({tuple(module.weight.shape) for module in linears})
    what = [*timing_key(torch.device("cpu")), "as stored", len(linears), shapes, str(linears[0].weight.dtype)]
    path = cached_file("layouts", what)
    times = _sound(read_cached(path))
    if times is None:
        times = measure_as_stored(linears)
        if not _disturbed(times):
            write_cached(path, times)
    return choose(times, drafting=True, quantized_drafts=True) == "native"


@torch.inference_mode()
def measure_as_stored(linears: Sequence[nn.Linear]) -> Times:
    """Time torch's (`rows`) and native products with the weights of `linears`, about `_SAMPLE` bytes at most."""
    tried: dict[str, list[_Product]] = {"rows": [], "native": []}
    sampled_bytes = 0
    for module in linears:
        if sampled_bytes < _SAMPLE:
            x, bias = _test_input(module), None if module.bias is None else module.bias.detach()
            tried["rows"].append(_Product(x, module.forward, [module]))
            tried["native"].append(_Product(x, NativeProduct(module.weight.detach(), bias), [module]))
            sampled_bytes += module.weight.nbytes
    return _measured(tried, 1)


def is_native_readable(module: nn.Module) -> bool:
    """Return whether native products can read a linear's weight as it is stored: on the CPU, by rows."""
    if not is_exact(module):
        return False
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.device.type == "cpu" and weight.dtype in KINDS and weight.is_contiguous()


def _disturbed(times: Times) -> bool:
    """Return whether other load on the machine disturbed the timing.

    That is assumed if w rows took more than `MUCH` times as long as w single rows, or one row more than `MUCH` times as
    long as w rows.
    """
    decoding = WIDTHS[:-1]
    return any(t[w] > MUCH * w * t[1] or t[1] > MUCH * t[w] for t in times.values() for w in decoding)


@dataclass(frozen=True, slots=True)
class _Product:
    """The product `run(x)` of linears `modules` that read the same input; `x` `[max(WIDTHS), in]` is a test input."""

    x: Tensor
    run: Callable[[Tensor], Tensor]
    modules: Sequence[Any]


def _timed(products: Sequence[_Product], width: int) -> float:
    start = time.perf_counter()
    for product in products:
        product.run(product.x[:width])
    return time.perf_counter() - start


def _products(layers: Sequence[Sequence[Group]], layout: str) -> list[_Product]:
    """Return the products of copies of the layers' linears in order, in a layout; empty if it is unavailable."""
    try:
        groups = [_copy(group) for layer in layers for group in layer]
        for group in groups:
            _LAY[layout](group)
        products = [_product(group.modules) for group in groups]
        for product in products[: len(layers[0])]:
            product.run(product.x)
    except (RuntimeError, AttributeError, SelfspecError):
        return []
    return products


def _product(modules: Sequence[Any]) -> _Product:
    x = _test_input(modules[0])
    if len(modules) == 1:
        return _Product(x, linear(modules[0]), modules)
    into, out = side_by_side(modules), x.new_empty(len(x), sum(m.out_features for m in modules))

    def run(x: Tensor) -> Tensor:
        into(x, out[: len(x)])
        return out[: len(x)]

    return _Product(x, run, modules)


def _test_input(module: Any) -> Tensor:
    x = torch.randn(max(WIDTHS), module.in_features, generator=torch.Generator().manual_seed(0))
    return x.to(module.weight.dtype)


def _right(products: Sequence[_Product], by_rows: Sequence[_Product]) -> bool:
    """Return whether no product's largest error exceeds `_ERROR` times the error of the same product in `by_rows`."""
    for mine, theirs in zip(products, by_rows, strict=True):
        weight = torch.cat([m.weight for m in theirs.modules]).double()
        bias = [m.bias for m in theirs.modules if m.bias is not None]
        exact = mine.x.double() @ weight.t() + (torch.cat(bias).double() if bias else 0)
        errors = [float((product.run(product.x).double() - exact).abs().max()) for product in (mine, theirs)]
        if not errors[0] <= _ERROR * errors[1]:
            return False
    return True


def _copy(group: Group) -> Group:
    """Return a copy of the group with new linear modules over the same weights."""
    copies = {name: _linear_like(module) for name, module in zip(group.names, group.modules, strict=True)}
    return Group(SimpleNamespace(**copies), group.names)


def _linear_like(module: Any) -> nn.Linear:
    new = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    new.weight = nn.Parameter(module.weight.detach(), requires_grad=False)
    if module.bias is not None:
        new.bias = nn.Parameter(module.bias.detach(), requires_grad=False)
    return new


def _path(parts: Parts) -> Path:
    """Return the cache file of the times for this kind of model, number of threads and machine."""
    shapes = [tuple(module.weight.shape) for group in parts.layers[0].groups for module in group.modules]
    what = [
        *timing_key(torch.device("cpu")),
        len(parts.layers),
        shapes,
        str(parts.head.module.weight.dtype),
        str(half_of([module.weight for group in parts.layers[0].groups for module in group.modules])),
    ]
    return cached_file("layouts", what)


def _sound(data: Any) -> Times | None:
    """Parse cached JSON, whose keys are strings, to `Times`; None if a width is missing or a value is invalid."""
    times = table_of(data) or {}
    sound = "rows" in times and all(layout in LAYOUTS and set(row) == set(WIDTHS) for layout, row in times.items())
    return times if sound else None
