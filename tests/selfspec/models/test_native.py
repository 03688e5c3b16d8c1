"""selfspec's own products: near the exact ones, a row the same alone and among others; and what they are made with."""

from __future__ import annotations

import copy
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from amount import examples
from gguf_weights import blocks_of, multiplied
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import needs_native
from models import CONFIGS, exact_norms, threads, tiny
from torch import nn
from wants import reason

from selfspec.basics.errors import SelfspecError
from selfspec.models import layout, native_library
from selfspec.models.gguf_blocks import TYPES
from selfspec.models.half_storage import HALVES, HalfProduct, halved
from selfspec.models.kernels import kernel_times
from selfspec.models.layout import apply_layout_, layout_times, measure_layouts
from selfspec.models.linears import Group
from selfspec.models.low_precision import quantize
from selfspec.models.native import ROWS, NativeLinear, NativeProduct, nativise_, torch_has_bfloat16
from selfspec.models.native_library import Kind
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.draft_path import FULL

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
KINDS = ("float32", "bfloat16", "int8", "int4")
SEEDS = st.integers(0, 999)
each_kind = pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs_native) for kind in KINDS])


def weight_of(kind, out, into):
    """A weight as a product takes it, and what it stands for."""
    return given_as(kind, torch.randn(out, into))


def given_as(kind, weight):
    """The same of a weight."""
    if kind in ("int8", "int4"):
        few = quantize(weight, 8 if kind == "int8" else 4)
        return few, few.weight(torch.float64)
    weight = weight.to(getattr(torch, kind))
    return weight, weight.double()


def sizes(kind, most=70):
    """Inputs of a weight: any, many of them multiples of 32, as processors with tiles take; in int4 all of them."""
    by_32 = st.integers(1, 5).map(lambda n: 32 * n)
    return by_32 if kind == "int4" else st.one_of(by_32, st.integers(1, most))


def product_of(kind, seed, out, into, *, bias=False):
    torch.manual_seed(seed)
    weight, exact = weight_of(kind, out, into)
    bias = torch.randn(out) if bias else None
    return NativeProduct(weight, bias), exact, 0.0 if bias is None else bias.double()


def rows_of(kind, n, into):
    """Rows as a model's are: of weights in bfloat16, they may be brought to bfloat16, so they are."""
    x = torch.randn(n, into)
    return x.bfloat16().float() if kind == "bfloat16" else x


@st.composite
def products(draw, kind, most_outputs):
    """A product with its weight and bias, and 1 to 20 rows for it."""
    seed, rows, out, bias = (
        draw(values) for values in (SEEDS, st.integers(1, 20), st.integers(1, most_outputs), st.booleans())
    )
    product, weight, shift = product_of(kind, seed, out, draw(sizes(kind)), bias=bias)
    return product, weight, shift, rows_of(kind, rows, weight.shape[1])


def in_int8(x):
    """What rows stand for in int8, with a scale for each 32 inputs; and how far off a value is if it is rounded the
    other way, where it lies between two."""
    blocks = F.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    most = blocks.abs().amax(2, keepdim=True)
    exact, step = blocks * torch.where(most > 1e-30, 127 / most, 0.0), (most / 127).double()
    between = ((exact - exact.floor() - 0.5).abs() < 1e-4) * step
    values, between = (t.reshape(len(x), -1)[:, : x.shape[1]] for t in (exact.round().double() * step, between))
    return values, between


def check_near(kind, product, x, weight, bias, base=0.0, *, got=None):
    """Off by float32's sums; more than `ROWS` rows with quantised weights, and of bfloat16, by bfloat16's.

    Up to `ROWS` rows are quantised themselves before quantised weights are multiplied with them; any number of rows
    where vectors are long, or torch is slow.
    """
    got = product(x) if got is None else got
    single, between = len(x) <= ROWS or kind == "float32", torch.zeros_like(x, dtype=torch.float64)
    by_vectors = native_library.library().selfspec_many_by_vectors(Kind[kind.upper()])
    if kind in ("int8", "int4") and (single or by_vectors or not torch_has_bfloat16()):
        single, (x, between) = True, in_int8(x)
    error = (x.shape[1] + 8) * 2.0**-24 if single else 2.0**-6
    size = x.double().abs() @ weight.abs().t() + torch.as_tensor(bias).abs() + torch.as_tensor(base).abs()
    most = error * size + between @ weight.abs().t()
    off = got.double() - (base + x.double() @ weight.t() + bias)
    assert (off.abs() <= most).all()


