"""Linears as the runtime calls them, and parameters laid side by side in place."""

from __future__ import annotations

import pytest
import torch
from models import CONFIGS, plain, tiny
from torch import nn

from selfspec.linears import join_, linear, linear_onto, side_by_side
from selfspec.runtime import Runtime

X = torch.randn(6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def parts(model):
    attention = model.model.layers[1].self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def separately(modules, x=X):
    return torch.cat([module(x) for module in modules], dim=-1)


@pytest.mark.parametrize("name", CONFIGS)
def test_joining_changes_nothing_but_where_parameters_lie(name):
    model, other = tiny(CONFIGS[name]), tiny(CONFIGS[name])
    parameters = dict(model.named_parameters())
    join_(model)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in model.state_dict().items())
    bytes_held = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in parameters.values()
    }
    assert sum(bytes_held.values()) == sum(p.numel() * p.element_size() for p in parameters.values())
    ids = torch.tensor([[3, 1, 4]])
    torch.testing.assert_close(model(ids).logits, other(ids).logits)
    assert plain(Runtime(model), [3, 1, 4], 12) == plain(Runtime(other), [3, 1, 4], 12)


def test_joined_parameters_are_one_product():
    model = tiny(CONFIGS["llama-biases"])
    before = side_by_side(parts(model))
    expected = separately(parts(model))
    torch.testing.assert_close(before(X), expected)
    join_(model)
    joined = side_by_side(parts(model))
    torch.testing.assert_close(joined(X), expected)
    assert joined.keywords["mat2"].shape == (32, 32 + 16 + 16)
    assert joined.keywords["mat2"].data_ptr() == parts(model)[0].weight.data_ptr()


def test_what_is_not_an_exact_linear_stays_as_it_is():
    model = tiny(CONFIGS["llama"])
    attention = model.model.layers[1].self_attn
    attention.k_proj = nn.Sequential(attention.k_proj)
    heard = []
    model.model.layers[2].self_attn.v_proj.register_forward_hook(lambda *_: heard.append(1))
    weights = [parameter.data_ptr() for parameter in model.model.layers[1].self_attn.parameters()]
    join_(model)
    assert [parameter.data_ptr() for parameter in model.model.layers[1].self_attn.parameters()] == weights
    torch.testing.assert_close(side_by_side(parts(model))(X), separately(parts(model)))
    plain(Runtime(model), [3, 1, 4], 4)
    assert heard


def test_weights_changed_in_place_are_seen_and_replaced_ones_are_not_mistaken():
    model = tiny(CONFIGS["llama"])
    join_(model)
    joined = side_by_side(parts(model))
    with torch.no_grad():
        parts(model)[1].weight.mul_(2)
    torch.testing.assert_close(joined(X), separately(parts(model)))
    parts(model)[1].weight.data = parts(model)[1].weight.data.clone()
    torch.testing.assert_close(side_by_side(parts(model))(X), separately(parts(model)))


def test_a_joined_model_can_be_saved_and_loaded(tmp_path):
    model = tiny(CONFIGS["llama"])
    join_(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_without_a_modules_overhead(bias):
    module = nn.Linear(32, 5, dtype=torch.float64, bias=bias)
    base = torch.randn(6, 5, dtype=torch.float64)
    torch.testing.assert_close(linear(module)(X), module(X))
    torch.testing.assert_close(linear_onto(module)(base, X), base + module(X))


def test_a_hooked_linear_is_called_as_its_model_would_call_it():
    hooked, shapes = nn.Linear(32, 5, dtype=torch.float64), []
    hooked.register_forward_hook(lambda _, args, __: shapes.append(args[0].shape))
    torch.testing.assert_close(linear(hooked)(X), hooked(X))
    torch.testing.assert_close(linear_onto(hooked)(X[:, :5], X), X[:, :5] + hooked(X))
    assert shapes[0] == shapes[2] == (1, 6, 32)
