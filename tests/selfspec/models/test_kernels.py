"""torch's products with weights in few bits: how near they are, and which is taken.

Seconds of products, by the host's clock or from graph replays.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from amount import examples
from fake_cuda import fake_cuda as fake_cuda
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import needs_native
from lowering import kernels
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from selfspec.basics.files import cache_folder
from selfspec.models import kernels as chosen
from selfspec.models import native_library
from selfspec.models.kernels import (
    COARSER,
    KERNELS,
    ON_CUDA,
    float8,
    int4_weight_only_cuda,
    int8_weight_only,
    kernel_for,
    kernel_times,
    kernels_on,
    seconds_of,
)
from selfspec.models.linears import Group
from selfspec.models.low_precision import QuantizedWeight, bytes_of, fake, quantize, quantize_group

HAD = kernels()
each_kernel = pytest.mark.parametrize(
    ("bits", "kernel"),
    [pytest.param(8, fake, id="8 fake"), pytest.param(4, fake, id="4 fake")]
    + [pytest.param(bits, kernel, id=f"{bits} {name}") for bits, name, kernel in HAD],
)


def bound(x, weight):
    """What a kernel may be off: x in bfloat16 or by 1/127 of the row's largest value, the result in bfloat16."""
    x, weight = x.double().abs(), weight.double().abs()
    return (x @ weight.t()) / 100 + x.amax(1, keepdim=True) / 127 * weight.sum(1)


@each_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@settings(max_examples=examples(12))
@given(
    seed=st.integers(0, 99), rows=st.integers(1, 5), out=st.integers(1, 40), into=st.integers(1, 4),
    size=st.sampled_from([1e-4, 1.0, 30.0]),
)  # fmt: skip
def test_every_kernel_is_near_the_rounded_weight(bits, kernel, dtype, bias, seed, rows, out, into, size):
    torch.manual_seed(seed)
    into = 32 * into if bits == 4 else 8 * into + seed % 8
    own = nn.Linear(into, out, bias=bias).to(dtype)
    x = (torch.randn(rows, into) * size).to(dtype)
    group, held = quantize_group(Group(SimpleNamespace(part=own), ("part",)), bits, kernel)
    ours = group.module(x)
    assert ours.dtype == dtype
    assert held == bytes_of(bits, out, into)
    weight = quantize(own.weight.detach(), bits).weight(torch.float64)
    exact = x.double() @ weight.t()
    shift = own.bias.detach().double() if bias else 0
    allowed = bound(x, weight) + (exact + shift).abs() / 100 + 1e-6 * size
    assert ((ours.double() - (exact + shift)).abs() <= allowed).all()


@each_kernel
@settings(max_examples=examples(20))
@given(seed=st.integers(0, 99), rows=st.integers(2, 6), larger=st.sampled_from([0.0, 1e-3, 1e3]))
def test_rows_do_not_see_each_other(bits, kernel, seed, rows, larger):
    torch.manual_seed(seed)
    product = kernel(quantize(torch.randn(48, 64), bits), torch.float32)
    x = torch.randn(rows, 64)
    other = torch.randn(rows, 64) * larger
    other[1] = x[1]
    assert torch.equal(product(x)[1], product(other)[1])


@each_kernel
def test_a_row_alone_is_near_what_it_is_among_others(bits, kernel):
    torch.manual_seed(0)
    weight = quantize(torch.randn(48, 64), bits)
    x = torch.randn(4, 64)
    product = kernel(weight, torch.float32)
    together = product(x).double()
    alone = torch.cat([product(row[None]) for row in x]).double()
    assert ((together - alone).abs() <= 2 * bound(x, weight.weight(torch.float64))).all()


@pytest.mark.parametrize(("bits", "name"), [(bits, name) for bits, name, _ in HAD if name == "weights only"])
def test_what_is_counted_is_what_is_held(bits, name):
    """Until many rows come: those are multiplied with what the product makes of the weights, as nearly."""
    held = quantize(torch.randn(48, 128), bits)
    product = KERNELS[bits][name](held, torch.float32)

    def tensors(of):
        for one in (cell.cell_contents for cell in getattr(of, "__closure__", None) or ()):
            if callable(one):
                yield from tensors(one)
            else:
                yield from (t for t in (one if isinstance(one, list) else [one]) if isinstance(t, torch.Tensor))

    def size():
        return sum(one.numel() * one.element_size() for one in tensors(product))

    assert size() == bytes_of(bits, 48, 128)
    many = torch.randn(40, 128)
    exact = fake(held, torch.float32)(many)
    assert float((product(many).float() - exact).norm()) < 0.01 * float(exact.norm())
    assert size() == bytes_of(bits, 48, 128) + 2 * 48 * 128


@pytest.fixture
def fresh_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(chosen, "_OUTPUTS", 64)


def told(monkeypatch, **kernels):
    """Kernels to choose from in int8, the first the fastest; counts how often they are timed."""
    timed = []

    def times(weight, bits):
        timed.append(tuple(weight.shape))
        return {name: float(i) for i, name in enumerate(kernels)}

    monkeypatch.setattr(chosen, "kernel_times", times)
    monkeypatch.setitem(KERNELS, 8, kernels)
    return timed