def check_alone(product, x, chosen):
    """The bits of each row alone, among all and among those chosen; added to something, too."""
    alone = torch.cat([product(row[None]) for row in x])
    assert torch.equal(product(x), alone)
    assert torch.equal(product(x[chosen]), alone[chosen])
    base = torch.randn(alone.shape)
    added, one_by_one = base.clone(), base.clone()
    product.add(added, x)
    for row, onto in zip(x, one_by_one, strict=True):
        product.add(onto[None], row[None])
    assert torch.equal(added, one_by_one)


@each_kind
@settings(max_examples=examples(40))
@given(data=st.data())
def test_products_are_near_the_exact_ones(kind, data):
    product, weight, shift, x = data.draw(products(kind, 70))
    check_near(kind, product, x, weight, shift)


@needs_native
@settings(max_examples=examples(20))
@given(seed=SEEDS, rows=st.integers(1, ROWS), out=st.integers(1, 70), into=st.integers(1, 70))
def test_with_weights_in_bfloat16_rows_are_rounded_to_it_only_where_pairs_of_it_are_multiplied(seed, rows, out, into):
    product, weight, _ = product_of("bfloat16", seed, out, into)
    x = torch.randn(rows, into)
    pairs = native_library.library().selfspec_many_by_vectors(Kind.BFLOAT16)
    off = (product(x).double() - (x.bfloat16() if pairs else x).double() @ weight.t()).abs()
    assert (off <= 2.0**-18 * (x.double().abs() @ weight.abs().t())).all()


@needs_native
@settings(max_examples=examples(15))
@given(seed=SEEDS, rows=st.integers(ROWS + 1, 70), out=st.integers(1, 9), into=st.integers(1, 4), bias=st.booleans())
def test_many_rows_in_float32_are_multiplied_as_exactly(seed, rows, out, into, bias):
    """Of whole sixteens of outputs and 32s of inputs, as processors with tiles take."""
    product, weight, shift = product_of("float32", seed, 16 * out, 32 * into, bias=bias)
    x = torch.randn(rows, 32 * into)
    check_near("float32", product, x, weight, shift)


@needs_native
def test_so_are_those_that_are_cut_up():
    """More inputs and rows than are kept near at once."""
    product, weight, shift = product_of("float32", 0, 80, 3232, bias=True)
    x = torch.randn(530, 3232)
    check_near("float32", product, x, weight, shift)
    wide = torch.randn(530, 3300)
    check_near("float32", product, wide.narrow(1, 40, 3232), weight, shift)


@each_kind
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_largest_sums_there_can_be(kind, rows):
    """All weights and all inputs as large as any, and more inputs than are summed as whole numbers at once."""
    torch.manual_seed(0)
    weight = torch.cat([torch.ones(3, 4672), -torch.ones(2, 4672), torch.randn(4, 4672)])
    weight, exact = given_as(kind, weight)
    product = NativeProduct(weight)
    for x in (torch.ones(rows, 4672), -29952 * torch.ones(rows, 4672), rows_of(kind, rows, 4672)):
        check_near(kind, product, x, exact, 0.0)


@each_kind
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(kind, bad):
    product = product_of(kind, 0, 40, 96)[0]
    x = torch.randn(5, 96)
    clean = product(x)
    x[2, 7] = bad
    got = product(x)
    assert not got[2].isfinite().any()
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], clean[others])


@each_kind
@settings(max_examples=examples(25))
@given(
    data=st.data(), seed=SEEDS, out=st.integers(1, 70), bias=st.booleans(), several=st.sampled_from([1, 2]),
    chosen=st.sets(st.integers(0, ROWS - 1), min_size=1),
)  # fmt: skip
def test_a_row_gives_the_same_bits_alone_and_among_any_others(kind, data, seed, out, bias, several, chosen):
    product, weight, _ = product_of(kind, seed, out, data.draw(sizes(kind, most=300)), bias=bias)
    with threads(several):
        check_alone(product, torch.randn(ROWS, weight.shape[1]), sorted(chosen))


@each_kind
@pytest.mark.parametrize("rows", [1, 5, ROWS])
def test_two_threads_give_the_bits_of_one(kind, rows):
    """Of a product that is large enough to be shared out, whose outputs are no multiple of their runs."""
    product = product_of(kind, 0, 325, 96, bias=True)[0]
    x = torch.randn(rows, 96)
    with threads(2):
        shared = product(x)
    assert torch.equal(shared, product(x))


@each_kind
@settings(max_examples=examples(15))
@given(data=st.data())
def test_write_and_add_go_into_a_part_of_a_wider_tensor(kind, data):
    product, weight, shift, x = data.draw(products(kind, 40))
    rows, out = len(x), len(weight)
    wide = torch.randn(rows, out + 3)
    before, part = wide.clone(), wide.narrow(1, 1, out)
    product.add(part, x)
    check_near(kind, product, x, weight, shift, before.narrow(1, 1, out).double(), got=part)
    product.write(x, part)
    assert torch.equal(part, product(x).float())
    assert torch.equal(wide[:, [0, -2, -1]], before[:, [0, -2, -1]])


