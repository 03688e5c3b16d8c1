"""Float32 weights in 16 bits where that is exact: the bits of float32 products, half the memory, the same model."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from families import FAMILY_CONFIGS
from layouts import needs_native
from models import tiny
from natives import MODELS, WORDS, tokens_for
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from selfspec.basics.errors import SelfspecError
from selfspec.builtin import model_folder
from selfspec.models import layout
from selfspec.models.half_storage import (
    HALVES,
    HalfLinear,
    HalfProduct,
    half_of,
    halved,
    held_dtypes,
    hold_,
    nativise_model_,
)
from selfspec.models.layout import apply_layout_, weight_bytes
from selfspec.models.linears import linear_over
from selfspec.models.loading import load_model
from selfspec.models.low_precision import fake
from selfspec.models.native import NativeLinear, NativeProduct, nativise_
from selfspec.models.native_library import library
from selfspec.models.stored_linear import StoredEmbedding
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.draft_path import FULL, DraftPath, SkipSet

each_half = pytest.mark.parametrize("dtype", HALVES)
SIZES = [(1, 1), (3, 17), (33, 300), (48, 64), (70, 83), (16, 32)]
NAMES = ["llama", "llama-mqa-tied", "llama-biases", "qwen2", "gemma3"]


def exact_in(dtype, out, into, seed=0):
    return torch.randn(out, into, generator=torch.Generator().manual_seed(seed)).to(dtype).float()


def model_in(dtype, name="llama"):
    """A float32 model whose weights are exact in another dtype."""
    return tiny(MODELS[name], dtype=torch.float32).to(dtype).float()


def natively(model):
    """The same with float32 weights."""
    model = copy.deepcopy(model)
    parts = layout.parts_of(model)
    for group in (*parts.groups(), parts.head):
        nativise_(group)
    return model


def held(dtype, name="llama"):
    model = model_in(dtype, name)
    assert apply_layout_(model, "native") == "native"
    return model


@needs_native
@each_half
@pytest.mark.parametrize(("out", "into"), SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_products_have_the_bits_of_float32_weights(dtype, out, into, biased):
    weight, bias = exact_in(dtype, out, into), torch.randn(out) if biased else None
    assert half_of([weight]) == dtype
    ours, theirs = HalfProduct(halved([weight], dtype), bias), NativeProduct(weight, bias)
    for rows in range(1, 18):
        x = torch.randn(rows, into)
        assert torch.equal(ours.batch_invariant(x), theirs.batch_invariant(x))
    for rows in (17, 40, 530):
        x = torch.randn(rows, into)
        assert torch.equal(ours.batch_invariant(x), theirs.batch_invariant(x))
        if library().selfspec_vector() >= 16:  # elsewhere torch multiplies, in another order
            assert torch.equal(ours(x), theirs(x))
        exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
        torch.testing.assert_close(ours(x).double(), exact, atol=1e-4, rtol=1e-5)


@needs_native
@each_half
def test_where_no_kernel_takes_many_rows_weights_are_converted_a_block_at_a_time(dtype, monkeypatch):
    monkeypatch.setattr("selfspec.models.half_storage._ELEMENTS", 32 * 40)  # 32 outputs
    weight, bias, x = exact_in(dtype, 70, 40), torch.randn(70), torch.randn(50, 40)
    product = HalfProduct(halved([weight], dtype), bias)
    blocks = []
    monkeypatch.setattr(HalfProduct, "_many_in_float32", lambda self, rows: None)
    monkeypatch.setattr(
        "selfspec.models.half_storage.NativeProduct",
        lambda block: blocks.append(len(block)) or (lambda rows: F.linear(rows, block)),
    )
    torch.testing.assert_close(product(x), F.linear(x, weight, bias), atol=1e-5, rtol=1e-5)
    assert blocks == [32, 32, 6]


@needs_native
@each_half
def test_rows_are_not_rounded_to_16_bits(dtype):
    weight = exact_in(dtype, 16, 64)
    product = HalfProduct(halved([weight], dtype))
    for rows in (1, 5, 40):
        x = torch.randn(rows, 64)
        assert not torch.equal(x, x.to(dtype).float())
        torch.testing.assert_close(product(x), F.linear(x, weight), atol=2e-5, rtol=0)


@needs_native
@each_half
def test_write_and_add_and_a_later_bias(dtype):
    weight, x, bias = exact_in(dtype, 24, 48), torch.randn(3, 48), torch.randn(24)
    ours, theirs = HalfProduct(halved([weight], dtype)), NativeProduct(weight)
    mine, other = torch.ones(3, 24), torch.ones(3, 24)
    ours.add(mine, x)
    theirs.add(other, x)
    assert torch.equal(mine, other)
    ours.write(x, mine)
    assert torch.equal(mine, theirs(x))
    assert torch.equal(ours.with_bias(bias)(x), theirs.with_bias(bias)(x))
    assert torch.equal(pickle.loads(pickle.dumps(ours.with_bias(bias)))(x), theirs.with_bias(bias)(x))


def bits_of(x):
    return x.contiguous().view(torch.int32)


def test_only_what_16_bits_hold_exactly_is_held():
    weight = exact_in(torch.bfloat16, 40, 30)
    special = torch.tensor([[0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 3.38e38]])
    special = (bits_of(special) & ~0xFFFF).view(torch.float32)
    special[0, 4] = torch.tensor(0x7FA10000, dtype=torch.int32).view(torch.float32)  # a nan that rounding changes
    assert half_of([weight, special]) == torch.bfloat16
    assert torch.equal(bits_of(halved([special], torch.bfloat16).weight()), bits_of(special))
    smallest = torch.tensor([[2.0**-24, -0.0, 65504.0, 1 + 2.0**-10, -(2.0**-20) * 3]])
    assert half_of([smallest]) == torch.float16
    assert torch.equal(bits_of(halved([smallest], torch.float16).weight()), bits_of(smallest))
    assert half_of([weight * 2.0**-40, exact_in(torch.float16, 40, 30)]) is None
    assert half_of([torch.tensor([[1 + 2.0**-10, float("inf")]])]) is None
    assert half_of([torch.tensor([[1 + 2.0**-20]])]) is None
    assert half_of([weight.bfloat16()]) is None
    assert half_of([weight.double()]) is None


@needs_native
@pytest.mark.parametrize("last", [0.0, 1 + 2.0**-20])
def test_every_weight_is_looked_at(monkeypatch, last):
    monkeypatch.setattr("selfspec.models.half_storage._ELEMENTS", 60)
    weight = exact_in(torch.bfloat16, 41, 30)
    weight[-1, -1] = last
    assert half_of([weight]) == (None if last else torch.bfloat16)
    assert torch.equal(halved([weight], torch.bfloat16).weight(), weight) == (not last)


@needs_native
@each_half
@pytest.mark.parametrize("name", NAMES)
def test_a_held_model_has_the_bits_of_the_float32_model(dtype, name):
    model = model_in(dtype, name)
    whole = natively(model)
    rows = copy.deepcopy(model)
    apply_layout_(model, "native")
    assert held_dtypes(model) == str(dtype).removeprefix("torch.")
    assert held_dtypes(whole) is None
    ours, theirs, plain = LeanRuntime(model), LeanRuntime(whole), LeanRuntime(rows)
    assert ours.compile(FULL).native is not None
    assert ours.dtype == torch.float32
    assert ours.skeleton.identity.fingerprint == theirs.skeleton.identity.fingerprint is not None
    for n in (1, 3, 40, 90):
        ids = tokens_for(n, n)
        with ours.session(n), theirs.session(n), plain.session(n):
            mine, other, reference = (runtime.forward(ids, 0).logits for runtime in (ours, theirs, plain))
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, reference, atol=1e-3, rtol=1e-4)


@needs_native
@each_half
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_in_16_bits_is_held_without_a_float32_copy(dtype, name, tmp_path):
    """It is the model that is held after loading in float32."""
    model_in(dtype, name).to(dtype).save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    apply_layout_(expected, "native")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert hold_(model)
    assert {type(module) for module in model.modules()} == {type(module) for module in expected.modules()}
    assert held_dtypes(model) == str(dtype).removeprefix("torch.")
    assert weight_bytes(model) == weight_bytes(expected)
    assert model.config.dtype == model.dtype == torch.float32
    theirs, ours = expected.state_dict(), model.state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], value) and ours[key].dtype == value.dtype for key, value in theirs.items())
    ids, runtimes = tokens_for(0, 30), (LeanRuntime(model), LeanRuntime(expected))
    with runtimes[0].session(30), runtimes[1].session(30):
        assert torch.equal(*(runtime.forward(ids, 0).logits for runtime in runtimes))
    assert torch.equal(model(ids).logits, expected(ids).logits)


def _float32(model):
    model.float()


def _two_dtypes(model):
    model.model.layers[0].mlp.up_proj.half()


def _rounded_buffer(model):
    model.register_buffer("scale", torch.ones(1, dtype=torch.bfloat16))


def _scaled_embedding(model):
    model.set_input_embeddings(Scaled(*model.get_input_embeddings().weight.shape, dtype=torch.bfloat16))


@needs_native
def test_weights_of_experts_are_not_held_and_that_is_said(tmp_path):
    tiny(FAMILY_CONFIGS["mixtral"]).bfloat16().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert hold_(model)
    assert held_dtypes(model) == "bfloat16 and float32"


@pytest.mark.parametrize("change", [_float32, _two_dtypes, _rounded_buffer, _scaled_embedding])
def test_what_cannot_be_held_is_not_changed(change, tmp_path):
    model_in(torch.bfloat16).bfloat16().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    change(model)
    before = {name: (id(value), value.dtype) for name, value in model.named_parameters()}
    assert not hold_(model)
    assert {name: (id(value), value.dtype) for name, value in model.named_parameters()} == before


@needs_native
def test_memory_is_halved_and_a_tied_embedding_is_shared():
    for name in ("llama", "llama-mqa-tied", "gemma3"):
        model = model_in(torch.bfloat16, name)
        norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
        before = weight_bytes(model)
        apply_layout_(model, "native")
        assert weight_bytes(model) == (before - 4 * norms) // 2 + 4 * norms
        assert all(p.ndim == 1 for p in model.parameters())
        assert isinstance(model.get_input_embeddings(), StoredEmbedding)


@needs_native
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_other_layouts_hold_what_was_loaded(layout):
    model = model_in(torch.bfloat16)
    before = weight_bytes(model)
    apply_layout_(model, layout)
    assert held_dtypes(model) is None
    assert weight_bytes(model) == before


@needs_native
def test_groups_that_16_bits_do_not_hold_stay_float32():
    model = model_in(torch.bfloat16)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = 1 + 2.0**-20
    whole = natively(model)
    apply_layout_(model, "native")
    assert isinstance(model.model.layers[1].mlp.up_proj, NativeLinear)
    assert isinstance(model.model.layers[1].mlp.down_proj, HalfLinear)
    assert held_dtypes(model) == "bfloat16 and float32"
    ids = tokens_for(0, 5)
    ours, theirs = LeanRuntime(model), LeanRuntime(whole)
    with ours.session(5), theirs.session(5):
        assert torch.equal(ours.forward(ids, 0).logits, theirs.forward(ids, 0).logits)


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 2


@needs_native
def test_a_head_tied_to_an_embedding_of_another_class_stays_float32():
    model = model_in(torch.bfloat16, "llama-mqa-tied")
    other = Scaled(*model.get_input_embeddings().weight.shape)
    other.weight = model.get_input_embeddings().weight
    model.set_input_embeddings(other)
    before = model(tokens_for(0, 5)).logits
    nativise_model_(model, layout.parts_of(model))
    assert isinstance(model.lm_head, NativeLinear)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    torch.testing.assert_close(model(tokens_for(0, 5)).logits, before, atol=1e-3, rtol=1e-4)


@needs_native
@each_half
@pytest.mark.parametrize("name", NAMES)
def test_it_is_called_copied_and_saved_as_before(dtype, name, tmp_path):
    model, before = held(dtype, name), model_in(dtype, name)
    ids = tokens_for(0, 7)
    with torch.no_grad():
        expected = before(ids).logits
        for each in (model, copy.deepcopy(model)):
            torch.testing.assert_close(each(ids).logits, expected, atol=1e-3, rtol=1e-4)
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **greedy), before.generate(ids, **greedy))
    assert model.dtype == torch.float32
    theirs = before.state_dict()
    ours = model.state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    for each, folder in ((model, "ours"), (before, "theirs")):
        each.save_pretrained(tmp_path / folder)
    sizes = [(tmp_path / folder / "model.safetensors").stat().st_size for folder in ("ours", "theirs")]
    assert abs(sizes[0] - sizes[1]) < 1000  # a tied head is not written twice
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).state_dict()
    assert all(torch.equal(again[key], value) for key, value in theirs.items())


@needs_native
@each_half
def test_gradients_pass_through_to_inputs(dtype):
    model, before = held(dtype), model_in(dtype)
    module, linear = model.model.layers[0].mlp.down_proj, before.model.layers[0].mlp.down_proj
    grads = []
    for each in (module, linear):
        x = torch.ones(2, 3, each.in_features, requires_grad=True)
        each(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
    x = torch.randn(2, 3, module.in_features)
    assert module(x).shape == (2, 3, module.out_features)
    assert module(x[:0]).shape == (0, 3, module.out_features)


@needs_native
@pytest.mark.parametrize("move", [lambda m: m.bfloat16(), lambda m: m.to("meta"), lambda m: m.double()])
def test_moving_or_casting_says_one_clear_line(move):
    model = held(torch.bfloat16)
    with pytest.raises(SelfspecError, match=r"^weights held in 16 bits stay .* layout 'rows'"):
        move(model)
    assert model.float().cpu().to(torch.float32) is model


@needs_native
@each_half
def test_drafts_read_the_float32_values(dtype):
    """Quantised copies and heads over a part of the vocabulary."""
    every = SkipSet(frozenset(range(3)), frozenset(range(3)))
    paths = DraftPath(vocabulary=tuple(range(0, WORDS, 3))), DraftPath(int8=every, head="int8"), DraftPath(int4=every)
    model = model_in(dtype, "llama-mqa-tied")
    whole, ids = natively(model), tokens_for(1, 9)
    apply_layout_(model, "native")
    ours, theirs = LeanRuntime(model, kernel=fake), LeanRuntime(whole, kernel=fake)
    for path in paths:
        with ours.session(9), theirs.session(9):
            mine, other = (runtime.forward(ids, 0, path=runtime.compile(path)).logits for runtime in (ours, theirs))
        assert torch.equal(mine, other)
    outputs = [1, 4, 5]
    assert torch.equal(
        linear_over(model.lm_head, outputs)(torch.ones(2, model.lm_head.in_features)),
        linear_over(whole.lm_head, outputs)(torch.ones(2, model.lm_head.in_features)),
    )


@needs_native
def test_times_of_layouts_are_kept_for_each_dtype_that_weights_are_held_in():
    models = [model_in(dtype) for dtype in (torch.float32, *HALVES)]
    assert len({layout._path(layout.parts_of(model)) for model in models}) == 3


@needs_native
def test_a_bfloat16_model_stays_one():
    model = tiny(MODELS["llama"], dtype=torch.bfloat16)
    apply_layout_(model, "native")
    assert held_dtypes(model) is None
    assert model.lm_head.weight.dtype == model.get_input_embeddings().weight.dtype == torch.bfloat16


@needs_native
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "index"])
@pytest.mark.parametrize("named", ["bfloat16", "float16"])
def test_weights_are_not_rounded_to_the_dtype_that_the_configuration_names(tmp_path, named, beside):
    """A merge may leave float32 weights beside the configuration of a model in 16 bits."""
    config = copy.deepcopy(FAMILY_CONFIGS["llama"])
    config.update({"vocab_size": 4096})
    model = tiny(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folder()).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "dtype": named, "torch_dtype": named}))
    if beside:  # which `from_pretrained` leaves alone
        shard = "model-00001-of-00001.safetensors"
        save_file({"w": torch.ones(1, dtype=getattr(torch, named))}, str(tmp_path / shard))
        index = {"metadata": {}, "weight_map": {"w": shard}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded, _ = load_model(str(tmp_path), device="cpu", dtype="float32", hold=True)
    expected = dict(model.named_parameters())
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.named_parameters())
    assert not held_dtypes(loaded)
