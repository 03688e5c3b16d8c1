"""Forwards of quantised linears and experts, in place of those of a model's modules."""

from __future__ import annotations

import pytest
import torch
from families import FAMILY_CONFIGS
from layouts import needs_native
from model_types import tiny_model
from models import CONFIGS, tiny
from torch import nn

from selfspec.models import layout, module_quantizer
from selfspec.models.layout import measure_as_stored
from selfspec.models.linears import is_exact
from selfspec.models.low_precision import bytes_of, fake, quantize
from selfspec.models.module_quantizer import quantizer_of, recording_inputs

X = torch.randn(2, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def made(model, **options):
    with recording_inputs(model) as inputs, torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    return quantizer_of(model, inputs, fake, **options)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_sublayers_linears_multiply_with_rounded_weights(bits):
    model = tiny(CONFIGS["llama-biases"])
    attention = model.model.layers[1].self_attn
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    forwards, nbytes = made(model).sublayer(1, "attention", bits)
    assert set(forwards) == set(linears)
    assert nbytes == sum(bytes_of(bits, linear.out_features, linear.in_features) for linear in linears)
    for linear in linears:
        expected = nn.functional.linear(X, quantize(linear.weight, bits).weight(X.dtype), linear.bias)
        torch.testing.assert_close(forwards[linear](X), expected, atol=1e-12, rtol=1e-12)
        assert forwards[linear](X).shape == expected.shape


def test_linears_of_one_input_are_computed_once_and_again_for_another():
    model = tiny(CONFIGS["llama"])
    products = []

    def counting(weight, dtype):
        multiply = fake(weight, dtype)
        return lambda x: products.append(1) or multiply(x)

    with recording_inputs(model) as inputs, torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    mlp = model.model.layers[0].mlp
    forwards, _ = quantizer_of(model, inputs, counting).sublayer(0, "mlp", 8)
    gate, up = forwards[mlp.gate_proj](X), forwards[mlp.up_proj](X)
    assert len(products) == 1
    other = X + 1
    assert not torch.equal(forwards[mlp.up_proj](other), up)
    assert torch.equal(forwards[mlp.gate_proj](X), gate), "what was handed out is not handed out for another input"
    changing = X.clone()
    before = forwards[mlp.gate_proj](changing)
    changing.mul_(2)
    torch.testing.assert_close(forwards[mlp.gate_proj](changing), 2 * before)


class Doubled(nn.Linear):
    """A subclass of `nn.Linear` that computes something else."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("model_type", "parent", "names"),
    [
        ("gpt2", "transformer.h.1.mlp", ("c_fc", "c_proj")),  # stored by columns
        ("falcon", "transformer.h.1.mlp", ("dense_h_to_4h", "dense_4h_to_h")),  # a subclass with its own forward
        ("opt", "model.decoder.layers.1", ("fc1", "fc2")),  # children of the layer, without a module for the MLP
    ],
)
def test_linears_of_other_kinds(model_type, parent, names):
    model = tiny_model(model_type).double()
    owner = model.get_submodule(parent)
    linears = [getattr(owner, name) for name in names]
    forwards, nbytes = made(model).sublayer(1, "mlp", 8)
    assert set(forwards) == set(linears)
    weights = [linear.weight.t() if model_type == "gpt2" else linear.weight for linear in linears]
    assert nbytes == sum(bytes_of(8, *weight.shape) for weight in weights)
    for linear, weight in zip(linears, weights, strict=True):
        x = torch.randn(2, 3, weight.shape[1], dtype=torch.float64)
        expected = nn.functional.linear(x, quantize(weight, 8).weight(x.dtype), linear.bias)
        torch.testing.assert_close(forwards[linear](x), expected, atol=1e-12, rtol=1e-12)


def test_what_is_mostly_of_other_modules_is_not_quantised():
    model = tiny(CONFIGS["llama"])
    mlp = model.model.layers[0].mlp
    for name in ("gate_proj", "up_proj"):
        other = Doubled(mlp.gate_proj.in_features, mlp.gate_proj.out_features, bias=False, dtype=torch.float64)
        setattr(mlp, name, other)
    quantizer = quantizer_of(model)
    assert quantizer.bytes(0, "mlp", 8) is quantizer.sublayer(0, "mlp", 4) is None
    assert quantizer.head_bytes(8) == bytes_of(8, 61, 32)
    model = tiny(CONFIGS["llama"])
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: None)
    assert set(quantizer_of(model, kernel=fake).sublayer(0, "mlp", 8)[0]) == {
        model.model.layers[0].mlp.gate_proj,
        model.model.layers[0].mlp.up_proj,
    }, "a hook would not run"
    assert quantizer_of(model).all_linears_bytes(8) == sum(
        bytes_of(8, m.out_features, m.in_features) for m in model.modules() if isinstance(m, nn.Linear) and is_exact(m)
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("bits", [8, 4])
@torch.no_grad()
def test_experts_multiply_with_rounded_weights_and_those_not_chosen_are_not_read(name, bits):
    model = tiny(FAMILY_CONFIGS[name])
    quantizer = made(model)
    mlp = model.model.layers[0].mlp
    forwards, nbytes = quantizer.sublayer(0, "mlp", bits)
    assert nbytes == quantizer.bytes(0, "mlp", bits)
    rows, chosen = X.view(6, 32), torch.tensor([[0, 2]] * 6)
    weights = torch.full((6, 2), 0.5, dtype=X.dtype)
    ours = forwards[mlp.experts](rows, chosen, weights)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(mlp.experts, name)
        for number, expert in enumerate(weight):
            across = mlp.experts.is_transposed
            rounded = quantize(expert.t() if across else expert, bits).weight(X.dtype)
            weight[number] = (rounded.t() if across else rounded) if number in (0, 2) else torch.nan
    torch.testing.assert_close(ours, mlp.experts(rows, chosen, weights), atol=1e-10, rtol=1e-10)
    assert quantizer_of(model).all_linears_bytes(8) is None


@needs_native
def test_full_products_are_native_where_that_was_faster(monkeypatch):
    model = tiny(CONFIGS["llama-biases"], dtype=torch.float32)
    monkeypatch.setattr(layout, "read_cached", lambda path: None)
    monkeypatch.setattr(layout, "write_cached", lambda path, data: None)
    for seconds, native in ((3.0, False), (1.0, True)):
        times = {"rows": dict.fromkeys(layout.WIDTHS, 2.0), "native": dict.fromkeys(layout.WIDTHS, seconds)}
        monkeypatch.setattr(layout, "measure_as_stored", lambda _, times=times: times)
        assert bool(quantizer_of(model).full()) == native
    forwards = quantizer_of(model).full()
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert set(forwards) == set(linears)
    x = X.float()
    for linear in linears[:7]:
        rows = x.repeat(1, 1, linear.in_features // 32 + 1)[..., : linear.in_features]
        torch.testing.assert_close(forwards[linear](rows), linear(rows))
    assert quantizer_of(tiny(CONFIGS["llama"], dtype=torch.float64)).full() == {}


@needs_native
@pytest.mark.parametrize(
    ("model_type", "layer"),
    [
        ("opt", "model.decoder.layers.0"),  # children of the layer
        ("falcon", "transformer.h.0"),  # a subclass with a forward of its own
        ("falcon_h1", "model.layers.0"),  # a mixer beside attention and MLP
    ],
)
def test_linears_of_other_kinds_have_full_products_too(model_type, layer, monkeypatch):
    """A subclass that computes something else has none."""
    monkeypatch.setattr(module_quantizer, "suits_native", lambda linears: True)
    model = tiny_model(model_type).float()
    model.get_submodule(layer).more = Doubled(8, 8)
    forwards = quantizer_of(model).full()
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and not isinstance(m, Doubled)]
    assert set(forwards) == set(linears)
    for linear in linears:
        x = torch.randn(2, 3, linear.in_features)
        torch.testing.assert_close(forwards[linear](x), linear(x))


@needs_native
def test_products_with_weights_as_stored_are_timed():
    model = tiny(CONFIGS["llama"], dtype=torch.float32)
    linears = [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)]
    times = measure_as_stored(linears)
    assert set(times) == {"rows", "native"}
    assert set(times["native"]) == set(layout.WIDTHS)