@each_kind
@pytest.mark.parametrize("rows", [1, 3, ROWS])
def test_rows_are_taken_however_they_lie(kind, rows):
    product = product_of(kind, 0, 24, 64)[0]
    x = torch.randn(rows, 64)
    expected = product(x)
    assert torch.equal(product(x.t().contiguous().t()), expected)
    assert torch.equal(product(torch.cat([x, x], 1).narrow(1, 64, 64)), expected)
    assert torch.equal(product(x[:1].expand(rows, -1)), expected[:1].expand(rows, -1))
    assert product(x[:0]).shape == (0, 24)


@each_kind
@pytest.mark.parametrize("rows", [1, 3, ROWS])
def test_rows_in_bfloat16_are_summed_in_float32_and_rounded_last(kind, rows):
    product = product_of(kind, 0, 24, 64, bias=True)[0]
    x = torch.randn(rows, 64).bfloat16()
    exact = product(x.float())
    assert torch.equal(product(x), exact.bfloat16())
    out = torch.empty(rows, 24)
    product.write(x, out)
    assert torch.equal(out, exact)
    half, base = torch.empty(rows, 24).bfloat16(), torch.randn(rows, 24).bfloat16()
    product.write(x, half)
    assert torch.equal(half, exact.bfloat16())
    onto = base.clone()
    product.add(onto, x)
    assert torch.equal(onto, base + exact.bfloat16())


@needs_native
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("into", [83, 1552])  # inputs that fill no vector, no tile; more than are multiplied at once
def test_many_rows_have_the_bits_of_few_where_vectors_are_long(kind, into):
    """Unless tiles take them, or vectors are short, and torch does."""
    into += -into % 32 if kind == "int4" else 0
    product, weight, bias = product_of(kind, 0, 70, into, bias=True)
    if not native_library.library().selfspec_many_by_vectors(Kind[kind.upper()]):
        pytest.skip("short vectors, or tiles")
    for rows in (*range(2, ROWS + 2), 4 * ROWS + 5, 600):
        x = rows_of(kind, rows, into)
        assert torch.equal(product(x), torch.cat([product(row[None]) for row in x]))
        check_near(kind, product, x, weight, bias)


@needs_native
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_many_rows_have_the_bits_of_few_where_torch_is_slow(kind, monkeypatch):
    """As it is with bfloat16 on processors without such products."""
    monkeypatch.setattr("selfspec.models.native.torch_has_bfloat16", lambda: False)
    product, _, _ = product_of(kind, 0, 24, 96, bias=True)
    x = rows_of(kind, 2 * ROWS + 3, 96)
    assert torch.equal(product(x), torch.cat([product(row[None]) for row in x]))
    assert product(x).dtype == x.dtype


@each_kind
def test_a_bias_can_be_had_later(kind):
    """4-bit weights, which are packed, among them; for few rows and for many."""
    product, weight, _ = product_of(kind, 0, 24, 96)
    bias = torch.randn(24)
    later = product.with_bias(bias)
    for rows in (3, ROWS + 1):
        x = rows_of(kind, rows, 96)
        check_near(kind, later, x, weight, bias.double())
    assert torch.equal(product.with_bias(torch.zeros(24))(x[:3]), product(x[:3]))


def single(name="llama"):
    return tiny(CONFIGS[name], dtype=torch.float32)


def laid(name="llama"):
    model = single(name)
    assert apply_layout_(model, "native") == "native"
    return model


def linears(model):
    return [module for module in model.modules() if isinstance(module, NativeLinear)]


def logits(model, widths=(5, 1, 2)):
    """Of `IDS`, by a runtime of its own, in passes of these widths."""
    runtime, parts, start = model if isinstance(model, LeanRuntime) else LeanRuntime(model), [], 0
    with runtime.session(IDS.shape[1]):
        for width in widths:
            parts.append(runtime.forward(IDS[:, start : start + width], start).logits)
            start += width
    return torch.cat(parts, 1)


def assert_near(ours, theirs, error=1e-5):
    torch.testing.assert_close(ours / theirs.abs().max(), theirs / theirs.abs().max(), atol=error, rtol=0)


@needs_native
@pytest.mark.parametrize("name", ["llama", "llama-mqa-tied", "llama-biases", "qwen2"])
def test_modules_stay_what_they_were_to_others(name):
    model, other = single(name), single(name)
    before, names = dict(model.named_parameters()), list(model.state_dict())
    apply_layout_(model, "native")
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[at] is parameter for at, parameter in before.items())
    assert list(model.state_dict()) == names
    assert all(torch.equal(value, other.state_dict()[at]) for at, value in model.state_dict().items())
    found = linears(model)
    assert len(found) == 4 * 7 + 1
    for module in found:
        x = torch.randn(2, 3, module.in_features)
        assert torch.equal(module(x), F.linear(x, module.weight, module.bias))
    assert all(module.current for module in found)
    assert_near(logits(model), logits(other))


