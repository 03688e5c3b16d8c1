from __future__ import annotations

import copy
import types
import weakref

import pytest
import torch
from models import CONFIGS, chunked, exact_norms, tiny, tokens_for
from torch import nn

from selfspec.basics.errors import BusyError, SelfspecError
from selfspec.models.low_precision import fake
from selfspec.models.norms import Norms
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.draft_path import DraftPath, SkipSet

N = 40  # past the 32 original positions of the scaled ropes


def reference(model, tokens, **options):
    with torch.no_grad():
        return model(tokens, use_cache=False, **options)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "widths", [(N,), (N - 6, 1, 1, 1, 3), (1, 7, N - 8), (1,) * N], ids=["whole", "draft", "wide", "single"]
)
def test_logits_equal_transformers(name, widths):
    model = tiny(CONFIGS[name])
    tokens = tokens_for(model)
    ours = chunked(LeanRuntime(model), tokens, widths)
    theirs = reference(exact_norms(copy.deepcopy(model)), tokens).logits
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
    single = model.float()
    ours = chunked(LeanRuntime(single), tokens, widths)
    scale = theirs.abs().max()
    torch.testing.assert_close(ours / scale, reference(single, tokens).logits / scale, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", [(N,), (1,) * N], ids=["whole", "single"])
def test_half_precision_is_as_near_as_rounding_allows(dtype, widths):
    model = tiny(CONFIGS["llama"]).to(dtype)
    tokens = tokens_for(model)
    ours, theirs = chunked(LeanRuntime(model), tokens, widths), reference(model, tokens).logits
    assert (ours - theirs).abs().max() <= 0.05 * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_in_half_precision_round_where_transformers_do(dtype):
    norm = tiny(CONFIGS["llama"]).to(dtype).model.norm
    width = len(norm.weight)
    longer = torch.full((9, width + 1), (width * norm.variance_epsilon) ** 0.5, dtype=dtype)
    stream = longer[:, :width].normal_(generator=torch.Generator().manual_seed(0))
    ours = Norms(norm.variance_epsilon).read(norm, stream.device)(stream, longer, torch.empty_like(stream))
    theirs = norm(stream)
    assert (ours != theirs).float().mean() < 0.01  # the last bit before rounding may differ
    torch.testing.assert_close(ours, theirs)


def test_hidden_streams_and_logit_rows():
    model = exact_norms(tiny(CONFIGS["qwen2"]))
    tokens = tokens_for(model)
    theirs = reference(model, tokens, output_hidden_states=True)
    runtime = LeanRuntime(model)
    with runtime.session(N):
        step = runtime.forward(tokens, 0, logits="last", hidden=(0, 2, runtime.layers), between=(1,))
        half = runtime.forward(
            tokens, 0, path=runtime.compile(DraftPath(SkipSet((), (1,)))), logits=None, hidden=(2,)
        ).hidden[2]
        assert list(step.between) == [1]
        torch.testing.assert_close(step.between[1], half)  # what leaves the layer without its MLP
        assert sorted(step.hidden) == [0, 2, runtime.layers]
        torch.testing.assert_close(step.hidden[0], theirs.hidden_states[0])
        torch.testing.assert_close(step.hidden[2], theirs.hidden_states[2])
        torch.testing.assert_close(model.model.norm(step.hidden[runtime.layers]), theirs.hidden_states[-1])
        torch.testing.assert_close(step.logits, theirs.logits[:, -1:])
        assert runtime.forward(tokens, 0, logits=None).logits is None


def silenced(model, skip):
    """A copy whose skipped sub-layers return zeros."""
    model = exact_norms(copy.deepcopy(model))
    for index in skip.attention:
        attention = model.model.layers[index].self_attn
        attention.forward = types.MethodType(
            lambda self, hidden_states, **_: (torch.zeros_like(hidden_states), None), attention
        )
    for index in skip.mlp:
        mlp = model.model.layers[index].mlp
        mlp.forward = types.MethodType(lambda self, x: torch.zeros_like(x), mlp)
    return model


@pytest.mark.parametrize(
    "skip",
    [SkipSet((1,), (2,)), SkipSet((0,), (0,)), SkipSet((0, 3), (1, 2, 3)), SkipSet((0, 1, 2, 3), (0, 1, 2, 3))],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_skipping_is_a_model_whose_sub_layers_add_nothing(name, skip):
    model = tiny(CONFIGS[name])
    tokens = tokens_for(model)
    runtime = LeanRuntime(model)
    path = runtime.compile(DraftPath(skip))
    with runtime.session(N):
        ours = [runtime.forward(tokens[:, i : i + 1], i, path=path).logits for i in range(N)]
    torch.testing.assert_close(
        torch.cat(ours, 1), reference(silenced(model, skip), tokens).logits, atol=1e-10, rtol=1e-10
    )


def test_a_skipped_sub_layer_is_not_called_and_writes_no_keys():
    model = tiny(CONFIGS["llama"])
    called = []
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.q_proj.register_forward_hook(lambda *_, i=i: called.append(("attention", i)))
        layer.mlp.up_proj.register_forward_hook(lambda *_, i=i: called.append(("mlp", i)))
    runtime = LeanRuntime(model)
    with runtime.session(N):
        runtime.forward(tokens_for(model), 0, path=runtime.compile(DraftPath(SkipSet((1, 2), (0, 2, 3)))))
        assert called == [("attention", 0), ("mlp", 1), ("attention", 3)]
        written = [bool(keys[:, :, :N].any()) for keys in runtime.cache.keys]
    assert written == [True, False, False, True]


def test_a_tree_pass_equals_its_chains():
    """Rows of a tree, under a mask, at slots that are not their positions, are the rows of each path alone."""
    model = tiny(CONFIGS["llama"])
    runtime = LeanRuntime(model)
    prefix = tokens_for(model, n=10)
    nodes, parents, depths = [3, 7, 9, 4], [-1, -1, 0, 2], [1, 1, 2, 3]
    with runtime.session(N):
        runtime.forward(prefix, 0, logits=None)
        mask = torch.zeros(1, 4, 14, dtype=torch.bool)
        mask[:, :, :10] = True
        for node in range(4):
            above = node
            while above >= 0:
                mask[0, node, 10 + above] = True
                above = parents[above]
        positions = torch.tensor([[9 + depth for depth in depths]])
        tree = runtime.forward(torch.tensor([nodes]), positions, slots=10, mask=mask).logits[0]
        again = runtime.forward(torch.tensor([nodes]), positions, slots=torch.tensor([[10, 11, 12, 13]]), mask=mask)
        torch.testing.assert_close(again.logits[0], tree)
        chain = runtime.forward(torch.tensor([[3, 9, 4]]), 10).logits[0]
        torch.testing.assert_close(tree[[0, 2, 3]], chain, atol=1e-10, rtol=1e-10)
        alone = runtime.forward(torch.tensor([[7]]), 10).logits[0]
        torch.testing.assert_close(tree[1], alone[0], atol=1e-10, rtol=1e-10)


def test_rows_of_a_batch_are_independent():
    """Rows of different lengths, padded into the spare slot, give what each gives alone."""
    model = tiny(CONFIGS["llama"])
    tokens = tokens_for(model, rows=3, n=12)
    lengths = [12, 5, 9]
    alone = [chunked(LeanRuntime(model), tokens[i : i + 1, :n], (n,))[0] for i, n in enumerate(lengths)]
    runtime = LeanRuntime(model, rows=3)
    with runtime.session(16):
        spare = runtime.cache.spare
        place = torch.arange(12).expand(3, 12)
        real = place < torch.tensor(lengths)[:, None]
        mask = (torch.arange(12) <= place[..., None]) & real[:, None, :] | (torch.arange(12) == 0)
        step = runtime.forward(tokens, place, slots=torch.where(real, place, spare), mask=mask)
        for i, n in enumerate(lengths):
            torch.testing.assert_close(step.logits[i, :n], alone[i], atol=1e-10, rtol=1e-10)
        # One step of all rows, each at its own position, with the default causal mask.
        after = torch.tensor([[n] for n in lengths])
        step = runtime.forward(torch.tensor([[1], [2], [3]]), after)
        for i, n in enumerate(lengths):
            whole = torch.cat((tokens[i : i + 1, :n], torch.tensor([[i + 1]])), dim=1)
            torch.testing.assert_close(step.logits[i], chunked(LeanRuntime(model), whole, (n + 1,))[0, -1:])


def test_one_row_of_a_batch_can_be_run_alone():
    model = tiny(CONFIGS["llama"])
    tokens = tokens_for(model, rows=2, n=8)
    runtime = LeanRuntime(model, rows=2)
    with runtime.session(8):
        runtime.forward(tokens, 0, logits=None)
        kept = runtime.cache.keys[0][0].clone()
        other = runtime.forward(tokens[:1], 0, rows=slice(1, 2)).logits
        assert torch.equal(runtime.cache.keys[0][0], kept)
    torch.testing.assert_close(other, chunked(LeanRuntime(model), tokens[:1], (8,)))


def test_a_replaced_linear_is_called_as_it_is():
    """Adapters and quantised linears are leaf modules with a forward of their own."""

    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.extra = base, nn.Linear(base.in_features, base.out_features, bias=False).double()

        def forward(self, x):
            return self.base(x) + self.extra(x)

    model = tiny(CONFIGS["llama"])
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.mlp.down_proj = Adapted(layer.self_attn.q_proj), Adapted(layer.mlp.down_proj)
    tokens = tokens_for(model)
    ours = chunked(LeanRuntime(model), tokens, (N,))
    torch.testing.assert_close(ours, reference(exact_norms(model), tokens).logits, atol=1e-10, rtol=1e-10)


def test_the_model_is_not_changed():
    model = tiny(CONFIGS["llama"], dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = tokens_for(model)
    logits = reference(model, tokens).logits
    chunked(LeanRuntime(model), tokens, (N,))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(reference(model, tokens).logits, logits)


def test_sessions_exclude_each_other_and_reuse_the_cache():
    runtime = LeanRuntime(tiny(CONFIGS["llama"]))
    with runtime.session(100):
        with pytest.raises(BusyError, match="still generating"), runtime.session(10):
            pass
        held = runtime.cache
    with runtime.session(200):
        assert runtime.cache is held  # capacity comes in steps, and is kept
    with runtime.session(300):
        assert runtime.cache.slots >= 300


def test_a_cache_that_cannot_be_had_leaves_the_runtime_usable(monkeypatch):
    runtime = LeanRuntime(tiny(CONFIGS["llama"]))
    zeros = torch.zeros

    def failing(shape, **options):
        if not isinstance(shape, int) and len(shape) == 5 and shape[3] > 600:
            raise RuntimeError("out of memory")
        return zeros(shape, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", failing)
        with pytest.raises(SelfspecError, match=r"KV cache of 900 slots .* cannot be allocated \(out of memory"):
            runtime.session(900).__enter__()
    with runtime.session(900):
        assert runtime.cache.slots >= 900


def test_an_empty_cache_is_dropped_before_the_next_is_allocated(monkeypatch):
    runtime = LeanRuntime(tiny(CONFIGS["llama"]))
    old, alive = weakref.ref(runtime.cache.keys[0]), []
    zeros = torch.zeros

    def watched(*shape, **options):
        alive.append(old() is not None)
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", watched)
    with runtime.session(900):
        assert alive
        assert not any(alive)


def test_commit_gathers_a_path():
    runtime = LeanRuntime(tiny(CONFIGS["llama"]))
    with runtime.session(20):
        cache = runtime.cache
        for keys in cache.keys:
            keys.copy_(torch.arange(keys.shape[2]).view(1, 1, -1, 1).expand_as(keys))
        cache.length[0] = 4
        cache.commit(0, (1, 3, 4))  # nodes at slots 6, 8, 9, below the root at slot 4
        assert cache.length == [8]
        assert cache.keys[2][0, 0, :8, 0].tolist() == [0, 1, 2, 3, 4, 6, 8, 9]
        cache.commit(0, ())
        assert cache.length == [9]


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_weights_offloaded_by_accelerate(place, tmp_path):
    """Offloaded weights are on no device until their module's hook brings them."""
    from accelerate import cpu_offload, disk_offload

    model = tiny(CONFIGS["llama"], dtype=torch.float32)
    tokens = tokens_for(model)
    whole = chunked(LeanRuntime(model), tokens, (N - 2, 1, 1))
    if place == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert model.model.layers[0].mlp.up_proj.weight.is_meta
    ours = chunked(LeanRuntime(model), tokens, (N - 2, 1, 1))
    torch.testing.assert_close(ours / whole.abs().max(), whole / whole.abs().max(), atol=1e-5, rtol=0)


def test_a_head_over_some_tokens():
    model = tiny(CONFIGS["llama"])
    runtime = LeanRuntime(model)
    tokens = tokens_for(model)
    some = [5, 0, 60, 17]
    with runtime.session(N):
        whole = runtime.forward(tokens, 0).logits
        part = runtime.forward(tokens, 0, path=runtime.compile(DraftPath(vocabulary=tuple(some)))).logits
    assert part.shape == whole.shape
    torch.testing.assert_close(part[..., some], whole[..., some])
    assert int(torch.isfinite(part[0, 0]).sum()) == 4
    for wrong in ([], [61], [-1], [3, 3]):
        with pytest.raises(SelfspecError, match="different tokens from 0"):
            runtime.compile(DraftPath(vocabulary=tuple(wrong)))
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(SelfspecError, match="head's own weight"):
        LeanRuntime(model).compile(DraftPath(vocabulary=tuple(some)))


def test_norms_trained_after_wrapping_count():
    """From the next session on, whatever weight was changed in place."""
    model = tiny(CONFIGS["llama"])
    runtime = LeanRuntime(model)
    tokens = tokens_for(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    torch.testing.assert_close(
        chunked(runtime, tokens, (N - 1, 1)), reference(exact_norms(copy.deepcopy(model)), tokens).logits
    )


def test_a_runtime_beside_another_shares_what_is_compiled_and_has_a_cache_of_its_own():
    runtime = LeanRuntime(tiny(CONFIGS["llama"]), kernel=fake)
    named = DraftPath(SkipSet((1,), ()), int8=SkipSet((), (0,)), head="int8")
    path = runtime.compile(named)
    tokens = tokens_for(runtime.model, rows=3, n=9)
    with runtime.session(16):
        runtime.forward(tokens[:1], 0)
        held = runtime.cache, runtime.cache.keys[0].clone()
        other = runtime.with_new_cache(rows=3)
        assert other.rows == 3
        assert other.compile(named) is path
        with other.session(300):  # while the first is held
            together = other.forward(tokens, 0, path=path).logits
        assert runtime.cache is held[0]
        assert torch.equal(runtime.cache.keys[0], held[1])
        assert runtime.rows == 1
        for i in range(3):
            torch.testing.assert_close(runtime.forward(tokens[i : i + 1], 0, path=path).logits[0], together[i])


def test_that_weights_are_brought_into_few_bits_is_said_where_it_takes_long(monkeypatch, caplog):
    runtime = LeanRuntime(tiny(CONFIGS["llama"], dtype=torch.float32), kernel=fake)
    every = tuple(range(runtime.layers))
    path = DraftPath(int8=SkipSet(every, every))
    monkeypatch.setattr("selfspec.runtime.compiled_path._LONG", runtime.extra_bytes(path) - 1)
    kept = runtime.compile(path)
    assert [record.message for record in caplog.records] == ["quantising 0.0 GB of weights ..."]
    caplog.clear()
    other = runtime.compile(DraftPath(int8=SkipSet(every[1:], every)))
    assert kept.bytes > other.bytes
    assert not caplog.records, "they are there"
