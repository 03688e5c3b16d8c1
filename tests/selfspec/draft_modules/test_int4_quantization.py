"""Quantising a model layer by layer: moments of every linear's inputs in every family, resumption, lossless drafts."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from families import FAMILY_CONFIGS
from hypothesis import given
from hypothesis import strategies as st
from model_types import tiny_model
from models import CONFIGS, plain, run, tiny
from transformers.pytorch_utils import Conv1D

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK
from selfspec.draft_modules import int4_quantization
from selfspec.draft_modules.int4_quantization import (
    int4_part,
    int4_settings,
    int4_tensors,
    layers_folder,
    open_int4,
    pack,
    unpack,
    write_int4,
)
from selfspec.draft_modules.module_files import PartFile, read_part, write_part
from selfspec.drafters import LayerSkipDrafter, make_drafter
from selfspec.models.low_precision import fake
from selfspec.models.quantized_sublayers import Trained, Update
from selfspec.models.quantizers import InputMoments, quantize_int4
from selfspec.models.structure import find_structure
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.module_files_spec import ModuleFile, sha256_of
from selfspec.profile.reading import read_profile, write_profile
from selfspec.profile.schema import bring_path
from selfspec.runtime import hf_runtime
from selfspec.runtime.forward import LeanRuntime
from selfspec.runtime.hf_runtime import GenericRuntime
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath, SkipSet

TEXTS = [[5, 3, 8, 1, 30, 2, 2, 17, 40, 6, 9, 11, 33], [8, 1, 30], [7]]


both_runtimes = pytest.mark.parametrize("kind", [LeanRuntime, GenericRuntime])


def model_of(name="llama", **kwargs):
    """One whose inputs come by 32."""
    config = copy.deepcopy(CONFIGS[name])
    config.intermediate_size = 64
    return tiny(config, **kwargs)


def written(runtime, file, method="weighted", *, texts=TEXTS, group=64, **options):
    write_int4(runtime, file, texts, int4_settings(method, group, texts), **options)
    return open_int4(runtime, file)


def inputs_of(model, modules):
    """The inputs of each module, `[N, in]` a call, recorded by hooks while `transformers` runs the texts in turn."""
    seen = [[] for _ in modules]
    handles = [
        module.register_forward_pre_hook(lambda _, args, own=own: own.append(args[0].flatten(0, -2)))
        for module, own in zip(modules, seen, strict=True)
    ]
    with torch.no_grad():
        for ids in TEXTS:
            model(torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_moments_are_those_of_the_inputs_in_every_family(name, tmp_path, monkeypatch):
    """As hooks on the modules see them in transformers' own passes; experts are left out."""
    model = tiny(FAMILY_CONFIGS[name])
    groups = [
        (i, g) for i, layer in enumerate(LeanRuntime(model).skeleton.parts.layers) for g in range(len(layer.groups))
    ]
    linears = [group.modules[0] for layer in LeanRuntime(model).skeleton.parts.layers for group in layer.groups]
    expected = [InputMoments.zeros(linear.in_features, torch.device("cpu"), products=True) for linear in linears]
    for own, inputs in zip(expected, inputs_of(model, linears), strict=True):
        for x in inputs:
            own.add(x)
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


@both_runtimes
@pytest.mark.parametrize("method", ["nearest", "weighted", "gptq"])
@pytest.mark.parametrize("group", [64, 32])
def test_a_path_runs_with_the_weights_of_the_file(kind, method, group, tmp_path):
    """As a model with these weights does; other sub-layers, and the head, are rounded as before."""
    model = model_of()
    runtime = kind(model, kernel=fake)
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
    theirs, tokens = kind(other, kernel=fake), torch.tensor([TEXTS[0]])
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


@both_runtimes
def test_paths_that_name_no_weights_use_those_of_the_context(kind, tmp_path):
    runtime = kind(model_of(), kernel=fake)
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


@both_runtimes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_text_stays_the_models_own(kind, dtype, tmp_path):
    model = model_of(dtype=dtype)
    runtime = kind(model)
    runtime.register_int4("file", written(runtime, tmp_path / "x.safetensors", "gptq"))
    path = DraftPath.from_modes(["int4"] * 8, head="int8")
    drafter = LayerSkipDrafter(runtime, replace(path, int4_weights="file"), FixedK(3))
    for prompt in ([5, 3], [8, 1, 30]):
        assert run(runtime, drafter, prompt, 24)[0] == plain(kind(model), prompt, 24)