@needs_native
def test_linears_of_one_input_are_one_product():
    attention = laid("llama-biases").model.layers[0].self_attn
    assert attention.q_proj.fused is attention.k_proj.fused is attention.v_proj.fused
    assert attention.q_proj.fused is not attention.o_proj.fused


@needs_native
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float64])
def test_a_model_that_was_cast_computes_as_any_other(to):
    model, other = laid("llama-biases").to(to), single("llama-biases").to(to)
    assert not any(module.current for module in linears(model))
    assert_near(logits(model), logits(other), 0.02 if to == torch.bfloat16 else 1e-12)
    back, other = model.float(), other.float()
    assert not any(module.current for module in linears(back)), "it is elsewhere in memory now"
    assert_near(logits(back), logits(other))


@needs_native
@pytest.mark.parametrize("name", ["llama", "llama-biases", "llama-mqa-tied"])
def test_weights_changed_in_place_are_seen(name):
    model = laid(name)
    runtime = LeanRuntime(model)
    logits(runtime)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        expected = exact_norms(copy.deepcopy(model).double())(IDS).logits
    assert_near(logits(runtime).double(), expected)


@needs_native
def test_a_weight_put_in_the_place_of_another_is_not_mistaken():
    model = laid()
    module = model.model.layers[1].mlp.down_proj
    module.weight = nn.Parameter(torch.randn_like(module.weight))
    assert not module.current
    assert_near(logits(model).double(), exact_norms(copy.deepcopy(model).double())(IDS).logits)


@needs_native
def test_linears_of_which_only_some_have_a_bias_are_each_by_itself():
    parent = SimpleNamespace(a=nn.Linear(32, 8), b=nn.Linear(32, 16, bias=False), c=nn.Linear(32, 8))
    nativise_(Group(parent, ("a", "b", "c")))
    assert len({id(module.fused) for module in vars(parent).values()}) == 3
    models = [single(), single()]
    for model in models:
        torch.manual_seed(0)
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias = nn.Parameter(torch.randn(layer.self_attn.k_proj.out_features))
    apply_layout_(models[0], "native")
    assert len(linears(models[0])) == 4 * 7 + 1
    assert_near(logits(models[0]), logits(models[1]))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("replaced", [False, True])
def test_biases_that_are_changed_are_seen(dtype, replaced):
    models = [tiny(CONFIGS["llama-biases"], dtype=dtype) for _ in range(2)]
    apply_layout_(models[0], "native")
    before = logits(models[0])
    with torch.no_grad():
        for model in models:
            for layer in model.model.layers:
                linear = layer.self_attn.v_proj
                if replaced:
                    linear.bias = nn.Parameter(linear.bias + 3)
                else:
                    linear.bias.add_(3)
    after = [logits(model).float() for model in models]
    assert not torch.allclose(before.float(), after[0], atol=0.1)
    torch.testing.assert_close(*after, atol=0.1 if dtype == torch.bfloat16 else 1e-4, rtol=0.1)


@needs_native
def test_weights_by_columns_are_brought_into_rows_again():
    model = single()
    apply_layout_(model, "columns")
    held = layout.weight_bytes(model)
    apply_layout_(model, "native")
    assert all(module.current for module in linears(model))
    assert layout.weight_bytes(model) == held
    assert_near(logits(model), logits(single()))


@needs_native
def test_a_model_can_be_pickled(tmp_path):
    model = laid("llama-biases")
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(logits(again), logits(model))


@needs_native
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 20])
def test_what_comes_out_is_of_the_dtype_that_goes_in(kind, rows):
    product, _, _ = product_of(kind, 0, 40, 64, bias=True)
    for dtype in (torch.float32, torch.bfloat16):
        assert product(torch.randn(rows, 64).to(dtype)).dtype == dtype


@needs_native
def test_a_copy_computes_with_its_own_weights():
    model = laid("llama-biases")
    before = logits(model)
    twin = copy.deepcopy(model)
    assert not any(module.current for module in linears(twin))
    assert_near(logits(twin), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.1)
    assert torch.equal(logits(model), before)
    with torch.no_grad():
        assert_near(logits(twin).double(), exact_norms(copy.deepcopy(twin).double())(IDS).logits)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_cannot_be_laid_out_so(dtype):
    with pytest.raises(SelfspecError, match="float32 and bfloat16 weights on a CPU; expected auto, rows or columns"):
        apply_layout_(tiny(CONFIGS["llama"], dtype=dtype), "native")


