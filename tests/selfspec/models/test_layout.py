"""How a loaded model's weights lie: every layout is the same model, and which one is taken is what was measured."""

from __future__ import annotations

import copy
import json
from collections import Counter

import pytest
import torch
from layouts import AVAILABLE, fastest, needs_bfloat16, needs_native, needs_onednn
from models import CONFIGS, plain, tiny

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.models import layout
from selfspec.models.layout import apply_layout_, choose, measure_layouts, weight_bytes
from selfspec.models.native import IN_A_PASS
from selfspec.models.stored_linear import PackedLinear
from selfspec.runtime.forward import LeanRuntime

IDS = torch.tensor([[3, 1, 4, 1, 5]])
NAMES = ["llama", "llama-mqa-tied", "llama-biases", "qwen2"]


def single(name):
    return tiny(CONFIGS[name], dtype=torch.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("to", AVAILABLE)
def test_a_layout_changes_nothing_that_the_model_says(name, to):
    model, other = single(name), single(name)
    assert apply_layout_(model, to, drafting=True) == to
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, other(IDS).logits, atol=1e-3, rtol=1e-4)
    assert plain(LeanRuntime(model), [3, 1, 4], 12) == plain(LeanRuntime(other), [3, 1, 4], 12)
    state = model.state_dict()
    assert list(state) == list(other.state_dict())
    assert all(torch.equal(weight, state[name]) for name, weight in other.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("to", AVAILABLE)
def test_only_a_head_that_is_the_embedding_too_is_there_twice(name, to):
    model = single(name)
    before = weight_bytes(model)
    apply_layout_(model, to, drafting=True)
    head = model.model.embed_tokens.weight
    twice = to == "onednn" and model.config.tie_word_embeddings
    assert weight_bytes(model) == before + (head.numel() * 4 if twice else 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("to", AVAILABLE)
def test_a_model_can_be_saved_and_copied_in_any_layout(name, to, tmp_path):
    model, other = single(name), single(name)
    apply_layout_(model, to, drafting=True)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in other.state_dict().items())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(twin(IDS).logits, model(IDS).logits)


@needs_onednn
def test_in_any_layout_a_model_may_be_called_under_autocast(each_layout):
    """As trainers do, on processors that compute in bfloat16; attention then gives that to what comes after."""
    llm = selfspec.load("builtin", profile="none", layout=each_layout)
    ids = torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        exact = llm.model(ids, use_cache=False).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            about = llm.model(ids, use_cache=False).logits
    assert (about.float() - exact).abs().max() < 0.05 * exact.abs().max()


def test_packed_weights_of_one_input_are_one_product():
    model = single("llama-biases")
    apply_layout_(model, "onednn", drafting=True)
    attention = model.model.layers[0].self_attn
    assert isinstance(attention.q_proj, PackedLinear)
    assert attention.q_proj.packed is attention.k_proj.packed is attention.v_proj.packed
    assert attention.o_proj.packed is not attention.q_proj.packed


@needs_onednn
def test_packed_weights_are_not_cast():
    model = single("llama")
    apply_layout_(model, "onednn", drafting=True)
    with pytest.raises(SelfspecError, match="float32 on the CPU"):
        model.double()
    model.float()
    with torch.no_grad():
        model(IDS)


def test_what_cannot_be_packed_is_said():
    with pytest.raises(SelfspecError, match="float32"):
        apply_layout_(tiny(CONFIGS["llama"]), "onednn", drafting=True)
    packed = single("llama")
    apply_layout_(packed, "onednn", drafting=True)
    with pytest.raises(SelfspecError, match="layout 'columns' is for plain weights, and this model has none"):
        apply_layout_(packed, "columns")
    with pytest.raises(SelfspecError, match="known: auto, rows, columns, onednn, native"):
        selfspec.load("builtin", layout="best")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_what_cannot_be_packed_keeps_its_rows(each_layout, dtype):
    assert apply_layout_(tiny(CONFIGS["llama"], dtype=dtype), drafting=True) == "rows"


@needs_bfloat16
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_can_be_packed_too(name, each_layout, tmp_path):
    model, other = (tiny(CONFIGS[name], dtype=torch.bfloat16) for _ in range(2))
    assert apply_layout_(model, drafting=True) == each_layout
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, other(IDS).logits, atol=0.3, rtol=0.05)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in other.state_dict().items())
    if each_layout == "onednn":
        with pytest.raises(SelfspecError, match="bfloat16 on the CPU"):
            model.float()