def test_the_choice_is_remembered_and_made_again_where_the_file_is_damaged(monkeypatch, fresh_cache):
    fast, slow = (lambda weight, dtype: None), (lambda weight, dtype: None)
    timed = told(monkeypatch, fast=fast, slow=slow)
    weight = torch.randn(8, 64)
    assert [kernel_for(weight, 8) for _ in range(3)] == [fast] * 3
    assert len(timed) == 1
    (file,) = cache_folder().glob("kernels/*.json")
    for damage in ("", "{", "3", '"gone"', "[]"):
        file.write_text(damage)
        assert kernel_for(weight, 8) is fast
        assert file.read_text() == '"fast"'
    assert len(timed) == 6
    file.write_text('"slow"')
    assert kernel_for(weight, 8) is slow
    kernel_for(torch.randn(8, 32), 8)
    kernel_for(weight.bfloat16(), 8)
    assert len(timed) == 8  # of each kind of weight


def test_without_a_kernel_it_is_the_rounded_weight_itself(monkeypatch, fresh_cache):
    timed = told(monkeypatch)
    assert [kernel_for(torch.randn(8, 64), 8) for _ in range(2)] == [fake, fake]
    assert len(timed) == 1  # which is remembered too
    assert kernel_for(torch.empty(8, 64, device="meta"), 4) is fake


def test_kernels_that_fail_or_are_wrong_are_not_taken(monkeypatch, fresh_cache):
    def fails(weight, dtype):
        raise NotImplementedError

    def fails_in_triton(weight, dtype):
        def product(x):
            raise Exception("out of resource: shared memory")  # Triton's errors are of no narrower type than this

        return product

    def fails_for_several(weight, dtype):
        right = fake(weight, dtype)
        return lambda x: right(x) if len(x) == 1 else torch.ops.onednn.no_such_thing(x)

    def wrong_for_several(weight, dtype):
        right = fake(weight, dtype)
        return lambda x: right(x) if len(x) == 1 else right(x.flip(0))

    made = [fails, fails_in_triton, fails_for_several, wrong_for_several, fake]
    monkeypatch.setitem(KERNELS, 8, {kernel.__name__: kernel for kernel in made})
    times = kernel_times(torch.randn(8, 64), 8)
    assert list(times) == ["fake"]
    assert 0 < times["fake"] < math.inf
    assert kernel_for(torch.randn(8, 64), 8) is fake


def test_a_choice_without_memory_to_time_is_made_again(monkeypatch, fresh_cache):
    def without_memory(weight, dtype):
        raise torch.OutOfMemoryError

    monkeypatch.setitem(KERNELS, 8, {"other": without_memory})
    assert kernel_for(torch.randn(8, 64), 8) is fake

    def other(weight, dtype):
        return fake(weight, dtype)

    monkeypatch.setitem(KERNELS, 8, {"other": other})
    assert kernel_for(torch.randn(8, 64), 8) is other


def test_large_weights_are_timed_on_smaller_ones(monkeypatch, fresh_cache):
    """With as many inputs, as many outputs as there are while they are neither too few to time nor too many values."""
    few, many, into, seen = 48, 128 * 64, 64, []
    monkeypatch.setitem(KERNELS, 8, {"fake": lambda weight, dtype: seen.append(weight.values) or fake(weight, dtype)})
    monkeypatch.setattr(chosen, "_OUTPUTS", few)
    monkeypatch.setattr(chosen, "_VALUES", many)
    monkeypatch.setattr(chosen, "_COPIES", 1)
    for out in (8, 47, 48, 49, 100, 128, 129, 1000):
        kernel_times(torch.randn(out, into), 8)
        timed = seen.pop()
        assert not seen
        assert timed.shape[1] == into
        assert len(timed) >= few
        assert timed.numel() <= many
        assert len(timed) == out or out < few or out * into > many


def test_weights_are_timed_as_they_come_from_memory(monkeypatch, fresh_cache):
    """Each product is with a weight of its own, as many as no cache holds."""
    read = []

    def kernel(weight, dtype):
        product = fake(weight, dtype)
        return lambda x: read.append(weight.values.data_ptr()) or product(x)

    monkeypatch.setitem(KERNELS, 8, {"fake": kernel})
    monkeypatch.setattr(chosen, "_CACHES", 3 * 64 * 64)
    kernel_times(torch.randn(64, 64), 8)
    timed = read[2:]  # after it was seen to be right
    assert len(set(timed)) == 3
    assert all(a != b for a, b in itertools.pairwise(timed))


@pytest.mark.parametrize("into", [32, 64, 128, 576])
@pytest.mark.parametrize("out", [16, 40])
def test_shapes_of_products_in_4_bits_on_cuda(into, out):
    """By torch's own checks of shapes: what packs, and what multiplies, take them."""
    held = quantize(torch.randn(out, into), 4)
    assert held.zero is not None
    with FakeTensorMode() as there:
        product = int4_weight_only_cuda(
            QuantizedWeight(4, *map(there.from_tensor, (held.values, held.scale, held.zero))), torch.bfloat16
        )
        for rows in (1, 3, 40):
            with Operations() as done:
                assert product(torch.empty(rows, into, dtype=torch.float16)).shape == (rows, out)
            assert "_weight_int4pack_mm" in done.names
            assert not {"mm", "eye"} & done.names  # the weight is not held once more in bfloat16