@pytest.fixture
def anew(monkeypatch, tmp_path):
    """The functions are looked for anew, in a cache of the test's own."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SELFSPEC_NATIVE", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    native_library._library.cache_clear()
    yield tmp_path / "cache" / "native"
    native_library._library.cache_clear()


@pytest.fixture
def quick(monkeypatch, tmp_path, anew):
    """What is compiled has the functions' names only, and takes no time."""
    names = sorted(set(re.findall(r"\b(selfspec_\w+)\(", native_library._SOURCE.read_text())))
    source = tmp_path / "quick.cpp"
    source.write_text('extern "C" {' + "".join(f"long long {name}() {{ return 7; }}" for name in names) + "}")
    monkeypatch.setattr(native_library, "_SOURCE", source)
    return anew


def compiler(tmp_path, lines):
    """A compiler that is a script."""
    script = tmp_path / "compiler"
    script.write_text("#!/bin/sh\n" + lines + "\n")
    script.chmod(0o700)
    return str(script)


def real_compiler():
    return os.environ.get("CXX") or next(name for name in ("c++", "g++", "clang++") if shutil.which(name))


def said():
    """What is said where there are no functions, in one line."""
    with pytest.raises(SelfspecError) as raised:
        native_library.library()
    message = str(raised.value)
    assert "\n" not in message
    assert not native_library.available()
    return message


def check_without(monkeypatch):
    """What the rest does where there are no functions."""
    with pytest.raises(SelfspecError, match="native kernels"):
        apply_layout_(single(), "native")
    monkeypatch.setattr(layout, "measure_layouts", measure_layouts)
    monkeypatch.setattr(layout, "_BUDGET", 0)
    model = single()
    assert "native" not in layout_times(model)
    assert apply_layout_(model, "auto") in ("rows", "columns", "onednn")
    assert_near(logits(model), logits(single()))


def test_they_can_be_turned_off(monkeypatch, anew):
    monkeypatch.setenv("SELFSPEC_NATIVE", "0")
    assert said() == "native kernels are turned off by SELFSPEC_NATIVE=0"
    check_without(monkeypatch)
    assert "native" not in kernel_times(torch.randn(8, 64), 8)
    assert not anew.exists()


def test_without_a_compiler_it_is_said_what_to_install(monkeypatch, anew):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    assert said() == (
        "native kernels: no C++ compiler found (no-such-compiler -O1); install g++, or set CXX to a compiler"
    )
    check_without(monkeypatch)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(anew))
    assert said() == (
        "native kernels: no C++ compiler found (c++, g++, clang++); install g++, or set CXX to a compiler"
    )


def test_what_a_compiler_that_fails_says_is_said(monkeypatch, tmp_path, anew):
    name = compiler(tmp_path, "echo 'In file included:' >&2; echo 'native.cpp:3: error: not today' >&2; exit 1")
    monkeypatch.setenv("CXX", name)
    assert said() == f"native kernels: {name} failed: native.cpp:3: error: not today; {native_library._OTHERWISE}"
    check_without(monkeypatch)
    assert [file.suffix for file in anew.iterdir()] == [".failed"], "nothing half made is left"


@needs_native
def test_a_compiler_that_failed_is_not_asked_again_until_it_is_another(monkeypatch, tmp_path, quick):
    real = real_compiler()
    name = compiler(tmp_path, f"echo >> {tmp_path}/calls; echo 'error: not today' >&2; exit 1")
    monkeypatch.setenv("CXX", name)
    before = said()
    calls = (tmp_path / "calls").read_text()
    native_library._library.cache_clear()
    assert said() == before
    assert (tmp_path / "calls").read_text() == calls
    compiler(tmp_path, f'exec {real} "$@"')
    native_library._library.cache_clear()
    assert native_library.library().selfspec_vector() == 7


@needs_native
@pytest.mark.parametrize(
    ("rejected", "said_of"),
    [("-fopenmp", "has no OpenMP"), ("-m*=native", "does not know this processor's instructions")],
)
def test_what_a_compiler_leaves_out_is_said(monkeypatch, tmp_path, quick, caplog, rejected, said_of):
    check = f'for flag in "$@"; do case "$flag" in {rejected}) exit 1;; esac; done'
    monkeypatch.setenv("CXX", compiler(tmp_path, f'{check}; exec {real_compiler()} "$@"'))
    native_library._library.cache_clear()
    assert native_library.library().selfspec_vector() == 7
    assert said_of in caplog.text


@pytest.mark.parametrize(
    "why",
    [
        "Killed signal terminated program cc1plus",
        "error: No space left on device",
        "ld: final link failed: No space left on device\ncollect2: error: ld returned 1 exit status",
        "vfork: Cannot allocate memory\nerror: cannot run cc1plus",
    ],
)
def test_what_the_machine_keeps_a_compiler_from_is_not_remembered(monkeypatch, tmp_path, anew, why):
    monkeypatch.setenv("CXX", compiler(tmp_path, f"echo '{why}' >&2; exit 1"))
    assert why.splitlines()[0] in said()
    assert list(anew.iterdir()) == []


