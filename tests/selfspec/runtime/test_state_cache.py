"""States that cannot be cropped: where they stand, what a pass begins with, and what makes them forgotten."""

from __future__ import annotations

import functools

import pytest
import torch
from model_types import tiny_model
from models import plain, run
from toys import RandomTree
from type_table import PROMPT, theirs

from selfspec.basics.errors import UnsupportedModelError
from selfspec.controllers import AdaptiveThreshold
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.engine.engine import decode
from selfspec.runtime import open_runtime, state_cache
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_path import DraftPath, SkipSet

PATH = DraftPath(SkipSet((2,), (0,)))
OTHERS = ("jamba", "deepseek_v4")
ROOM = 32


@functools.cache
def runtime_of(name="qwen3_5_text"):
    return open_runtime(tiny_model(name))


def passes_of(monkeypatch, runtime, error_at=None):
    """The first slot and the width of every pass; the pass `error_at` fails after the model has run."""
    passes, own = [], type(runtime)._run

    def noted(self, tokens, pass_inputs, *rest):
        passes.append((pass_inputs.slots, tokens.shape[1]))
        out = own(self, tokens, pass_inputs, *rest)
        if len(passes) - 1 == error_at:
            raise RuntimeError("broken")
        return out

    monkeypatch.setattr(type(runtime), "_run", noted)
    return passes


def test_a_pass_begins_with_the_accepted_tokens_that_the_state_has_not_seen(monkeypatch):
    runtime = runtime_of()
    passes = passes_of(monkeypatch, runtime)
    tokens = torch.randint(61, (1, 12), generator=torch.Generator().manual_seed(1))
    with runtime.session(12):
        cache = runtime.cache
        runtime.forward(tokens[:, :6], 0)
        cache.commit(0, range(5))
        assert cache.verified[0].length == 6
        step = runtime.forward(tokens[:, 6:9], 6)  # of which two are accepted
        cache.commit(0, range(1))
        assert (cache.length[0], cache.verified[0].length) == (8, 6)
        again = runtime.forward(tokens[:, 8:], 8)
        assert (step.logits.shape[1], again.logits.shape[1]) == (3, 4)
        cache.commit(0, range(3))
        assert cache.verified[0].length == 12
    assert passes == [(0, 6), (6, 3), (6, 6)]
    with torch.no_grad():
        expected = runtime.model(tokens, use_cache=False).logits
    torch.testing.assert_close(torch.cat([step.logits[:, :2], again.logits], 1), expected[:, 6:], atol=1e-4, rtol=1e-4)


def test_a_draft_works_on_a_copy(monkeypatch):
    runtime, text = runtime_of(), plain(runtime_of(), PROMPT, 8)
    passes = passes_of(monkeypatch, runtime)
    path = runtime.compile(PATH)
    tokens = torch.tensor([[*PROMPT, *text]])
    n = len(PROMPT)
    with runtime.session(32):
        runtime.forward(tokens[:, :n], 0)
        runtime.cache.commit(0, range(n - 1))
        for i in (n, n + 1):  # a draft's second step goes on from its first
            runtime.forward(tokens[:, i : i + 1], i, path=path)
        step = runtime.forward(tokens[:, n:], n)
        assert step.logits[0].argmax(-1).tolist()[:-1] == text[1:]
        runtime.forward(tokens[:, n : n + 1], n, path=path)  # another draft begins anew
    assert passes == [(0, n), (n, 1), (n + 1, 1), (n, 8), (n, 1)]


def test_the_lag_is_bounded(monkeypatch):
    """Drafts that are always wrong leave the state where it is, until a pass only advances it."""
    monkeypatch.setattr(state_cache, "WIDEST_DRAFT", 4)
    runtime = runtime_of()
    expected = theirs(runtime.model, PROMPT)
    passes = passes_of(monkeypatch, runtime)
    assert run(runtime, RandomTree(61, (1, 1, 1)), PROMPT, ROOM)[0] == expected
    widths = [width for _, width in passes[1:]]
    assert max(widths) == 4 + 1 + 3  # at most four known tokens, the last one and three drafted ones
    assert widths.count(5) > 2  # passes that advance
    slots = [slot for slot, _ in passes]
    assert len(set(slots)) > 5


