"""Draft paths in few bits are the model with rounded weights, and what cannot be had in few bits runs in full."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from lowering import as_rounded, kernels, random_path
from models import CONFIGS, tiny
from torch import nn

from selfspec.basics.errors import SelfspecError
from selfspec.models.layout import apply_layout_
from selfspec.models.low_precision import bytes_of, fake
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.draft_path import DraftPath, SkipSet

LAYERS, N = 4, 12


def model_of(name, *, dtype=torch.float64):
    """One whose every linear can be had in int4: inputs come by 32."""
    config = copy.deepcopy(CONFIGS[name])
    config.intermediate_size = 64
    return tiny(config, dtype=dtype)


def logits(runtime, path, tokens, *, one_by_one=False):
    compiled = runtime.compile(path)
    n = tokens.shape[1]
    with runtime.session(n):
        if not one_by_one:
            return runtime.forward(tokens, 0, path=compiled).logits
        return torch.cat([runtime.forward(tokens[:, i : i + 1], i, path=compiled).logits for i in range(n)], 1)


def tokens_for(model, rows=1):
    return torch.randint(model.config.vocab_size, (rows, N), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(4))
def test_a_path_in_few_bits_is_the_model_with_rounded_weights(name, seed):
    model = model_of(name)
    path = random_path(17 * seed + len(name), LAYERS, words=model.config.vocab_size)
    tokens = tokens_for(model)
    runtime = LeanRuntime(model, kernel=fake)
    before = copy.deepcopy(model.state_dict())
    rounded_model = LeanRuntime(as_rounded(model, path))
    assert runtime.compile(path).unquantized == ()
    expected = logits(rounded_model, DraftPath(path.skip, path.vocabulary), tokens)
    for one_by_one in (False, True):
        ours = logits(runtime, path, tokens, one_by_one=one_by_one)
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-10)
    if path.low_precision:
        assert not torch.allclose(ours, logits(runtime, DraftPath(path.skip, path.vocabulary), tokens))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("head", ["int8", "int4"])
@pytest.mark.parametrize("words", [None, (5, 0, 60, 17)], ids=["all words", "some words"])
@pytest.mark.parametrize("name", ["llama", "llama-mqa-tied"])
def test_the_head_in_few_bits(head, words, name):
    model = model_of(name)
    runtime, path, tokens = LeanRuntime(model, kernel=fake), DraftPath(head=head, vocabulary=words), tokens_for(model)
    ours = logits(runtime, path, tokens)
    expected = logits(LeanRuntime(as_rounded(model, path)), DraftPath(), tokens)
    seen = list(words or range(61))
    torch.testing.assert_close(ours[..., seen], expected[..., seen], atol=1e-10, rtol=1e-10)
    assert int(torch.isfinite(ours).sum()) == N * len(seen)
    assert runtime.compile(path).bytes == bytes_of(8 if head == "int8" else 4, len(seen), 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "kernel"), [pytest.param(b, k, id=f"{b} {name}") for b, name, k in kernels()])
def test_real_products_are_near_it(bits, kernel, dtype):
    """Of the logits' size: 6% with biases and every sub-layer in few bits."""
    exact = model_of("llama-biases").to(dtype).double()
    mode = "int8" if bits == 8 else "int4"
    path, tokens = DraftPath.from_modes([mode] * 2 * LAYERS, head=mode), tokens_for(exact, rows=2)
    expected = logits(LeanRuntime(exact, kernel=fake, rows=2), path, tokens)
    runtime = LeanRuntime(copy.deepcopy(exact).to(dtype), kernel=kernel, rows=2)
    for one_by_one in (False, True):
        ours = logits(runtime, path, tokens, one_by_one=one_by_one)
        assert float((ours.double() - expected).norm()) < 0.06 * float(expected.norm())


@pytest.mark.parametrize("layout", ["rows", "columns", "onednn"])
@pytest.mark.parametrize("name", ["llama-biases", "qwen2"])
def test_however_weights_are_laid_out(layout, name):
    model = model_of(name, dtype=torch.float32)
    path, tokens = random_path(3, LAYERS), tokens_for(model)
    expected = logits(LeanRuntime(copy.deepcopy(model), kernel=fake), path, tokens)
    apply_layout_(model, layout)
    runtime = LeanRuntime(model, kernel=fake)
    ours = logits(runtime, path, tokens)
    assert runtime.compile(path).unquantized == ()
    torch.testing.assert_close(ours / expected.abs().max(), expected / expected.abs().max(), atol=1e-5, rtol=0)


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.in_features, self.out_features = base, base.in_features, base.out_features

    def forward(self, x):
        return self.base(x) * 1.5


class OfAnotherKind(nn.Linear):
    """As quantised linears are."""


def changed(model, what):
    """A model of which attention of layer 1, the MLP of layer 2 and the head cannot be had in few bits."""
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[2].mlp
    for owner, name in ((attention, "k_proj"), (mlp, "down_proj"), (model, "lm_head")):
        module = getattr(owner, name)
        if what == "hooks":
            module.register_forward_hook(lambda module, args, out: out * 1.5)
        elif what == "adapters":
            setattr(owner, name, Adapted(module))
        elif what == "other kinds":
            module.__class__ = OfAnotherKind
        elif what == "offloaded":
            from accelerate import cpu_offload

            cpu_offload(module, execution_device=torch.device("cpu"))
    return model