@both_runtimes
@pytest.mark.parametrize("method", ["weighted", "gptq"])
def test_a_file_of_one_runtime_is_right_for_the_other(kind, method, tmp_path):
    """They number the same groups, see the same inputs, and compute the same with the same file."""
    model = model_of()
    mine, other = kind(model, kernel=fake), ({LeanRuntime, GenericRuntime} - {kind}).pop()(model, kernel=fake)
    file = written(mine, tmp_path / "x.safetensors", method)
    each = [dict(runtime.input_moments(TEXTS, range(4), products=True)) for runtime in (mine, other)]
    assert list(each[0]) == list(each[1]) == [0, 1, 2, 3]
    for layer, groups in each[0].items():
        assert list(groups) == list(each[1][layer]) == [0, 1, 2, 3]
        for number, moments in groups.items():
            torch.testing.assert_close(moments.products, each[1][layer][number].products, rtol=1e-4, atol=1e-4)
    logits = []
    for runtime in (mine, other):
        runtime.register_int4("file", open_int4(runtime, tmp_path / "x.safetensors"))
        with runtime.session(16):
            path = runtime.compile(replace(PATH, int4_weights="file"))
            logits.append(runtime.forward(torch.tensor([TEXTS[0]]), 0, path=path).logits)
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)  # `transformers`' norms compute in float32
    assert file.shapes.keys() == open_int4(other, tmp_path / "x.safetensors").shapes.keys()


# Linears stored by columns; an MLP that is no module; linear attention; recurrent layers that several layers share;
# experts, which stay rounded to nearest.
OWN_FORWARD = ("gpt2", "opt", "qwen3_5_text", "zamba2", "qwen2_moe")
own_forward = pytest.mark.parametrize("model_type", OWN_FORWARD)


@own_forward
def test_moments_are_those_of_the_inputs_of_any_model(model_type):
    """They equal the sums of the inputs that hooks see while `transformers` runs one text after the other."""
    model = tiny_model(model_type)
    runtime = GenericRuntime(model)
    groups = [runtime.skeleton.quantizer.int4_groups(layer) for layer in range(runtime.layers)]
    watched = {(layer, n): group.replaced[0] for layer, own in enumerate(groups) for n, group in own.items()}
    seen = dict(zip(watched, inputs_of(model, [*watched.values()]), strict=True))
    moments = dict(runtime.input_moments(TEXTS, range(runtime.layers), products=True))
    assert {(layer, number) for layer in moments for number in moments[layer]} == set(seen)
    assert seen
    for (layer, number), inputs in seen.items():
        x = torch.cat(inputs).float()
        assert moments[layer][number].count == len(x) >= sum(map(len, TEXTS))
        torch.testing.assert_close(moments[layer][number].products, x.t() @ x, rtol=1e-3, atol=1e-3)


