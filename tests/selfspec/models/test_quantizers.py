"""Int4 quantisers against brute force on small cases, and on weights of any kind."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import CONFIGS, tiny

from selfspec.basics.errors import SelfspecError
from selfspec.models.families.base import GatedMlp
from selfspec.models.low_precision import quantize
from selfspec.models.quantizers import InputMoments, group_for, quantize_int4, watched, zero_moments
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.methods import INT4_METHODS

POINTS = torch.tensor(list(itertools.product(range(16), repeat=4)), dtype=torch.float64)  # all values of 4 inputs


def moments_of(x):
    moments = InputMoments.zeros(x.shape[1], x.device, products=True)
    for part in x.split(5):
        moments.add(part)
    return moments.mean()


def weighted_error(weight, quantized, squares):
    return (squares.double() * (weight.double() - quantized.weight(torch.float64)) ** 2).sum(1)


def product_error(weight, quantized, products):
    off = weight.double() - quantized.weight(torch.float64)
    return ((off @ products.double()) * off).sum(1)


def random_case(seed, *, out=8, into=4):
    chance = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, into, generator=chance)
    mixed = torch.randn(into, into, generator=chance) + torch.eye(into)
    return weight, moments_of(torch.randn(40, into, generator=chance) @ mixed)


def test_moments_are_means_over_all_inputs():
    x = torch.randn(23, 4, generator=torch.Generator().manual_seed(0))
    full, diagonal = moments_of(x), InputMoments.zeros(4, x.device, products=False)
    diagonal.add(x)
    torch.testing.assert_close(full.products, x.t() @ x / 23)
    torch.testing.assert_close(full.squares, x.square().mean(0))
    torch.testing.assert_close(diagonal.mean().squares, x.square().mean(0))


def test_inputs_are_counted_where_a_gated_mlp_is_one_kernel():
    """On a GPU one kernel computes gate and up of few rows; it must not replace the linears that are watched."""
    config = copy.deepcopy(CONFIGS["llama"])
    config.intermediate_size = 64
    runtime, texts = LeanRuntime(tiny(config, dtype=torch.float32)), torch.arange(12)[None]
    block = runtime.skeleton.blocks[0]
    assert isinstance(block.mlp, GatedMlp)
    fused = replace(block, mlp=replace(block.mlp, gated=lambda x, out: pytest.fail("the fused kernel ran")))
    found = []
    for each in (block, fused):
        moments = zero_moments(runtime.skeleton.quantizer.int4_groups(0), products=False)
        with runtime.session(12):
            runtime.run_layer(0, watched(each, moments), runtime.skeleton.embed(texts))
        found.append({number: (own.count, own.squares) for number, own in moments.items()})
    assert found[0].keys() == {0, 1, 2, 3}
    assert found[0][2][0] == 12
    for number, (count, squares) in found[0].items():
        assert (count, squares.tolist()) == (found[1][number][0], found[1][number][1].tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nearest_is_what_drafts_round_to(dtype):
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours, theirs = quantize_int4(weight, "nearest", group=64), quantize(weight, 4)
    assert all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in ("values", "scale", "zero"))


@pytest.mark.parametrize("seed", range(6))
def test_weighted_against_all_values_of_a_group_of_four(seed):
    """Between the best of any values with any scale and zero point, and rounding to nearest, clearly below it."""
    weight, moments = random_case(seed)
    found = weighted_error(weight, quantize_int4(weight, "weighted", moments, group=4), moments.squares)
    nearest = weighted_error(weight, quantize_int4(weight, "nearest", group=4), moments.squares)
    c = moments.squares.double()
    means = (POINTS @ c / c.sum()).unsqueeze(1)
    for row, error in zip(weight.double(), found, strict=True):
        centred = row - (row @ c) / c.sum()
        slopes = ((POINTS - means) * c * centred).sum(1) / ((POINTS - means) ** 2 * c).sum(1).clamp(min=1e-12)
        best = ((centred - slopes.unsqueeze(1) * (POINTS - means)) ** 2 * c).sum(1).min()
        assert error >= best - 1e-9
    assert bool((found <= nearest * (1 + 1e-6)).all())
    assert float(found.sum()) < 0.9 * float(nearest.sum())


@pytest.mark.parametrize("method", ["nearest", "weighted"])
def test_values_are_the_nearest_to_the_grid_that_kernels_read(method):
    """That of the scales and zero points in bfloat16: no other value of any weight is nearer."""
    weight, moments = random_case(3, out=16, into=8)
    made = quantize_int4(weight, method, moments, group=4)
    scale, zero = (t.double().repeat_interleave(4, 1).unsqueeze(2) for t in (made.scale, made.zero))
    off = (weight.double().unsqueeze(2) - (torch.arange(16.0).double() - 8) * scale - zero).abs()
    chosen = off.gather(2, made.values.long().unsqueeze(2))
    assert bool((chosen <= off.amin(2, keepdim=True) + 1e-7).all())


def test_gptq_against_all_values_on_its_grid():
    """Never below the best values on the same grid, on average nearer to these than to rounding."""
    total = dict.fromkeys(("best", "gptq", "weighted", "nearest"), 0.0)
    for seed in range(12):
        weight, moments = random_case(seed)
        made = {m: quantize_int4(weight, m, moments, group=4) for m in INT4_METHODS}
        assert torch.equal(made["gptq"].scale, made["weighted"].scale)
        assert torch.equal(made["gptq"].zero, made["weighted"].zero)
        errors = {m: product_error(weight, q, moments.products) for m, q in made.items()}
        for i, (scale, zero) in enumerate(zip(made["gptq"].scale.double(), made["gptq"].zero.double(), strict=True)):
            off = weight[i].double() - (POINTS - 8) * scale - zero
            best = ((off @ moments.products.double()) * off).sum(1).min()
            assert errors["gptq"][i] >= best - 1e-9
            total["best"] += float(best)
        for method, error in errors.items():
            total[method] += float(error.sum())
    assert total["best"] < total["gptq"] < total["weighted"] < total["nearest"]
    assert total["gptq"] - total["best"] < total["weighted"] - total["gptq"]


@pytest.mark.parametrize("group", [32, 64])
def test_gptq_on_inputs_without_correlation_is_the_weighted_rounding(group):
    weight = torch.randn(12, 192, generator=torch.Generator().manual_seed(1))
    squares = torch.rand(192, generator=torch.Generator().manual_seed(2)) + 0.1
    moments = InputMoments(squares, torch.diag(squares), 1)
    ours, theirs = (quantize_int4(weight, method, moments, group=group) for method in ("gptq", "weighted"))
    assert torch.equal(ours.values, theirs.values)
    assert ours.scale.shape == (12, 192 // group)


@pytest.mark.parametrize("group", [32, 64])
def test_gptq_over_several_blocks_of_columns(group):
    """Its error on correlated inputs, in any order of their sizes, is far below that of rounding."""
    chance = torch.Generator().manual_seed(4)
    weight = torch.randn(24, 192, generator=chance)
    x = torch.randn(400, 12, generator=chance) @ torch.randn(12, 192, generator=chance)
    moments = moments_of(x + 0.3 * torch.randn(400, 192, generator=chance))
    errors = [
        float(product_error(weight, quantize_int4(weight, m, moments, group=group), moments.products).sum())
        for m in INT4_METHODS
    ]
    assert errors[2] < 0.5 * errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize("count", [40, 100, 400])
def test_gptq_of_few_inputs_errs_less_on_others_than_the_weighted_grid(count):
    """Also with fewer inputs than each has values, whose products say little about others."""
    chance = torch.Generator().manual_seed(0)
    weight, mixed = torch.randn(32, 128, generator=chance), torch.randn(24, 128, generator=chance)
    noise = torch.randn(count, 128, generator=chance)
    moments = moments_of(torch.randn(count, 24, generator=chance) @ mixed + 3 * noise)
    products = mixed.t() @ mixed + 9 * torch.eye(128)  # of all inputs
    gptq, weighted = (
        float(product_error(weight, quantize_int4(weight, method, moments, group=64), products).sum())
        for method in ("gptq", "weighted")
    )
    assert gptq < 0.85 * weighted


weights = st.tuples(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(["any", "zero", "constant", "one group constant", "tiny", "large", "one outlier"]),
    st.sampled_from(["any", "never seen", "some never seen"]),
    st.integers(0, 2**16),
)


@given(weights)
def test_any_finite_weight(case):
    """Values fit 4 bits and all numbers are finite; weighted rounding is no worse than rounding to nearest."""
    dtype, kind, seen, seed = case
    chance = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 64, generator=chance)
    factor = {"zero": 0.0, "tiny": 1e-7, "large": 1e4}.get(kind, 1.0)
    weight *= factor
    if kind in ("constant", "one group constant"):
        weight[:, : 64 if kind == "constant" else 32] = float(weight[0, 0])
    if kind == "one outlier":
        weight[0, 5] = 60000.0
    weight = weight.to(dtype)
    x = torch.randn(30, 64, generator=chance)
    if seen != "any":
        x[:, : 64 if seen == "never seen" else 40] = 0
    moments = moments_of(x)
    errors = {}
    for method in INT4_METHODS:
        made = quantize_int4(weight, method, moments, group=32)
        assert made.values.dtype == torch.int8
        assert (made.scale.dtype, made.zero.dtype) == (torch.bfloat16, torch.bfloat16)
        assert 0 <= int(made.values.min()) <= int(made.values.max()) <= 15
        assert bool(made.weight(torch.float32).isfinite().all())
        errors[method] = weighted_error(weight, made, moments.squares)
    slack = 1e-4 * (moments.squares * weight.double() ** 2).sum(1)
    assert bool((errors["weighted"] <= errors["nearest"] + slack).all())


def test_what_cannot_be_quantised():
    weight = torch.ones(2, 64)
    with pytest.raises(SelfspecError, match="not finite"):
        quantize_int4(weight * float("nan"), "weighted", group=64)
    with pytest.raises(SelfspecError, match="method 'awq' of quantising is not known; known: nearest, weighted, gptq"):
        quantize_int4(weight, "awq", group=64)
    with pytest.raises(SelfspecError, match="expected the products"):
        quantize_int4(weight, "gptq", group=64)


def test_the_group_size_of_inputs():
    assert [group_for(into, 64) for into in (128, 96, 48)] == [64, 32, None]
    assert [group_for(into, 32) for into in (128, 96, 48)] == [32, 32, None]
