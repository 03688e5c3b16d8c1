"""Linears as the runtime calls them, and parameters laid side by side in place."""

from __future__ import annotations

import pytest
import torch
from layouts import needs_onednn
from models import CONFIGS, plain, tiny
from torch import nn
from torch.overrides import TorchFunctionMode

from selfspec.models.layout import join_all_
from selfspec.models.linears import (
    Group,
    SparseOutputs,
    _float32_product,
    linear,
    linear_onto,
    linear_over,
    logits_linear,
    side_by_side,
)
from selfspec.models.stored_linear import PackedLinear, pack_
from selfspec.runtime.forward import LeanRuntime

X = torch.randn(6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def parts(model):
    attention = model.model.layers[1].self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def separately(modules, x=X):
    return torch.cat([module(x) for module in modules], dim=-1)


@torch.no_grad()
def together(modules, x=X):
    out = torch.empty(len(x), separately(modules, x[:1]).shape[1], dtype=x.dtype)
    side_by_side(modules)(x, out)
    return out


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_joining_changes_nothing_but_where_parameters_lie(name, columns):
    model, other = tiny(CONFIGS[name]), tiny(CONFIGS[name])
    parameters = dict(model.named_parameters())
    join_all_(model, columns=columns)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in model.state_dict().items())
    bytes_held = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in parameters.values()
    }
    assert sum(bytes_held.values()) == sum(p.numel() * p.element_size() for p in parameters.values())
    ids = torch.tensor([[3, 1, 4]])
    torch.testing.assert_close(model(ids).logits, other(ids).logits)
    assert plain(LeanRuntime(model), [3, 1, 4], 12) == plain(LeanRuntime(other), [3, 1, 4], 12)


class Products(TorchFunctionMode):
    """Counts products."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.mm, torch.addmm):
            self.shapes.append(tuple(kwargs["mat2"].shape))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("name", ["llama", "llama-biases"])
def test_joined_parameters_are_one_product(name, columns):
    model = tiny(CONFIGS[name])
    expected = separately(parts(model))
    with Products() as before:
        torch.testing.assert_close(together(parts(model)), expected)
    join_all_(model, columns=columns)
    with Products() as after:
        torch.testing.assert_close(together(parts(model)), expected)
    assert len(before.shapes) == 3
    assert after.shapes == [(32, 32 + 16 + 16)]


def test_what_is_not_an_exact_linear_stays_as_it_is():
    model = tiny(CONFIGS["llama"])
    attention = model.model.layers[1].self_attn
    attention.k_proj = nn.Sequential(attention.k_proj)
    heard = []
    model.model.layers[2].self_attn.v_proj.register_forward_hook(lambda *_: heard.append(1))
    weights = [parameter.data_ptr() for parameter in model.model.layers[1].self_attn.parameters()]
    join_all_(model)
    assert [parameter.data_ptr() for parameter in model.model.layers[1].self_attn.parameters()] == weights
    torch.testing.assert_close(together(parts(model)), separately(parts(model)))
    plain(LeanRuntime(model), [3, 1, 4], 4)
    assert heard


def test_weights_changed_in_place_are_seen_and_replaced_ones_are_not_mistaken():
    model = tiny(CONFIGS["llama"])
    join_all_(model)
    joined, out = side_by_side(parts(model)), torch.empty(6, 64, dtype=torch.float64)
    with torch.no_grad():
        parts(model)[1].weight.mul_(2)
    joined(X, out)
    torch.testing.assert_close(out, separately(parts(model)))
    parts(model)[1].weight.data = parts(model)[1].weight.data.clone()
    torch.testing.assert_close(together(parts(model)), separately(parts(model)))


def test_a_joined_model_can_be_saved_and_loaded(tmp_path):
    model = tiny(CONFIGS["llama"])
    join_all_(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_linear_without_a_modules_overhead(bias, rows, dtype):
    module = nn.Linear(32, 5, dtype=dtype, bias=bias)
    x, base = X[:rows].to(dtype), X[:rows, :5].to(dtype, copy=True)
    near = {"atol": 0.05, "rtol": 0.05} if dtype.itemsize == 2 else {}  # which rounds once or twice
    torch.testing.assert_close(linear(module)(x), module(x), **near)
    expected = base + module(x)
    linear_onto(module)(base, x)
    torch.testing.assert_close(base, expected, **near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_one_row_by_rows_is_a_product_with_a_vector(dtype):
    """A product of matrices would bring a bfloat16 weight into another order first, at each call."""
    module, x = nn.Linear(32, 5, dtype=dtype, bias=False), X.to(dtype)
    product, onto, out = linear(module), linear_onto(module), torch.empty(1, 5, dtype=dtype)
    for rows, matrices in ((1, 0), (6, 1)):
        with Products() as made:
            product(x[:rows])
        assert len(made.shapes) == matrices
    product(x[:1], out=out)
    assert torch.equal(out, product(x[:1]))
    stream = torch.zeros(2, 6, dtype=dtype)[:1, :5]  # a view, as the residual stream is
    onto(stream, x[:1])
    torch.testing.assert_close(stream, out, atol=0.02, rtol=0.02)


def test_a_hooked_linear_is_called_as_its_model_would_call_it():
    hooked, shapes = nn.Linear(32, 5, dtype=torch.float64), []
    hooked.register_forward_hook(lambda _, args, __: shapes.append(args[0].shape))
    torch.testing.assert_close(linear(hooked)(X), hooked(X))
    base = X[:, :5].clone()
    linear_onto(hooked)(base, X)
    torch.testing.assert_close(base, X[:, :5] + hooked(X))
    assert shapes[0] == shapes[2] == (1, 6, 32)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_onednn)])
def test_a_linear_over_some_outputs(bias, packed):
    holder = nn.Module()
    holder.head = nn.Linear(32, 9, bias=bias)
    whole = holder.head(X.float())
    if packed:
        with torch.no_grad():
            pack_(Group(holder, ("head",)))
        assert isinstance(holder.head, PackedLinear)
    outputs = [7, 0, 4]
    with torch.no_grad():
        part = linear_over(holder.head, outputs)(X.float())
    torch.testing.assert_close(part[:, outputs], whole[:, outputs])
    rest = [i for i in range(9) if i not in outputs]
    assert bool((part[:, rest] == -torch.inf).all())


def test_a_linear_whose_weight_is_not_at_hand_has_no_parts():
    assert linear_over(nn.Sequential(nn.Linear(2, 2)), [0]) is None


def test_logits_on_cuda_are_float32_from_weights_in_half_precision():
    """By torch's own check of shapes and dtypes, as no CPU has this product."""

    class OnCuda:
        device, dtype = torch.device("cuda", 0), torch.bfloat16

        def t(self):
            return torch.empty(32, 9, dtype=self.dtype, device="meta")

    product = _float32_product(OnCuda())
    assert product is not None
    logits = product(torch.empty(3, 32, dtype=torch.bfloat16, device="meta"))
    assert (logits.dtype, logits.shape) == (torch.float32, (3, 9))
    OnCuda.dtype = torch.float32
    assert _float32_product(OnCuda()) is None
    module = nn.Linear(32, 9, bias=False, dtype=torch.bfloat16)
    assert logits_linear(module)(X.bfloat16()).dtype == torch.bfloat16  # on a CPU
    over = SparseOutputs(lambda x: x[:, :2].float(), torch.tensor([3, 1]), 5)
    assert over(X.bfloat16()).dtype == torch.float32