class Operations(TorchDispatchMode):
    """Collects the names of operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_on_cuda_the_kernels_are_compared_with_bfloat16_and_torchs_slow_one_is_not_among_them():
    for bits in (8, 4):
        assert ON_CUDA[bits]["fake"] is fake
    assert int8_weight_only not in ON_CUDA[8].values()


def scales_rows_on_cpu() -> bool:
    """Whether this torch multiplies float8 rows that have scales of their own on a CPU, as it always does on CUDA."""
    x, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(x, x.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:  # 2.11
        return False
    return True


@pytest.mark.skipif(not scales_rows_on_cpu(), reason="this torch scales no rows of float8 on a CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("out", "into"), [(16, 64), (40, 576), (1000, 1536), (33, 80)])
def test_products_in_float8(dtype, out, into):
    """Near the rounded weight's own, whatever the rows' sizes; rows do not see each other."""
    torch.manual_seed(0)
    held = quantize(torch.randn(out, into), 8)
    product, x = float8(held, dtype), (torch.randn(40, into) * torch.logspace(-4, 4, 40)[:, None]).to(dtype)
    for rows in (1, 3, 40):
        ours, exact = product(x[:rows]).double(), x[:rows].double() @ held.weight(torch.float64).t()
        assert ours.shape == (rows, out)
        errors = (ours - exact).norm(dim=1) / exact.norm(dim=1)
        assert float(errors.max()) < 0.1
        assert float(errors.mean()) < 0.05
    assert torch.equal(product(x[:3])[1], product(torch.stack([-x[0], x[1], 2 * x[2]]))[1])
    assert torch.equal(product(torch.zeros(2, into, dtype=dtype)).float(), torch.zeros(2, out))
    with Operations() as done:
        product(x)
    assert ("constant_pad_nd" in done.names) == (into % 16 > 0)  # rows are copied for padding alone


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("out", "into"), [(16, 64), (40, 576), (1000, 1536)])
def test_products_on_cuda(bits, dtype, out, into):
    torch.manual_seed(0)
    weight, x = torch.randn(out, into).to("cuda", dtype), torch.randn(40, into).to("cuda", dtype)
    held = quantize(weight, bits)
    whole = held.weight(torch.float64)
    kernels = dict(ON_CUDA[bits])
    if torch.cuda.get_device_capability() < (8, 9):
        kernels.pop("float8", None)
    for name, kernel in kernels.items():
        product, error = kernel(held, dtype), 0.05 if name == "float8" else 0.02
        for rows in (1, 3, 40):
            ours, exact = product(x[:rows]).double(), x[:rows].double() @ whole.t()
            assert float((ours - exact).norm()) < error * float(exact.norm()), (name, rows)
        assert torch.equal(product(x[:3])[1], product(torch.stack([-x[0], x[1], 2 * x[2]]))[1]), "rows see each other"


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 4])
def test_the_choice_on_cuda(bits, fresh_cache):
    weight = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    times, kernels = kernel_times(weight, bits), kernels_on(weight.device, bits)
    assert {*times} <= {*kernels}
    for name in ("float8", "triton float8"):
        if name in times:
            times[name] *= COARSER
    best = sorted(times, key=times.__getitem__)
    near = [name for name in best if times[name] < 1.2 * times[best[0]]]  # timed anew, the order of others stays
    assert kernel_for(weight, bits) in ([kernels[name] for name in near] or [fake])


def test_a_wheel_holds_every_source_that_is_compiled():
    root = Path(native_library.__file__).parents[2]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["selfspec.models"]
    folder = root / "selfspec" / "models"
    sources = {path for path in folder.iterdir() if path.suffix in (".cpp", ".h")}
    assert {path for pattern in data for path in folder.glob(pattern)} >= sources


@needs_native
def test_a_compiled_kernel_is_not_timed(monkeypatch):
    monkeypatch.setattr(chosen, "kernel_times", None)
    assert [kernel_for(torch.randn(8, 64), bits) for bits in (8, 4)] == [chosen.native] * 2


def test_on_a_cpu_the_clock_is_read_around_all_calls(monkeypatch):
    now = [10.0]

    def call():
        now[0] += 1.5

    monkeypatch.setattr(chosen.time, "perf_counter", lambda: now[0])
    assert seconds_of([call] * 4, torch.device("cpu")) == 1.5


def test_on_cuda_a_replay_is_timed_by_events_and_not_what_launching_takes(fake_cuda):
    calls = []
    seconds = seconds_of([lambda: calls.append(1)] * 3, torch.device("cuda", 0))
    assert seconds == pytest.approx(0.006 / 3)
    assert len(calls) == 6  # a warm-up, and the capture
    assert (len(fake_cuda.captures), fake_cuda.replays) == (1, 2)
