"""Quantising a model layer by layer: moments of every linear's inputs in every family, resumption, lossless drafts."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from families import FAMILY_CONFIGS
from models import CONFIGS, plain, run, tiny

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK
from selfspec.draft_modules import int4_quantization
from selfspec.draft_modules.int4_files import open_int4
from selfspec.draft_modules.int4_quantization import int4_settings, layers_folder, write_int4
from selfspec.drafters import LayerSkipDrafter
from selfspec.models.low_precision import fake
from selfspec.models.quantizers import InputMoments, quantize_int4
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.draft_path import DraftPath

TEXTS = [[5, 3, 8, 1, 30, 2, 2, 17, 40, 6, 9, 11, 33], [8, 1, 30], [7]]


def model_of(name="llama", **kwargs):
    """One whose inputs come by 32."""
    config = copy.deepcopy(CONFIGS[name])
    config.intermediate_size = 64
    return tiny(config, **kwargs)


def written(runtime, file, method="weighted", *, texts=TEXTS, group=64, **options):
    write_int4(runtime, file, texts, int4_settings(method, group, texts), **options)
    return open_int4(runtime, file)


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_moments_are_those_of_the_inputs_in_every_family(name, tmp_path, monkeypatch):
    """As hooks on the modules see them in transformers' own passes; experts are left out."""
    model = tiny(FAMILY_CONFIGS[name])
    groups = [
        (i, g) for i, layer in enumerate(LeanRuntime(model).skeleton.parts.layers) for g in range(len(layer.groups))
    ]
    linears = [group.modules[0] for layer in LeanRuntime(model).skeleton.parts.layers for group in layer.groups]
    expected = [InputMoments.zeros(linear.in_features, torch.device("cpu"), products=True) for linear in linears]
    handles = [
        linear.register_forward_pre_hook(lambda _, args, own=own: own.add(args[0].flatten(0, -2)))
        for linear, own in zip(linears, expected, strict=True)
    ]
    with torch.no_grad():
        for ids in TEXTS:
            model(torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    seen = []

    def watched(weight, method, moments, *, group):
        seen.append(moments)
        return quantize_int4(weight, method, moments, group=group)

    monkeypatch.setattr(int4_quantization, "quantize_int4", watched)
    file = written(LeanRuntime(model), tmp_path / "x.safetensors", "gptq")
    assert list(file.shapes) == groups
    assert len(seen) == len(expected)
    for mine, theirs in zip(seen, expected, strict=True):
        assert theirs.count == sum(map(len, TEXTS))
        torch.testing.assert_close(mine.products, theirs.mean().products, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.squares, mine.products.diagonal())


@pytest.mark.parametrize("method", ["nearest", "weighted", "gptq"])
@pytest.mark.parametrize("group", [64, 32])
def test_a_path_runs_with_the_weights_of_the_file(method, group, tmp_path):
    """As a model with these weights does; other sub-layers, and the head, are rounded as before."""
    model = model_of()
    runtime = LeanRuntime(model, kernel=fake)
    file = written(runtime, tmp_path / "x.safetensors", method, group=group)
    path = DraftPath.from_modes(["int4", "full", "skip", "int8", "int4", "int4", "full", "int4"], head="int8")
    named = replace(path, int4_weights="file")
    with pytest.raises(SelfspecError, match="its int4 weights file are not loaded"):
        runtime.compile(named)
    runtime.register_int4("file", file)
    other = copy.deepcopy(model)
    for index, part in ((0, "attention"), (0, "mlp"), (1, "mlp"), (3, "mlp")):
        layer = LeanRuntime(other).skeleton.parts.layers[index]
        for own in layer.groups_of(part):
            weight, start = file.get(index, layer.groups.index(own)).weight(torch.float64), 0
            for module in own.modules:
                module.weight.data = weight[start : start + module.out_features]
                start += module.out_features
    theirs, tokens = LeanRuntime(other, kernel=fake), torch.tensor([TEXTS[0]])
    full_int4 = replace(path, int4=DraftPath().int4)
    with runtime.session(16), theirs.session(16):
        mine = runtime.forward(tokens, 0, path=runtime.compile(named)).logits
        wanted = theirs.forward(tokens, 0, path=theirs.compile(full_int4)).logits
        nearest = runtime.forward(tokens, 0, path=runtime.compile(path)).logits
    torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-9)
    same = method == "nearest" and group == 64
    assert torch.equal(mine, nearest) == same
    compiled = runtime.compile(named)
    assert runtime.extra_bytes(named) == compiled.bytes
    more = compiled.bytes - runtime.compile(path).bytes
    halves = sum(out * into for (layer, _), (out, into, _) in file.shapes.items() if layer in (0, 1, 3))
    assert more == 0 if group == 64 else 0 < more < halves // 8


