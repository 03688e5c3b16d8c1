"""What drafts for a model that no profile was made for."""

from __future__ import annotations

import copy

import pytest
import torch
from layouts import needs_native
from models import CONFIGS, SIZES, tiny
from selfspec.search.space_filter import supported_choices
from transformers import AutoTokenizer, Gemma3TextConfig, GemmaConfig

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.builtin import model_folder
from selfspec.drafters import PlainDrafter
from selfspec.llm import default_profile as module
from selfspec.llm.default_profile import DRAFTED, DRAFTED_ON_GPU, default_profile, resolve_profile
from selfspec.measure.model_copies import load_model_copies
from selfspec.models.layout import weight_bytes
from selfspec.models.loading import load_model
from selfspec.runtime import open_runtime
from selfspec.runtime.hf_runtime import GenericRuntime
from selfspec.types.identity import Identity


@pytest.fixture
def folder(tmp_path):
    """A random model with the built-in model's tokenizer."""
    config = copy.deepcopy(CONFIGS["llama"])
    config.update({"vocab_size": 4096})
    tiny(config, dtype=torch.float32).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folder()).save_pretrained(tmp_path)
    return str(tmp_path)


@needs_native
def test_it_drafts_with_all_of_the_model_in_int8_and_text_is_as_without(folder):
    llm = selfspec.load(folder, dtype="float32")
    assert llm.has_default_profile
    every = list(range(llm.runtime.layers))
    path = llm.profile.path
    assert (list(path.int8.attention), list(path.int8.mlp), path.head) == (every, every, "int8")
    assert llm.known_profile is None, "what needs a profile that was made for the model does not take it"
    plain = selfspec.load(folder, dtype="float32", profile="none")
    assert plain.profile is None
    for options in ({"max_new_tokens": 40}, {"max_new_tokens": 40, "temperature": 0.9, "seed": 3}):
        generated = llm.generate("def main(", **options)
        assert generated.tokens == plain.generate("def main(", **options).tokens
    assert max(done.drafted for done in generated.stats.log) <= DRAFTED + 1


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bits_drafts_in_int4_where_its_weights_fit_groups(dtype):
    layers = WIDE.num_hidden_layers
    for config, mode in ((WIDE, "int4"), (CONFIGS["llama-head-dim"], "int8")):
        model = tiny(config, dtype=dtype)
        profile = default_profile(model, Identity(layers=layers))
        assert set(profile.path.modes(layers)) == {mode}
        assert profile.path.head == "int8"
        assert list(profile.costs.low) == [mode]
        low, plain = profile.costs.draft(profile.path, layers), profile.costs.verify[0]
        assert low == pytest.approx(plain / 4 if mode == "int4" else plain / 2, rel=0.35)
    half = default_profile(tiny(WIDE, dtype=torch.bfloat16), Identity(layers=layers), extra_memory=0.4)
    assert half.draft.kind == "layer-skip", "int8 weights would take more"


@needs_native
def test_a_wrapped_model_drafts_in_the_same_way(folder):
    model, tokenizer = load_model(folder, dtype="float64")
    llm, plain = selfspec.wrap(model, tokenizer), selfspec.wrap(model, tokenizer, profile="none")
    assert llm.has_default_profile
    assert llm.known_profile is None
    assert llm.profile.draft == selfspec.load(folder, dtype="float64").profile.draft
    generated = llm.generate("def main(", max_new_tokens=40)
    assert generated.tokens == plain.generate("def main(", max_new_tokens=40).tokens
    assert generated.stats.drafted > 0
    assert plain.profile is None
    little = selfspec.wrap(model, tokenizer, extra_memory=0)
    assert (little.profile.draft.kind, little.runtime.max_copy_bytes) == ("lookup", 0)


@needs_native
def test_layers_with_a_sliding_window_cost_no_more_as_a_text_grows():
    def per_key(windowed: int) -> float:
        kinds = ["sliding_attention"] * windowed + ["full_attention"] * (SIZES["num_hidden_layers"] - windowed)
        model = tiny(Gemma3TextConfig(**SIZES, head_dim=8, layer_types=kinds, sliding_window=16))
        costs = default_profile(model, Identity(layers=len(kinds))).costs
        assert costs.low_per_key < costs.attention_per_key or windowed == len(kinds)
        return costs.attention_per_key

    layers = SIZES["num_hidden_layers"]
    assert per_key(0) > 0 == per_key(layers)
    assert per_key(1) == pytest.approx(per_key(0) * (layers - 1) / layers)


@needs_native
def test_copies_of_keys_and_values_have_what_the_weights_leave_of_the_memory(folder):
    plain = selfspec.load(folder, dtype="float32")
    assert plain.runtime.max_copy_bytes == float("inf")
    weights, of_drafts = weight_bytes(plain.model), plain.runtime.extra_bytes(plain.profile.path)
    llm = selfspec.load(folder, dtype="float32", extra_memory=(of_drafts + 1000) / weights)
    assert llm.profile.path.low_precision
    assert llm.runtime.max_copy_bytes == pytest.approx(1000)
    assert llm.generate("def main(", max_new_tokens=40).tokens == plain.generate("def main(", max_new_tokens=40).tokens
    assert selfspec.load(folder, dtype="float32", extra_memory=0).runtime.max_copy_bytes == 0


