"""Rounding, and linears in few bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering import stands_for
from torch import nn

from selfspec.models import low_precision
from selfspec.models.dispatch import device_of
from selfspec.models.linears import Group, linear, linear_onto, linear_over, side_by_side
from selfspec.models.low_precision import LowPrecisionLinear, bytes_of, fake, is_quantizable, quantize, quantize_group

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def weight_of(seed, out, into, dtype, size=1.0, middle=0.0):
    made = torch.randn(out, into, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (made * size + middle).to(dtype)


weights = st.builds(
    weight_of,
    st.integers(0, 99),
    st.integers(1, 40),
    st.integers(1, 6).map(lambda n: 32 * n),
    st.sampled_from(DTYPES),
    st.integers(-12, 8).map(lambda n: 2.0**n),
    st.sampled_from([0.0, 0.0, 1.0, -8.0]),
)


@settings(max_examples=examples(60))
@given(weights)
def test_in_8_bits_a_value_is_off_by_half_a_step_of_its_output(weight):
    held = quantize(weight, 8)
    off = (held.weight(torch.float64) - weight.double()).abs()
    assert (off <= held.scale.double() * 0.501).all()
    largest = weight.double().abs().amax(1, keepdim=True)
    assert (held.scale.double() <= (largest / 127 * (1 + 2**-8)).clamp(min=1.01e-12)).all()
    assert held.values.dtype == torch.int8
    assert held.values.abs().max() <= 127


@pytest.mark.parametrize("bits", [8, 4])
def test_a_few_outputs_at_a_time_are_as_all_at_once(bits, monkeypatch):
    weight = weight_of(1, 37, 128, torch.bfloat16)
    whole = quantize(weight, bits)
    dequantized = whole.weight(torch.float32)
    monkeypatch.setattr(low_precision, "_ELEMENTS", 5 * 128)
    parts = quantize(weight, bits)
    for name in ("values", "scale") if bits == 8 else ("values", "scale", "zero"):
        assert torch.equal(getattr(parts, name), getattr(whole, name))
    assert torch.equal(parts.weight(torch.float32), dequantized)


@settings(max_examples=examples(60))
@given(weights)
def test_in_4_bits_a_value_is_off_by_half_a_step_of_its_group_and_what_bfloat16_loses_of_the_zero(weight):
    held = quantize(weight, 4)
    groups = held.scale.shape[1]
    off = (held.weight(torch.float64) - weight.double()).abs().view(len(weight), groups, -1)
    step, zero = held.scale.double().unsqueeze(-1), held.zero.double().unsqueeze(-1)
    assert (off <= step * (0.5 + 15 / 256) + zero.abs() / 256).all()
    assert 0 <= held.values.min() <= held.values.max() <= 15


@given(weights, st.sampled_from([8, 4]))
def test_how_a_weight_is_stored_changes_nothing(weight, bits):
    held, other = quantize(weight, bits), quantize(weight.t().contiguous().t(), bits)
    assert torch.equal(held.values, other.values)
    assert other.values.is_contiguous()
    torch.testing.assert_close(held.weight(torch.float32).double(), held.weight(torch.float64), atol=1e-9, rtol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_and_tiny_values_stay_so(bits):
    assert not quantize(torch.zeros(3, 64), bits).weight(torch.float32).any()
    assert quantize(torch.full((3, 64), 1e-30), bits).weight(torch.float64).abs().max() < 1e-11


def test_what_can_be_had():
    with_bias, narrow, odd = nn.Linear(64, 61), nn.Linear(48, 64), nn.Linear(33, 5)
    assert is_quantizable([with_bias, narrow, odd], 8)
    assert is_quantizable([with_bias], 4)
    assert not is_quantizable([with_bias, narrow], 4)
    hooked, adapted = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64))
    hooked.register_forward_hook(lambda *_: None)
    for module in (hooked, adapted, nn.Linear(64, 64, device="meta")):
        assert not is_quantizable([module], 8)


def test_bytes():
    assert bytes_of(8, 10, 100) == 1000 + 20
    assert bytes_of(4, 10, 128) == 640 + 10 * 2 * 4  # a scale and a zero of two bytes, for each of two groups
    assert bytes_of(4, 10, 96) == 480 + 10 * 3 * 4


def lowered(bits, *modules, kernel=fake):
    """The modules in few bits, and the bytes."""
    names = tuple(f"part{i}" for i in range(len(modules)))
    group, held = quantize_group(Group(SimpleNamespace(**dict(zip(names, modules, strict=True))), names), bits, kernel)
    return group.modules, held


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("biases", [(False, False), (True, True), (True, False)], ids=str)
def test_linears_in_few_bits(bits, biases):
    """However they are called: alone, side by side, added to the stream, for some outputs, on any dimensions."""
    torch.manual_seed(0)
    own = [nn.Linear(64, out, bias=bias).double() for out, bias in zip((5, 17), biases, strict=True)]
    before = [module.weight.clone() for module in own]
    made, held = lowered(bits, *own)
    theirs = [stands_for(module, bits) for module in own]
    assert held == bytes_of(bits, 22, 64)
    x = torch.randn(2, 3, 64, dtype=torch.float64)
    rows = x.flatten(0, 1)
    for mine, other in zip(made, theirs, strict=True):
        expected = other(x).detach()
        torch.testing.assert_close(mine(x), expected)
        torch.testing.assert_close(mine(x[0, 0]), expected[0, 0])
        torch.testing.assert_close(linear(mine)(rows), expected.flatten(0, 1))
        base = torch.ones(6, other.out_features, dtype=torch.float64)
        linear_onto(mine)(base, rows)
        torch.testing.assert_close(base, expected.flatten(0, 1) + 1)
        some = linear_over(mine, [4, 0])(rows)
        torch.testing.assert_close(some[:, [4, 0]], expected.flatten(0, 1)[:, [4, 0]])
        assert torch.isinf(some).sum() == some.numel() - 12
        assert device_of(mine) == device_of(other)
        assert not list(mine.parameters())
    together = torch.empty(6, 22, dtype=torch.float64)
    side_by_side(made)(rows, together)
    torch.testing.assert_close(together, torch.cat([other(rows) for other in theirs], 1).detach())
    assert all(torch.equal(a, module.weight) for a, module in zip(before, own, strict=True))


def test_a_weight_is_rounded_once_and_not_before_it_is_asked_for():
    packed = []

    def counted(weight, dtype):
        packed.append(tuple(weight.values.shape))
        return fake(weight, dtype)

    (first, _), _ = lowered(8, nn.Linear(64, 6), nn.Linear(64, 4), kernel=counted)
    assert isinstance(first, LowPrecisionLinear)
    assert not packed
    (head,), _ = lowered(8, nn.Linear(64, 61), kernel=counted)
    linear_over(head, [3, 5])
    assert packed == [(2, 64)]  # the others were not
    for _ in range(2):
        first(torch.randn(1, 64))
    assert packed == [(2, 64), (10, 64)]
