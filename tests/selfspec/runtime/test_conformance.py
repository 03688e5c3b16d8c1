"""What every runtime does: the lean one, and the one over a model's own forward."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from models import CONFIGS, SIZES, plain, run, tiny
from transformers import LlamaConfig

from selfspec.basics.errors import BusyError, SelfspecError, UnsupportedModelError
from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter
from selfspec.models.low_precision import fake
from selfspec.runtime import open_runtime
from selfspec.runtime.base import Runtime
from selfspec.runtime.forward import LeanRuntime
from selfspec.runtime.hf_runtime import GenericRuntime
from selfspec.speculation.drafts import Draft
from selfspec.speculation.tree_batch import PlacedDraft
from selfspec.types.draft_path import DraftPath, SkipSet

LAYERS, WORDS, N = 4, 61, 20
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TOKENS = torch.randint(WORDS, (2, N), generator=torch.Generator().manual_seed(1))
EVERY = SkipSet(tuple(range(LAYERS)), tuple(range(LAYERS)))
PATHS = {
    "full": DraftPath(),
    "skip": DraftPath(SkipSet((1, 2), (0,))),
    "all skipped": DraftPath(EVERY),
    "vocabulary": DraftPath(vocabulary=tuple(range(0, WORDS, 2))),
    "int8": DraftPath(int8=EVERY, head="int8"),
    "int4": DraftPath(SkipSet((1,), ()), int4=SkipSet((0, 2), ()), head="int4"),
    "mixed": DraftPath(SkipSet((1,), ()), tuple(range(0, WORDS, 3)), int8=SkipSet((0, 2), (1,)), head="int8"),
}
every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


@functools.cache
def model():
    return tiny(CONFIGS["qwen2"])


@pytest.fixture(scope="module", params=[LeanRuntime, GenericRuntime])
def runtime(request):
    return request.param(model(), rows=2)


@functools.cache
@torch.no_grad()
def own():
    """The model's logits `[2, N, V]` and hidden states, as its own forward gives them."""
    out = model()(TOKENS, output_hidden_states=True)
    return out.logits, out.hidden_states


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)  # `transformers`' norms compute in float32


def test_it_has_all_of_the_interface(runtime):
    assert type(open_runtime(model())) is LeanRuntime
    members = [name for name in {**vars(Runtime), **Runtime.__annotations__} if not name.startswith("_")]
    assert {"forward", "cache", "using_int4"} <= set(members)
    for name in members:
        assert hasattr(runtime, name), name
    for name, method in vars(Runtime).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            theirs = inspect.signature(getattr(type(runtime), name)).parameters.values()
            assert [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()] == [
                (p.name, p.kind, p.default) for p in theirs
            ], name


@pytest.mark.parametrize("widths", [(N,), (1,) * N, (7, 1, 9, 3)])
def test_logits_are_the_models_in_passes_of_any_width(runtime, widths):
    parts, start = [], 0
    with runtime.session(N):
        for width in widths:
            parts.append(runtime.forward(TOKENS[:, start : start + width], start).logits)
            start += width
    close(torch.cat(parts, 1), own()[0])


def test_logits_of_all_tokens_the_last_or_none(runtime):
    with runtime.session(N):
        assert runtime.forward(TOKENS, 0, logits=None).logits is None
        close(runtime.forward(TOKENS, 0, logits="last").logits, own()[0][:, -1:])


def test_hidden_states_are_those_that_enter_layers_and_leave_the_last(runtime):
    with runtime.session(N):
        step = runtime.forward(TOKENS, 0, hidden=(0, 2, LAYERS), between=(1, 3))
    for layer in (0, 2):
        close(step.hidden[layer], own()[1][layer])
    close(model().model.norm(step.hidden[LAYERS]), own()[1][LAYERS])
    with runtime.session(N):
        for layer in (1, 3):
            entering = own()[1][layer]
            runtime.forward(TOKENS, 0, logits=None)
            close(runtime.branch(layer, "attention", entering, 0), step.between[layer] - entering)
        close(step.between[1] + runtime.branch(1, "mlp", step.between[1], 0), own()[1][2])


def test_one_row_of_the_cache_leaves_the_others(runtime):
    with runtime.session(N):
        runtime.forward(TOKENS[:, :12], 0, logits=None)
        runtime.forward(TOKENS[1:, 12:15], 12, rows=slice(1, 2), logits=None)
        close(runtime.forward(TOKENS[:1, 12:], 12, rows=slice(0, 1)).logits, own()[0][:1, 12:])
        close(runtime.forward(TOKENS[1:, 15:], 15, rows=slice(1, 2)).logits, own()[0][1:, 15:])


def test_a_token_sees_what_its_mask_shows_and_slots_are_not_positions(runtime):
    """A token, and a sibling of it that it must not see."""
    mask = torch.ones(2, 2, N + 1, dtype=torch.bool)
    mask[:, 0, N:], mask[:, 1, N - 1] = False, False
    with runtime.session(N + 1):
        runtime.forward(TOKENS[:, :-1], 0, logits=None)
        pair = torch.stack([(TOKENS[:, -1] + 1) % WORDS, TOKENS[:, -1]], 1)
        at = torch.full((2, 2), N - 1)
        close(runtime.forward(pair, at, slots=N - 1, mask=mask).logits[:, 1:], own()[0][:, -1:])