@needs_native
def test_a_model_that_runs_by_its_own_forward_drafts_too(tmp_path):
    tiny(GemmaConfig(**SIZES | {"vocab_size": 4096}, head_dim=8), dtype=torch.float32).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folder()).save_pretrained(tmp_path)
    llm = selfspec.load(str(tmp_path), dtype="float32")
    assert isinstance(llm.runtime, GenericRuntime)
    assert llm.has_default_profile
    assert llm.profile.path.head == "int8"
    assert llm.runtime.compile(llm.profile.path).unquantized == ()
    assert llm.runtime.extra_bytes(llm.profile.path) == module._draft_bytes(llm.model, 8)
    generated = llm.generate("def main(", max_new_tokens=40)
    assert generated.tokens == llm.generate("def main(", max_new_tokens=40, drafter=PlainDrafter()).tokens
    assert generated.stats.drafted > 0
    assert default_profile(llm.model, llm.identity, extra_memory=0).draft.kind == "lookup"
    assert supported_choices(llm, ("skip", "int8", "int4"), memory=1.0).modes == ["skip", "int8", "int4"]


def test_without_memory_for_draft_weights_tokens_are_looked_up(folder, monkeypatch):
    llm = selfspec.load(folder, dtype="float32", extra_memory=0)
    assert llm.has_default_profile
    assert llm.profile.draft.kind == "lookup"
    monkeypatch.setattr(module, "available_memory", lambda: 0.0)
    assert selfspec.load(folder, dtype="float32").profile.draft.kind == "lookup"


@needs_native
def test_the_share_is_of_the_models_bytes(folder):
    llm = selfspec.load(folder, dtype="float32", profile="none")
    needed = module._draft_bytes(llm.model, 8)
    share = needed / weight_bytes(llm.model)
    for factor, kind in ((1.001, "layer-skip"), (0.999, "lookup")):
        assert default_profile(llm.model, llm.identity, extra_memory=factor * share).draft.kind == kind


WIDE = copy.deepcopy(CONFIGS["llama"])
WIDE.update({"hidden_size": 64, "intermediate_size": 96})  # widths that groups of int4 weights fit


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A model's device with Triton kernels and 16 MiB of free memory, as far as the default profile asks."""
    monkeypatch.setattr(module, "_has_triton", lambda model, device: True)
    monkeypatch.setattr(module, "free_bytes", lambda device: 2**24)


def test_a_gpu_drafts_a_few_tokens_in_int4(on_a_gpu):
    model = tiny(WIDE, dtype=torch.bfloat16)
    layers = model.config.num_hidden_layers
    draft = default_profile(model, Identity(layers=layers)).draft
    path, every = draft.path, list(range(layers))
    assert (list(path.int4.attention), list(path.int4.mlp), path.head) == (every, every, "int8")
    assert draft.controller.options == {"k": DRAFTED_ON_GPU}
    assert [each.kind for each in draft.proposers] == ["lookup"]
    runtime = open_runtime(model)
    assert runtime.extra_bytes(path) == module._draft_bytes(model, 4)


def test_a_gpu_without_memory_for_draft_weights_decodes_plainly(on_a_gpu, monkeypatch):
    model = tiny(WIDE, dtype=torch.bfloat16)
    identity = Identity(layers=model.config.num_hidden_layers)
    assert default_profile(model, identity, extra_memory=0) is None
    monkeypatch.setattr(module, "free_bytes", lambda device: 2 * module._draft_bytes(model, 4) - 2)
    assert default_profile(model, identity) is None


def test_a_device_without_triton_kernels_decodes_plainly(monkeypatch):
    model = tiny(CONFIGS["llama"])
    monkeypatch.setattr(module, "device_of", lambda head: torch.device("cuda", 0))
    assert default_profile(model, Identity(layers=model.config.num_hidden_layers)) is None
    monkeypatch.setattr(module, "triton_enabled", lambda device: True)
    assert not module._has_triton(model, torch.device("cuda", 0)), "its weights are elsewhere"


def test_no_triton_kernel_computes_in_float64(monkeypatch):
    monkeypatch.setattr(module, "triton_enabled", lambda device: True)
    elsewhere = torch.device("meta")
    for dtype, has in ((torch.bfloat16, True), (torch.float64, False)):
        assert module._has_triton(tiny(CONFIGS["llama"], dtype=dtype).to(elsewhere), elsewhere) == has


def test_weights_that_cannot_be_quantised_are_left_alone():
    model = tiny(CONFIGS["llama"], dtype=torch.float64)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    layers = model.config.num_hidden_layers
    assert default_profile(model, Identity(layers=layers)).draft.kind == "lookup"


@needs_native
def test_commands_that_measure_draft_with_the_same(folder):
    loaded = selfspec.load(folder, dtype="float32")
    copies = load_model_copies(folder, ["plain", "profile"], device="cpu", dtype="float32", profile="auto")
    assert copies.profile == loaded.profile
    assert copies.has_default_profile
    assert load_model_copies(folder, ["plain"], device="cpu", dtype="float32").profile is None


def test_without_a_processor_to_quantise_for_nothing_is_drafted(monkeypatch):
    monkeypatch.setattr(module, "default_profile", lambda *_, **__: None)
    model = tiny(CONFIGS["llama"])
    assert resolve_profile("auto", model, Identity(layers=4)) == (None, False)


@pytest.mark.parametrize("share", [-0.1, float("nan"), float("inf")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(SelfspecError, match=r"^extra_memory .*: expected 0 or more and finite"):
        default_profile(tiny(CONFIGS["llama"]), Identity(layers=2), extra_memory=share)


@needs_native
@pytest.mark.parametrize("method", ["profile", "path"])
def test_methods_of_a_profile_are_those_of_the_default_one(folder, method):
    llm = selfspec.load(folder, dtype="float32", profile="none")
    identity = llm.runtime.skeleton.identity
    found, default = resolve_profile("auto", llm.model, identity, method=method)
    assert default
    assert found.path == default_profile(llm.model, identity).path
    assert (found.draft.proposers is None) == (method == "path")
    assert resolve_profile("auto", llm.model, identity, method="lookup")[0].draft.kind == "lookup"