def test_a_compiler_that_takes_too_long_is_given_up(monkeypatch, tmp_path, anew):
    monkeypatch.setenv("CXX", compiler(tmp_path, "exec sleep 5"))
    monkeypatch.setattr(native_library, "_PATIENCE", 0.1)
    assert "timed out" in (given_up := said())
    (remembered,) = anew.iterdir()
    assert f"delete {remembered} to try again" in given_up


@needs_native
def test_what_keeps_a_compiler_from_running_is_not_remembered(monkeypatch, anew):
    def full(*_, **__):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(native_library.subprocess, "run", full)
        assert "failed: no space left" in said()
    assert list(anew.iterdir()) == []


@needs_native
def test_a_compiler_that_does_not_know_this_processor_is_enough(monkeypatch, tmp_path, quick):
    refuse = "case \"$*\" in *=native*) echo 'error: unknown processor' >&2; exit 1;; esac"
    monkeypatch.setenv("CXX", compiler(tmp_path, f'{refuse}\nexec {real_compiler()} "$@"'))
    assert native_library.library().selfspec_vector() == 7


@needs_native
def test_they_are_compiled_once(monkeypatch, quick):
    assert native_library.library().selfspec_vector() == 7
    (file,) = quick.iterdir()
    assert (quick.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o700)
    assert not list(quick.parents[1].glob("selfspec-native-*"))
    native_library._library.cache_clear()
    monkeypatch.setattr(native_library, "_compile", lambda command, flags, folder, name: "compiled again")
    assert native_library.library().selfspec_vector() == 7


@pytest.fixture
def put(monkeypatch, tmp_path, quick):
    """Put something in the place of the compiled file, in another cache, from which nothing has been loaded yet."""

    def place(data, mode):
        native_library.library()
        (made,) = quick.iterdir()
        monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "other"))
        file = tmp_path / "other" / "native" / made.name
        file.parent.mkdir(mode=0o700, parents=True)
        file.write_bytes(data.ljust(made.stat().st_size, b"."))
        file.chmod(mode)
        native_library._library.cache_clear()
        return file

    return place


@needs_native
@pytest.mark.parametrize("mode", [0o666, 0o720, 0o702])
def test_a_file_that_others_may_have_written_is_compiled_anew(put, mode):
    file = put(b"what would be run, were it a library", mode)
    assert native_library.library().selfspec_vector() == 7
    assert list(file.parent.iterdir()) == [file]
    assert file.stat().st_mode & 0o777 == 0o700


@needs_native
def test_a_folder_that_others_may_write_to_is_not_used(put, tmp_path):
    file = put(b"what would be run, were it a library", 0o700)
    file.parent.chmod(0o777)
    assert native_library.library().selfspec_vector() == 7
    own = tmp_path / f"selfspec-native-{os.getuid()}"
    assert own.stat().st_mode & 0o777 == 0o700
    assert list(file.parent.iterdir()) == [file]


@needs_native
def test_a_folder_above_which_others_may_write_is_not_used(put, tmp_path, caplog):
    file = put(b"what would be run, were it a library", 0o700)
    file.parent.parent.chmod(0o777)
    assert native_library.library().selfspec_vector() == 7
    assert "others may write there or above" in caplog.text
    assert list(file.parent.iterdir()) == [file]


@needs_native
def test_a_link_is_not_loaded(put, tmp_path):
    file = put(b"", 0o700)
    (made,) = (tmp_path / "cache" / "native").iterdir()
    file.unlink()
    file.symlink_to(made)
    assert native_library.library().selfspec_vector() == 7
    assert not file.is_symlink(), "it was compiled anew"


@needs_native
def test_what_is_loaded_is_what_was_checked(monkeypatch, quick):
    """The path is exchanged between the check and the loading."""
    native_library.library()
    (file,) = quick.iterdir()
    if not Path("/proc/self/fd").exists():
        pytest.skip("this system has no /proc")
    checked = native_library.open_private

    def exchanged(path):
        descriptor = checked(path)
        path.unlink()
        path.write_bytes(b"what would be run, were it a library")
        return descriptor

    monkeypatch.setattr(native_library, "open_private", exchanged)
    assert native_library._load(file).selfspec_vector() == 7