def test_paths_that_name_no_weights_use_those_of_the_context(tmp_path):
    runtime = LeanRuntime(model_of(), kernel=fake)
    runtime.register_int4("file", written(runtime, tmp_path / "x.safetensors"))
    path = DraftPath.from_modes(["int4"] * 8)
    other = DraftPath.from_modes(["int8"] * 8)
    outside, int8 = runtime.compile(path), runtime.compile(other)
    with runtime.using_int4("file"):
        inside = runtime.with_new_cache().compile(path)
        assert inside is runtime.compile(replace(path, int4_weights="file"))
        assert runtime.compile(other) is int8, "a path without int4 sub-layers is the same"
    assert inside is not outside
    assert runtime.compile(path) is outside


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_text_stays_the_models_own(dtype, tmp_path):
    model = model_of(dtype=dtype)
    runtime = LeanRuntime(model)
    runtime.register_int4("file", written(runtime, tmp_path / "x.safetensors", "gptq"))
    path = DraftPath.from_modes(["int4"] * 8, head="int8")
    drafter = LayerSkipDrafter(runtime, replace(path, int4_weights="file"), FixedK(3))
    for prompt in ([5, 3], [8, 1, 30]):
        assert run(runtime, drafter, prompt, 24)[0] == plain(LeanRuntime(model), prompt, 24)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("method", ["weighted", "gptq"])
def test_it_resumes_after_a_kill(method, tmp_path, monkeypatch):
    """Finished layers are not quantised again, and the weights are those of a call that was not killed."""
    runtime = LeanRuntime(model_of())
    whole, file = written(runtime, tmp_path / "whole.safetensors", method), tmp_path / "x.safetensors"

    def killed(done):
        if done == 2:
            raise Killed
        return True

    with pytest.raises(Killed):
        written(runtime, file, method, on_layer=killed)
    assert not file.exists()
    assert len(list(layers_folder(file).iterdir())) == 2
    (layers_folder(file) / "0001.safetensors").write_bytes(b"damaged")
    quantized, done = [], []
    monkeypatch.setattr(
        int4_quantization, "quantize_int4", lambda *args, **kw: quantized.append(1) or quantize_int4(*args, **kw)
    )
    resumed = written(runtime, file, method, on_layer=lambda n: done.append(n) or True)
    assert done == [2, 3, 4]
    assert len(quantized) == 3 * 4
    assert not layers_folder(file).exists()
    for layer, group in whole.shapes:
        mine, theirs = resumed.get(layer, group), whole.get(layer, group)
        assert all(torch.equal(getattr(mine, name), getattr(theirs, name)) for name in ("values", "scale", "zero"))


def test_layers_of_other_settings_are_made_again(tmp_path):
    runtime, file = LeanRuntime(model_of()), tmp_path / "x.safetensors"
    assert not write_int4(runtime, file, TEXTS, int4_settings("weighted", 64, TEXTS), on_layer=lambda done: done < 3)
    counts = []
    written(runtime, file, "gptq", on_layer=lambda done: counts.append(done) or True)
    assert counts == [1, 2, 3, 4]


def test_what_cannot_be_quantised(tmp_path):
    runtime = LeanRuntime(tiny(CONFIGS["llama"]))
    with pytest.raises(SelfspecError, match="method 'weighted': expected at least one text"):
        written(runtime, tmp_path / "x.safetensors", texts=[[]])
    file = written(runtime, tmp_path / "x.safetensors")
    assert {group for _, group in file.shapes} == {0, 1}, "48 inputs of an MLP are no multiple of 32"
    config = copy.deepcopy(CONFIGS["llama"])
    config.hidden_size = config.intermediate_size = 16
    with pytest.raises(SelfspecError, match="no weights that can be quantised to int4"):
        written(LeanRuntime(tiny(config)), tmp_path / "y.safetensors")