@own_forward
@torch.no_grad()
def test_any_model_drafts_with_the_weights_of_a_file(model_type, tmp_path):
    """A path computes what the model with these weights does, and the text stays that of `generate`."""
    model = tiny_model(model_type)
    runtime = GenericRuntime(model, kernel=fake)
    file = written(runtime, tmp_path / "x.safetensors", "gptq")
    runtime.register_int4("file", file)
    layers, experts = tuple(range(runtime.layers)), model_type == "qwen2_moe"
    path = DraftPath(int4=SkipSet(layers, () if experts else layers), int4_weights="file")
    other = copy.deepcopy(model)
    structure, quantizer = find_structure(other), GenericRuntime(other).skeleton.quantizer
    for layer in layers:
        for number, group in quantizer.int4_groups(layer).items():
            weight, start = file.get(layer, number).weight(torch.float64), 0
            for linear, module in zip(group.modules, group.replaced, strict=True):
                own, start = weight[start : start + linear.out_features], start + linear.out_features
                if not experts or module in structure.attention[layer].modules():
                    module.weight.data = own.t() if isinstance(module, Conv1D) else own
    theirs, tokens = GenericRuntime(other), torch.tensor([TEXTS[0]])
    with runtime.session(16), theirs.session(16):
        mine = runtime.forward(tokens, 0, path=runtime.compile(path)).logits
        torch.testing.assert_close(mine, theirs.forward(tokens, 0).logits, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(
            mine, runtime.forward(tokens, 0, path=runtime.compile(replace(path, int4_weights=None))).logits
        )
    assert runtime.compile(path).bytes == runtime.extra_bytes(path)
    drafter = LayerSkipDrafter(runtime, path, FixedK(3))
    for prompt in ([5, 3], [8, 1, 30]):
        text = model.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert run(runtime, drafter, prompt, 16)[0] == text[0, len(prompt) :].tolist()


def test_moments_that_take_much_memory_are_those_of_one_layer_at_a_time(monkeypatch):
    runtime = GenericRuntime(model_of())
    together, sessions = dict(runtime.input_moments(TEXTS, [1, 2, 3], products=True)), []
    monkeypatch.setattr(hf_runtime, "_MOMENTS", 0)
    watch = GenericRuntime._watch
    monkeypatch.setattr(GenericRuntime, "_watch", lambda self, *args: sessions.append(1) or watch(self, *args))
    alone = dict(runtime.input_moments(TEXTS, [1, 2, 3], products=True))
    assert len(sessions) == 3
    assert list(alone) == list(together) == [1, 2, 3]
    for layer, groups in alone.items():
        for number, moments in groups.items():
            assert torch.equal(moments.products, together[layer][number].products)


def test_nothing_stays_on_the_model_where_reading_its_texts_fails():
    model = model_of()
    runtime = GenericRuntime(model)

    def fail(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[2].mlp.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        list(runtime.input_moments(TEXTS, range(4), products=False))
    hook.remove()
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


class Killed(BaseException):
    pass


@both_runtimes
@pytest.mark.parametrize("method", ["weighted", "gptq"])
def test_it_resumes_after_a_kill(kind, method, tmp_path, monkeypatch):
    """Finished layers are not quantised again, and the weights are those of a call that was not killed."""
    runtime = kind(model_of())
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


PATH = DraftPath.from_modes(["int4"] * 8)


@pytest.fixture(scope="module")
def runtime():
    config = copy.deepcopy(CONFIGS["llama"])
    config.intermediate_size = 64
    return LeanRuntime(tiny(config, dtype=torch.float32))


@pytest.fixture
def file(runtime, tmp_path):
    texts = [[5, 3, 8, 1, 30]]
    write_int4(runtime, tmp_path / "w.safetensors", texts, int4_settings("gptq", 32, texts, seed=3))
    return tmp_path / "w.safetensors"


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 99))
def test_two_values_in_a_byte(out, pairs, seed):
    values = torch.randint(16, (out, 2 * pairs), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    assert pack(values).shape == (out, pairs)
    assert torch.equal(unpack(pack(values)), values)


def test_what_is_written_is_read(runtime, tmp_path):
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    made = quantize_int4(weight, "nearest", group=32)
    write_part(tmp_path / "w.safetensors", int4_part({}, int4_tensors(2, {0: made}), runtime))
    found = open_int4(runtime, tmp_path / "w.safetensors")
    read = found.get(2, 0)
    assert all(torch.equal(getattr(read, name), getattr(made, name)) for name in ("values", "scale", "zero"))
    assert found.bytes(2, 0) == made.bytes == 64 * 16 + 64 * 4
    assert found.get(2, 1) is found.bytes(2, 1) is None
    (tmp_path / "w.safetensors").unlink()
    with pytest.raises(SelfspecError, match=r"w\.safetensors: no such file"):
        found.get(2, 0)


def test_the_file_tells_what_it_was_made_of(runtime, file):
    part = read_part(file)
    digest = part.settings["texts"].pop("sha256")
    assert len(digest) == 64
    assert part.settings == {"method": "gptq", "group": 32, "seed": 3, "texts": {"count": 1, "tokens": 5}}
    assert part.model == runtime.skeleton.identity


def wrong(part, **tensors):
    return replace(part, tensors={**part.tensors, **tensors})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda p: replace(p, kind="bridge"), "of kind 'bridge'; expected 'int4'"),
        (
            lambda p: replace(p, model=p.model.model_copy(update={"layers": 5})),
            "of another model: layers 5 in the profile, 4 in the model; make one with: selfspec quantize",
        ),
        (
            lambda p: replace(p, model=p.model.model_copy(update={"fingerprint": "0" * 16})),
            "of other weights .*; make one with: selfspec quantize",
        ),
        (lambda p: wrong(p, other=torch.ones(1)), "tensor 'other' is not one of int4 weights"),
        (lambda p: wrong(p, **{"int4.0.0.zero": torch.ones(64, 1)}), "tensor 'int4.0.0.zero' is not one of int4"),
        (lambda p: wrong(p, **{"int4.0.0.zero": torch.ones(64, 2).bfloat16()}), "int4 weights 0.0 do not fit"),
        (lambda p: wrong(p, **{"int4.9.0.zero": torch.ones(64, 1).bfloat16()}), "int4 weights 9.0 do not fit"),
        (
            lambda p: replace(p, tensors={n: t for n, t in p.tensors.items() if n != "int4.1.2.values"}),
            "int4 weights 1.2 do not fit",
        ),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(runtime, file, change, told):
    write_part(file, change(read_part(file)))
    with pytest.raises(SelfspecError, match=told) as error:
        open_int4(runtime, file)
    assert "\n" not in str(error.value)