@needs_native
def test_without_a_folder_for_a_cache_they_are_compiled_elsewhere_once(quick, tmp_path, monkeypatch):
    """As in a home folder that is read-only: not in every process."""
    quick.parent.write_text("no folder")
    assert native_library.library().selfspec_vector() == 7
    assert len(list((tmp_path / f"selfspec-native-{os.getuid()}").glob("*.so"))) == 1
    native_library._library.cache_clear()
    monkeypatch.setattr(native_library, "_compile", lambda command, flags, folder, name: "compiled again")
    assert native_library.library().selfspec_vector() == 7


@needs_native
def test_where_nothing_can_be_written_what_is_cached_is_used(quick, monkeypatch):
    """And where nothing is, the reason is told."""

    def none(**_):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with monkeypatch.context() as patch:
        patch.setattr(native_library.tempfile, "mkdtemp", none)
        assert "failed: [Errno 2] No usable temporary directory found" in said()
    native_library._library.cache_clear()
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    assert native_library.library().selfspec_vector() == 7
    native_library._library.cache_clear()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr(native_library.tempfile, "mkdtemp", none)
    assert native_library.library().selfspec_vector() == 7


@needs_native
def test_a_file_that_another_process_deletes_is_not_there(put, monkeypatch):
    file, checked = put(b"no library", 0o700), native_library.open_private

    def deleted(path):
        if path == file and path.exists():
            path.unlink()
        return checked(path)

    monkeypatch.setattr(native_library, "open_private", deleted)
    assert native_library._library("", "") is not None


def test_a_file_of_root_is_as_good_as_ones_own(tmp_path, monkeypatch):
    """As in a container, whose image root has made."""
    file = tmp_path / "file"
    file.touch(0o700)
    owner = file.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    descriptor = native_library.open_private(file)
    assert (descriptor is not None) == (owner == 0)
    if descriptor is not None:
        os.close(descriptor)


@needs_native
def test_a_damaged_file_is_compiled_anew(put):
    file = put(b"no library", 0o700)
    assert native_library.library().selfspec_vector() == 7
    assert list(file.parent.iterdir()) == [file]