@needs_bfloat16
def test_layouts_of_bfloat16_are_measured_apart(monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    seen = []
    monkeypatch.setattr(layout, "measure_layouts", lambda model: seen.append(model.dtype) or fastest("columns"))
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
        apply_layout_(tiny(CONFIGS["llama"], dtype=dtype))
    assert seen == [torch.float32, torch.bfloat16]


def test_by_columns_a_head_that_is_the_embedding_too_is_read_by_columns():
    """Which is as fast as the other products; the embedding reads a row of it a token."""
    model = single("llama-mqa-tied")
    apply_layout_(model, "columns")
    head = model.lm_head.weight
    assert head is model.model.embed_tokens.weight
    assert head.t().is_contiguous()
    state = model.state_dict()
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    assert state["lm_head.weight"].is_contiguous()


def times(**by_layout):
    return {name: dict(zip(layout.WIDTHS, row, strict=True)) for name, row in by_layout.items()}


def test_what_is_chosen():
    measured = times(
        rows=(50, 52, 90, 95, 130, 300), columns=(46, 75, 88, 90, 127, 300), onednn=(47, 55, 54, 54, 66, 300)
    )
    assert choose(measured, drafting=False) == "columns"
    assert choose(measured, drafting=True) == "onednn"
    dear = {**measured, "onednn": {**measured["onednn"], 1: 50}}  # to read one row, when drafts are wrong
    assert choose(dear, drafting=True) == "columns"
    assert choose(dear, drafting=True, quantized_drafts=True) == "onednn", "which are hardly ever wrong"
    slow = {"rows": measured["rows"], "columns": {**measured["columns"], 128: 500}}  # to read a prompt
    assert choose(slow, drafting=False) == "rows"
    near = times(rows=(50, 52, 90, 95, 130, 1), columns=(49, 52, 90, 94, 129, 1))
    assert choose(near, drafting=False) == "rows"  # not clearly
    flat = times(
        rows=(50, 51, 52, 104, 150, 300), columns=(49, 98, 98, 101, 107, 300), onednn=(51, 56, 56, 56, 75, 300)
    )
    assert choose(flat, drafting=True) == "rows"  # three rows suffice where they cost what one does
    assert choose(times(rows=(1, 1, 1, 1, 1, 1)), drafting=True) == "rows"
    assert choose({}, drafting=True) == "rows"


def test_the_layout_that_was_measured_is_taken(each_layout):
    assert apply_layout_(single("llama"), drafting=True) == each_layout
    assert apply_layout_(single("llama"), drafting=False) == each_layout


@pytest.mark.parametrize(("plain", "drafting"), [("rows", "onednn"), ("columns", "onednn"), ("onednn", "columns")])
def test_times_told_to_the_tests_are_chosen_by(plain, drafting):
    told = fastest(plain, drafting)
    assert (choose(told, drafting=False), choose(told, drafting=True)) == (plain, drafting)


def test_each_width_of_each_layout_is_timed_and_the_least_counts(monkeypatch):
    """Timings told: each layout is slower the first time, and the same ever after."""
    seconds = {"rows": 3.0, "columns": 2.0, "onednn": 1.0, "native": 0.5}
    seen = Counter()

    def timed(name, width):
        seen[name, width] += 1
        return seconds[name] * width * (5.0 if seen[name, width] == 1 else 1.0)

    monkeypatch.setattr(layout, "_products", lambda layers, name: name)
    monkeypatch.setattr(layout, "_right", lambda first, rows: not "columns".startswith(first))
    monkeypatch.setattr(layout, "_timed", timed)
    found = measure_layouts(single("llama"))
    assert found.pop("native") == {width: 0.5 * width * (IN_A_PASS if width <= 8 else 1) for width in layout.WIDTHS}
    assert found == {name: {width: seconds[name] * width for width in layout.WIDTHS} for name in ("rows", "onednn")}
    assert set(seen) == {(name, width) for name in (*found, "native") for width in layout.WIDTHS}


@needs_onednn
def test_layouts_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    seen = []
    monkeypatch.setattr(layout, "measure_layouts", lambda model: seen.append(1) or fastest("columns"))
    assert [apply_layout_(single("llama"), drafting=True) for _ in range(2)] == ["columns", "columns"]
    assert len(seen) == 1
    (kept,) = (tmp_path / "layouts").iterdir()
    assert set(json.loads(kept.read_text())) == set(AVAILABLE)
    for broken in ("", "{}", "[1]", '{"rows": {"1": "a"}}', '{"rows": {"1": 1, "2": 1, "4": 1, "8": 1, "128": -1}}'):
        kept.write_text(broken)
        assert apply_layout_(single("llama"), drafting=True) == "columns"
    assert len(seen) == 6


@pytest.mark.parametrize("width", [1, 3])
def test_times_that_something_else_disturbed_are_not_remembered(tmp_path, monkeypatch, width):
    """As one product over three rows cannot take ten times what three over one do, nor one row more than three."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    told, seen = fastest("columns"), []
    told["rows"][width] *= 30
    monkeypatch.setattr(layout, "measure_layouts", lambda model: seen.append(1) or told)
    assert [apply_layout_(single("llama"), drafting=True) for _ in range(2)] == ["columns", "columns"]
    assert len(seen) == 2


@needs_onednn
def test_a_layout_whose_products_are_wrong_is_left_out(monkeypatch):
    real = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda weight, rows: real(weight * 1.001, rows))
    assert set(measure_layouts(single("llama"))) == {*AVAILABLE} - {"onednn"}


@needs_onednn
def test_a_layout_that_is_not_to_be_had_is_left_out(monkeypatch):
    def refuse(weight, rows):
        raise RuntimeError("not built with it")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse, raising=False)
    assert set(measure_layouts(single("llama"))) == {*AVAILABLE} - {"onednn"}


@needs_native
def test_native_is_taken_without_timing(monkeypatch):
    monkeypatch.setattr(layout, "_UNTIMED", True)
    monkeypatch.setattr(layout, "measure_layouts", None)
    assert apply_layout_(single("llama"), drafting=True) == "native"
    assert apply_layout_(tiny(CONFIGS["llama"], dtype=torch.float64)) == "rows"