def test_scales_that_are_not_finite_are_refused(runtime, file):
    part = read_part(file)
    write_part(file, wrong(part, **{"int4.0.0.scale": part.tensors["int4.0.0.scale"] * float("nan")}))
    with pytest.raises(SelfspecError, match="scales of layer 0 are not finite"):
        open_int4(runtime, file).get(0, 0)


def test_no_file_of_weights_at_all(runtime, tmp_path):
    (tmp_path / "w.safetensors").write_text("not tensors")
    with pytest.raises(SelfspecError, match="no trained part can be read from it"):
        open_int4(runtime, tmp_path / "w.safetensors")


def profile_with(runtime, file):
    spec = LayerSkipSpec.from_path(PATH, ControllerSpec(name="fixed", options={"k": 3}))
    return selfspec.Profile(
        model=runtime.skeleton.identity,
        draft=spec.model_copy(update={"int4_weights": "int4"}),
        parts={"int4": ModuleFile(file=file.name, sha256=sha256_of(file))},
    ).with_folder(file.parent)


def test_a_profile_brings_its_weights_and_drafts_with_them(runtime, file, tmp_path):
    """Written to another folder and read back: the path has the file's weights, the text is the model's."""
    (tmp_path / "there").mkdir()
    write_profile(profile_with(runtime, file), tmp_path / "there" / "p.yaml")
    profile = read_profile(tmp_path / "there" / "p.yaml")
    assert "int4 weights of the part int4" in profile.draft.summary
    file.unlink()
    drafter = make_drafter(runtime, profile)
    assert drafter.path == replace(PATH, int4_weights=profile.parts["int4"].sha256)
    tokens = torch.tensor([[5, 3, 8, 1, 30]])
    with runtime.session(8):
        mine, nearest = (runtime.forward(tokens, 0, path=runtime.compile(path)).logits for path in (drafter.path, PATH))
    assert not torch.equal(mine, nearest)
    for prompt in ([5, 3], [8, 1, 30]):
        assert run(runtime, drafter, prompt, 24)[0] == plain(LeanRuntime(runtime.model), prompt, 24)


def test_a_profile_with_another_file_is_refused(runtime, file):
    write_profile(profile_with(runtime, file), file.parent / "p.yaml")
    write_part(file, PartFile("int4", {}, {}, runtime.skeleton.identity))
    with pytest.raises(SelfspecError, match=r"part 'int4': .* is another file than the profile was made with"):
        read_profile(file.parent / "p.yaml")


def test_updated_weights_are_rounded_to_nearest(runtime, file):
    """Those of the group that an update changes; the others are the file's."""
    weights = open_int4(runtime, file)
    update = Update(torch.zeros(1, 32), torch.zeros(64, 1))
    quantizer = runtime.skeleton.quantizer
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))

    def qkv(trained, int4):
        out = torch.empty(1, 64)
        quantizer.sublayer(0, "attention", 4, trained, int4)[0].qkv(x, out)
        return out

    changed, nearest, ours = qkv(Trained(updates={(0, 0): update}), weights), qkv(None, None), qkv(None, weights)
    assert torch.equal(changed, nearest)
    assert not torch.equal(ours, nearest)


def test_weights_are_brought_to_another_folder(runtime, file, tmp_path):
    """Where a training writes a profile; a profile without weights brings none."""
    (tmp_path / "there").mkdir()
    profile = profile_with(runtime, file)
    assert bring_path(profile, tmp_path / "there") == profile.parts
    assert (tmp_path / "there" / file.name).read_bytes() == file.read_bytes()
    assert bring_path(profile.model_copy(update={"draft": LayerSkipSpec()}), tmp_path / "there") == {}


def test_trained_modules_of_a_path_are_brought_with_it(runtime, file, tmp_path):
    """When a head below the path is trained; training the path anew replaces its modules."""
    (tmp_path / "there").mkdir()
    profile = profile_with(runtime, file)
    trained = file.with_name("adapter.safetensors")
    trained.write_bytes(b"trained")
    draft = profile.draft.model_copy(update={"trained": "adapter"})
    parts = profile.parts | {"adapter": ModuleFile(file=trained.name, sha256=sha256_of(trained))}
    path = profile.model_copy(update={"draft": draft, "parts": parts}).with_folder(file.parent)
    assert bring_path(path, tmp_path / "there") == parts
    assert (tmp_path / "there" / trained.name).read_bytes() == b"trained"
    assert bring_path(path, tmp_path / "there", trained=False) == profile.parts