@pytest.mark.parametrize("what", ["hooks", "adapters", "other kinds", "offloaded"])
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_what_cannot_be_had_in_few_bits_runs_in_full(what, mode):
    path = DraftPath.from_modes([mode] * 2 * LAYERS, head=mode)
    plain = model_of("llama", dtype=torch.float32)
    model = changed(copy.deepcopy(plain), what)
    runtime, tokens = LeanRuntime(model, kernel=fake), tokens_for(plain)
    compiled = runtime.compile(path)
    assert compiled.unquantized == ("attention 1", "mlp 2", "head")
    alike = changed(as_rounded(plain, path, compiled.unquantized), what)
    expected = logits(LeanRuntime(alike), DraftPath(), tokens)
    ours = logits(runtime, path, tokens)
    torch.testing.assert_close(ours / expected.abs().max(), expected / expected.abs().max(), atol=1e-5, rtol=0)
    if what in ("adapters", "offloaded"):
        with pytest.raises(SelfspecError, match="head's own weight"):
            runtime.compile(DraftPath(head=mode, vocabulary=(1, 2)))


def test_groups_that_do_not_divide_run_in_full():
    """48 inputs are no multiple of 32, and can be had in int8."""
    runtime = LeanRuntime(tiny(CONFIGS["llama"]), kernel=fake)
    compiled = runtime.compile(DraftPath.from_modes(["int4"] * 8, head="int4"))
    assert compiled.unquantized == ("mlp 0", "mlp 1", "mlp 2", "mlp 3")
    assert runtime.skeleton.quantizer.bytes(0, "mlp", 4) is None
    assert runtime.compile(DraftPath.from_modes(["int8"] * 8)).unquantized == ()


def test_a_head_over_some_words_that_cannot_be_had_in_few_bits_is_in_full():
    """Its weight is at hand, but its inputs do not come by 32."""
    config = copy.deepcopy(CONFIGS["llama"])
    config.hidden_size, config.head_dim = 48, 8
    model = tiny(config)
    runtime, tokens = LeanRuntime(model, kernel=fake), tokens_for(model)
    compiled = runtime.compile(DraftPath(head="int4", vocabulary=(5, 7)))
    assert compiled.unquantized == ("head",)
    assert compiled.bytes == 2 * 48 * 8
    full = logits(runtime, DraftPath(vocabulary=(5, 7)), tokens)
    torch.testing.assert_close(logits(runtime, DraftPath(head="int4", vocabulary=(5, 7)), tokens), full)


def test_bytes():
    runtime = LeanRuntime(model_of("llama"), kernel=fake)
    lowered = runtime.skeleton.quantizer
    attention8 = bytes_of(8, 64, 32) + bytes_of(8, 32, 32)
    mlp4 = bytes_of(4, 128, 32) + bytes_of(4, 32, 64)
    assert lowered.bytes(1, "attention", 8) == attention8
    assert lowered.bytes(1, "mlp", 4) == mlp4
    assert lowered.head_bytes(8) == bytes_of(8, 61, 32)
    some = DraftPath(int8=SkipSet((0, 2)), int4=SkipSet((), (1,)), head="int8")
    assert runtime.compile(some).bytes == 2 * attention8 + mlp4 + bytes_of(8, 61, 32)
    assert runtime.compile(DraftPath(SkipSet((1,), (1,)))).bytes == 0


def test_what_is_lowered_is_shared_and_freed():
    alive = weakref.WeakSet()
    made = []

    def kernel(weight, dtype):
        call = fake(weight, dtype)
        alive.add(call)
        made.append(tuple(weight.values.shape))
        return call

    runtime = LeanRuntime(model_of("llama"), kernel=kernel)
    some = DraftPath(int8=SkipSet((0, 1)), head="int8")
    more = DraftPath(SkipSet((), (3,)), int8=SkipSet((1, 2)), head="int8", vocabulary=(1, 2, 3))
    first = runtime.compile(some)
    assert made == [(64, 32), (32, 32)] * 2 + [(61, 32)]
    assert runtime.compile(some) is first
    second = runtime.with_new_cache(rows=2).compile(more)
    assert made[5:] == [(64, 32), (32, 32), (3, 32)]  # layer 1 is known, and only some of the head is rounded
    del first
    gc.collect()
    assert len(alive) == 5  # layers 1 and 2, and some of the head
    del second
    gc.collect()
    assert not alive
    runtime.compile(some)
    assert len(made) == 13


def test_the_fastest_kernel_is_asked_for_once_for_each_kind_of_weight(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "selfspec.models.quantized_sublayers.kernel_for",
        lambda weight, bits: asked.append((tuple(weight.shape), bits)) or fake,
    )
    runtime = LeanRuntime(model_of("llama"))
    ways = [runtime.compile(DraftPath.from_modes([mode] * 8, head="int8")) for mode in ("int8", "int4", "int8")]
    assert all(not compiled.unquantized for compiled in ways)
    assert asked == [((32, 32), 8), ((64, 32), 8), ((61, 32), 8), ((32, 32), 4), ((64, 32), 4)]


def test_without_a_kernel_of_ours_a_path_drafts_here_too():
    """With whichever products this machine has."""
    model = model_of("llama", dtype=torch.float32)
    path, tokens = DraftPath.from_modes(["int8"] * 8, head="int8"), tokens_for(model)
    ours, exact = logits(LeanRuntime(model), path, tokens), logits(LeanRuntime(model, kernel=fake), path, tokens)
    assert float((ours - exact).norm()) < 0.06 * float(exact.norm())