def test_drafts_of_two_rows_are_run_in_one_pass_each_as_alone(runtime):
    drafts = [Draft.chain([5, 6, 7]), Draft.chain([8])]
    with runtime.session(N + 8):
        runtime.forward(TOKENS, 0, logits=None)
        placed = [PlacedDraft(row, int(TOKENS[row, -1]), N - 1, draft) for row, draft in enumerate(drafts)]
        outputs = runtime.forward_drafts(placed)
        for output, placement in zip(outputs, placed, strict=True):
            with torch.no_grad():
                text = torch.cat([TOKENS[placement.row], torch.tensor(placement.draft.tokens)]).unsqueeze(0)
                close(output.logits, model()(text).logits[:, N - 1 :])


@every_path
def test_drafts_leave_the_text_that_transformers_generates(runtime, path):
    text = model().generate(torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False)[0, len(PROMPT) :].tolist()
    alone = runtime.with_new_cache()
    assert run(alone, LayerSkipDrafter(alone, path, FixedK(4)), PROMPT, 16)[0] == text
    assert plain(alone, PROMPT, 16) == text


@every_path
def test_what_a_draft_writes_the_full_pass_does_not_read(runtime, path):
    with runtime.session(N):
        runtime.forward(TOKENS[:, :10], 0, logits=None)
        drafted = runtime.forward(TOKENS[:, 10:], 10, path=runtime.compile(path)).logits
        assert path == PATHS["full"] or not torch.allclose(drafted, own()[0][:, 10:])
        close(runtime.forward(TOKENS[:, 10:], 10).logits, own()[0][:, 10:])


@every_path
def test_both_runtimes_compute_the_same_along_a_path(path):
    logits = []
    for kind in (LeanRuntime, GenericRuntime):
        one = kind(model(), kernel=fake)
        with one.session(N):
            logits.append(one.forward(TOKENS[:1], 0, path=one.compile(path)).logits)
    close(*logits)


@every_path
def test_a_path_is_compiled_once_and_takes_the_bytes_that_were_said(runtime, path):
    compiled = runtime.compile(path)
    assert runtime.compile(path) is compiled
    assert runtime.with_new_cache().compile(path) is compiled
    assert compiled.bytes == runtime.extra_bytes(path)
    assert compiled.unquantized == ()
    x = torch.randn(1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert compiled.head(x).shape == (1, WORDS)


@pytest.mark.parametrize("kind", [LeanRuntime, GenericRuntime])
def test_parts_that_cannot_be_quantised_run_in_full_and_are_named(kind):
    runtime = kind(tiny(LlamaConfig(**SIZES | {"hidden_size": 24, "intermediate_size": 40})))
    assert runtime.part_bytes("mlp", 0, "int4") is None, "neither 24 nor 40 inputs are whole groups"
    assert runtime.part_bytes("mlp", 0, "int8") > 0
    assert runtime.part_bytes("mlp", 0, "full") == runtime.part_bytes("attention", 0, "skip") == 0
    assert runtime.compile(DraftPath(int4=SkipSet((), (1,)), head="int4")).unquantized == ("mlp 1", "head")


@pytest.mark.parametrize(
    "path",
    [
        DraftPath(SkipSet((LAYERS,), ())),
        DraftPath(vocabulary=(1, WORDS)),
        DraftPath(SkipSet((0,), ()), trained="other"),
    ],
    ids=["layer", "token", "trained"],
)
def test_a_path_that_does_not_fit_is_refused(runtime, path):
    with pytest.raises(SelfspecError):
        runtime.compile(path)


def test_a_session_is_one_callers_and_ends_after_an_error(runtime):
    with runtime.session(4):
        with pytest.raises(BusyError), runtime.session(4):
            pass
        with pytest.raises((IndexError, RuntimeError)):
            runtime.forward(torch.tensor([[10**6], [0]]), 0)
    with runtime.session(N):
        close(runtime.forward(TOKENS, 0).logits, own()[0])


def test_committed_slots_stay_when_the_cache_grows_and_in_the_next_session(runtime):
    with runtime.session(10):
        runtime.forward(TOKENS[:, :10], 0, logits=None)
        for row in range(2):
            runtime.cache.commit(row, tuple(range(9)))
        slots = runtime.cache.slots
        runtime.reserve(slots + 1)
        assert runtime.cache.slots > slots
    with runtime.session(N, reuse=True):
        assert list(runtime.cache.length) == [10, 10]
        close(runtime.forward(TOKENS[:, 10:], 10).logits, own()[0][:, 10:])


def test_another_runtime_over_the_model_has_its_own_cache(runtime):
    other = runtime.with_new_cache(rows=1)
    assert (other.rows, runtime.rows) == (1, 2)
    with runtime.session(N), other.session(N):
        runtime.forward(TOKENS[:, :10], 0, logits=None)
        other.forward(TOKENS[:1].flip(1), 0, logits=None)
        close(runtime.forward(TOKENS[:, 10:], 10).logits, own()[0][:, 10:])
    with pytest.raises(SelfspecError, match="paged KV cache"):
        runtime.with_new_cache(blocks=4)  # float64 passes are not native


def test_trained_weights_are_supported_or_refused(runtime):
    if runtime.supports_trained:
        runtime.register_trained("bridge", object())
        runtime.unregister_trained("bridge")
    else:
        with pytest.raises(UnsupportedModelError):
            runtime.register_trained("bridge", object())
    with runtime.using_int4("other"), pytest.raises(SelfspecError, match="int4 weights other are not loaded"):
        runtime.compile(DraftPath(int4=SkipSet((0,), ())))