@needs_native
def test_half_a_file_is_not_even_loaded(put, monkeypatch):
    """Which would end the process."""
    file = put(b"no library", 0o700)
    os.truncate(file, file.stat().st_size // 2)
    monkeypatch.setattr(native_library.ctypes, "CDLL", lambda *_: pytest.fail("it was tried"))
    assert native_library._load(file) is None


@pytest.mark.parametrize("nonsense", ['"', "", "  "])
def test_a_compiler_that_is_no_command_is_none(monkeypatch, anew, nonsense):
    monkeypatch.setenv("CXX", nonsense)
    monkeypatch.setenv("PATH", str(anew))
    assert "no C++ compiler found" in said()


@needs_native
def test_two_processes_that_compile_at_once_leave_one_good_file(monkeypatch, tmp_path, quick):
    waits = f'echo >> {tmp_path}/calls; sleep 0.5; exec {real_compiler()} "$@"'
    monkeypatch.setenv("CXX", compiler(tmp_path, waits))
    forked = multiprocessing.get_context("fork")
    answers = forked.SimpleQueue()
    others = [forked.Process(target=lambda: answers.put(native_library.library().selfspec_vector())) for _ in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join(60)
    assert [other.exitcode for other in others] == [0, 0]
    assert [answers.get() for _ in others] == [7, 7]
    assert len((tmp_path / "calls").read_text().splitlines()) == 2
    assert len(list(quick.iterdir())) == 1
    assert native_library.library().selfspec_vector() == 7
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


@needs_native
@pytest.mark.parametrize("processor", ["skylake-avx512", "sapphirerapids", "znver3"])
def test_it_compiles_for_other_processors(monkeypatch, tmp_path, anew, processor):
    """With tiles, too, which this one may not have: what does not compile there would go unseen here."""
    source = native_library._SOURCE
    command = [real_compiler(), f"-march={processor}", *native_library._FLAGS, "-fopenmp", "-fsyntax-only"]
    empty = subprocess.run([*command, "-xc++", os.devnull], check=False, capture_output=True)
    if empty.returncode:
        pytest.skip(f"the compiler knows no {processor}")
    done = subprocess.run([*command, str(source)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


OLDER = {"x86-64": 4, "haswell": 8}
OLDER_SHAPES = [(1, 1, 32), (3, 9, 64), (8, 40, 96), (13, 17, 160), (20, 5, 32)]  # rows, outputs, inputs
# Weights of several fetches.
OLDER_SHAPES += [(1, 150, 1568), (5, 150, 1568), (9, 150, 1568), (20, 66, 4640), (70, 150, 1568)]


@needs_native
@pytest.mark.parametrize("processor", OLDER)
@pytest.mark.long("builds for older processors")
def test_older_processors_compute_the_same(monkeypatch, anew, processor):
    """Compiled as for them, with shorter vectors, as far as this one can run that."""
    if processor == "haswell" and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this processor lacks AVX2")
    monkeypatch.setattr(native_library, "_HERE", ((f"-march={processor}", "-O2"),))
    if not native_library.available():
        pytest.skip(f"the compiler knows no {processor}")
    assert native_library.library().selfspec_vector() == OLDER[processor]
    for kind in KINDS:
        for seed, (rows, out, into) in enumerate(OLDER_SHAPES):
            into = into if kind == "int4" else into + seed
            product, weight, bias = product_of(kind, seed, out, into, bias=bool(seed % 2))
            x = rows_of(kind, rows, into)
            check_near(kind, product, x, weight, bias)
            check_alone(product, x[:ROWS], [0, min(rows, ROWS) // 2])
    for kind, of in TYPES.items():
        for seed, (rows, out, blocks) in enumerate([(1, 1, 1), (3, 9, 2), (8, 40, 3), (16, 17, 1)]):
            weight, exact = blocks_of(kind, seed, out, of.inputs * blocks)
            multiplied(weight, exact, torch.randn(out), torch.randn(rows, exact.shape[1]))
    for dtype in HALVES:
        weight, bias, x = torch.randn(37, 83).to(dtype).float(), torch.randn(37), torch.randn(40, 83)
        ours, theirs = HalfProduct(halved([weight], dtype), bias), NativeProduct(weight, bias)
        assert torch.equal(ours.batch_invariant(x), theirs.batch_invariant(x))
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-4, rtol=1e-5)
    model = laid("llama-head-dim")
    assert LeanRuntime(model).compile(FULL).native is not None
    assert_near(logits(model), logits(single("llama-head-dim")))


def few_bit_products():
    """Products of quantised weights with rows, of sizes that fill no tile and no block too."""
    for kind in ("int8", "int4"):
        for seed, (rows, out, into) in enumerate([(1, 16, 32), (2, 33, 64), (9, 40, 128), (3, 100, 1536)]):
            product, _, _ = product_of(kind, seed, out, into + seed * (kind == "int8"), bias=bool(seed % 2))
            yield product.batch_invariant(rows_of(kind, rows, product.into))


@needs_native
@pytest.mark.parametrize("isa", list(native_library.ISAS)[1:])
@pytest.mark.long("builds for older processors")
def test_quantised_products_have_the_same_bits_with_every_instruction_set(monkeypatch, anew, isa):
    if problem := native_library._missing(isa):
        pytest.skip(problem)
    best = list(few_bit_products())
    monkeypatch.setenv("SELFSPEC_ISA", isa)
    assert all(map(torch.equal, few_bit_products(), best))
    assert native_library.library() is native_library._library("", "", isa)


def printed(tmp_path, compiler, *flags, run=()):
    """What `quantized_products.cpp` prints, compiled by a compiler with flags."""
    program = tmp_path / "program"
    source = Path(__file__).parents[2] / "helpers" / "quantized_products.cpp"
    include = f"-I{native_library._SOURCE.parent}"
    command = [
        *compiler,
        "-std=c++17",
        "-O2",
        "-ffp-contract=off",
        "-w",
        include,
        *flags,
        str(source),
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    return subprocess.run([*run, str(program)], check=True, capture_output=True, text=True).stdout.split()


@needs_native
@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")),
    reason=reason("an emulated ARM processor"),
)
@pytest.mark.parametrize("processor", ["armv8-a", "armv8.2-a+dotprod"])
@pytest.mark.long("an emulated processor")
def test_arm_processors_give_quantised_products_the_same_bits(tmp_path, processor):
    flags = ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []
    here = printed(tmp_path, [real_compiler()], *flags)
    emulated = printed(tmp_path, ["aarch64-linux-gnu-g++"], "-static", f"-march={processor}", run=["qemu-aarch64"])
    assert len(here) > 1000
    assert emulated == here


@pytest.mark.parametrize(
    ("isa", "said"),
    [
        ("mmx", "SELFSPEC_ISA=mmx is not known; expected one of sse, avx2,"),
        ("avx2", "this processor has no avx2, bmi2"),
    ],
)
def test_an_instruction_set_that_cannot_be_used_is_told(monkeypatch, anew, isa, said):
    monkeypatch.setattr(native_library, "_instructions", lambda: "flags : fma f16c")
    monkeypatch.setenv("SELFSPEC_ISA", isa)
    with pytest.raises(SelfspecError, match=said):
        native_library.library()


@pytest.mark.skipif(
    os.environ.get("SELFSPEC_NATIVE") == "0" or not any(map(shutil.which, ("c++", "g++", "clang++"))),
    reason=reason("a C++ compiler"),
)
def test_where_there_is_a_compiler_it_compiles():
    """Else a source that is wrong would pass for a machine without one."""
    native_library.library()