@pytest.mark.parametrize(
    "name", ["qwen3_5_text", *(pytest.param(name, marks=pytest.mark.long("other kinds of states")) for name in OTHERS)]
)
def test_an_error_between_any_two_steps_changes_no_text(monkeypatch, name):
    runtime = runtime_of(name)
    expected = theirs(runtime.model, PROMPT)
    drafter = LayerSkipDrafter(runtime, PATH, AdaptiveThreshold())
    for error_at in range(0, 20, 4):
        with monkeypatch.context() as patch:
            passes_of(patch, runtime, error_at)
            seq = SequenceState(list(PROMPT), ROOM, Sampler())
            with pytest.raises(RuntimeError, match="broken"):
                list(decode(runtime, drafter, seq, reuse=True))
        rest = SequenceState(list(seq.tokens), ROOM + len(PROMPT) - len(seq.tokens), Sampler())
        list(decode(runtime, drafter, rest, reuse=True))
        assert rest.tokens[len(PROMPT) :] == expected


def test_another_text_with_the_same_start_is_computed_from_the_start(monkeypatch):
    runtime = runtime_of()
    list(decode(runtime, PlainDrafter(), SequenceState(list(PROMPT), ROOM, Sampler()), reuse=True))
    passes = passes_of(monkeypatch, runtime)
    other = [*PROMPT[:5], 7, 8]
    seq = SequenceState(list(other), 4, Sampler())
    list(decode(runtime, PlainDrafter(), seq, reuse=True))
    assert passes[0] == (0, 7)
    assert seq.tokens == [*other, *plain(runtime, other, 4)]


def test_a_larger_cache_keeps_states():
    runtime = runtime_of().with_new_cache()
    tokens = torch.tensor([PROMPT])
    with runtime.session(16):
        runtime.forward(tokens, 0)
        runtime.cache.commit(0, range(len(PROMPT) - 1))
        before = runtime.cache
        runtime.reserve(before.slots + 1)
        assert runtime.cache.verified[0].length == len(PROMPT)
        assert runtime.cache.token_ids[0, : len(PROMPT)].tolist() == PROMPT
        assert runtime.cache.slots > before.slots
        assert runtime.cache.bytes > sum(t.numel() * t.element_size() for t in runtime.cache.keys) * 2


def test_a_copied_row_has_no_state_of_another_text():
    runtime = runtime_of().with_new_cache(rows=2)
    tokens = torch.tensor([[*PROMPT, 5, 6, 7, 8, 9]])
    with runtime.session(32):
        for row, part in ((0, tokens), (1, tokens.flip(1))):
            runtime.forward(part, 0, rows=slice(row, row + 1))
            runtime.cache.commit(row, range(part.shape[1] - 1))
        runtime.cache.copy(0, 1, 0, 12)
        runtime.cache.rewind(1, 12)
        ours = runtime.forward(tokens[:, 12:], 12, rows=slice(1, 2)).logits
        theirs_ = runtime.model(tokens, use_cache=False).logits[:, 12:]
    torch.testing.assert_close(ours, theirs_, atol=1e-4, rtol=1e-4)


def test_masks_and_single_sub_layers_are_refused():
    runtime = runtime_of()
    with runtime.session(8):
        with pytest.raises(UnsupportedModelError, match="takes no attention mask per token; expected a chain"):
            runtime.forward(torch.tensor([[1, 2]]), 0, mask=torch.ones(1, 2, 2, dtype=torch.bool))
        with pytest.raises(UnsupportedModelError, match="expected a chain of tokens, without a mask"):
            runtime.forward(torch.tensor([[1, 2]]), torch.tensor([[3, 3]]), slots=torch.tensor([[3, 4]]))
        with pytest.raises(UnsupportedModelError, match="layers with a state, which cannot run alone"):
            runtime.branch(0, "mlp", torch.zeros(1, 1, 32, dtype=torch.float64), 0)
