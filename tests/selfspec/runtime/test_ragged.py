"""Passes over drafts of several sequences: each gives what it gives alone; natively, bit for bit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import needs_native
from lowering import random_path
from models import run, threads
from natives import LAYERS, MODELS, WORDS, N, bits, model_of, random_tree, tokens_for
from trained import random_trained

from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter, LookupDrafter, ModelDrafter, PlainDrafter, RecycleDrafter
from selfspec.engine.engine import Engine
from selfspec.models.kernels import native
from selfspec.proposers.lookup import Lookup
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.drafts import Draft
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.speculation.tree_batch import PlacedDraft
from selfspec.types.draft_path import FULL, DraftPath

pytestmark = needs_native

ROWS = 5
SEEDS = st.integers(0, 9999)
each_model = pytest.mark.parametrize("name", MODELS)
each_dtype = pytest.mark.parametrize("name", ["llama", "llama in bfloat16"])
BRIDGED = DraftPath.from_modes(["int8", "skip", "full", "full", "skip", "full"])
PATHS = {
    "in full": lambda seed: FULL,
    "any": lambda seed: random_path(seed, LAYERS, words=WORDS),
    "8 bits": lambda seed: DraftPath.from_modes(["int8"] * 2 * LAYERS, head="int8"),
    "4 bits": lambda seed: DraftPath.from_modes(["int4", "skip", "int4", "int4", "int4", "full"], head="int8"),
    "bridged": lambda seed: replace(BRIDGED, trained="bridges"),
}
made = {}


def runtime_of(name):
    """A model natively, made once, with bridges at hand."""
    if name not in made:
        made[name] = LeanRuntime(model_of(name), rows=ROWS, kernel=native)
        made[name].register_trained("bridges", random_trained(made[name], BRIDGED, rank=16, seed=1, size=0.05))
    return made[name]


def placed_of(chance, most):
    """Drafts below texts of any length in some rows, in any order: chains and trees, of up to so many tokens."""
    found = []
    for row in chance.sample(range(ROWS), chance.randint(1, ROWS)):
        draft = random_tree(chance, chance.randint(0, most))
        if chance.random() < 0.5:
            draft = Draft.chain(draft.tokens)
        found.append(PlacedDraft(row, chance.randrange(WORDS), chance.randrange(N - most), draft))
    return found


def written(runtime, placed):
    """Keys and values of what was placed."""
    cache, (row, _, start, draft) = runtime.cache, placed
    return [t[row, :, start : start + 1 + len(draft)].clone() for t in (*cache.keys, *cache.values)]


def fill(runtime):
    for row in range(runtime.rows):
        runtime.forward(tokens_for(row), 0, rows=slice(row, row + 1), logits=None)


def assert_same(ours, theirs):
    assert torch.equal(ours.logits, theirs.logits)
    assert list(ours.hidden) == list(theirs.hidden)
    assert bits(ours.hidden.values(), theirs.hidden.values())


@each_model
@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=examples(4))
@given(seed=SEEDS, several=st.sampled_from([1, 2, 3]), most=st.sampled_from([3, 40]))
def test_each_draft_gives_the_bits_that_it_gives_alone(name, path, seed, several, most):
    runtime, placed = runtime_of(name), placed_of(random.Random(seed), most)
    compiled = runtime.compile(PATHS[path](seed))
    with runtime.session(N):
        fill(runtime)
        alone = [runtime.forward_drafts([one], path=compiled, hidden=(1, LAYERS))[0] for one in placed]
        kept = [written(runtime, one) for one in placed]
        fill(runtime)
        with threads(several):
            together = runtime.forward_drafts(placed, path=compiled, hidden=(1, LAYERS))
        assert all(bits(written(runtime, one), mine) for one, mine in zip(placed, kept, strict=True))
    for ours, theirs, one in zip(together, alone, placed, strict=True):
        assert ours.logits.shape[:2] == (1, 1 + len(one.draft))
        assert_same(ours, theirs)


@each_model
@pytest.mark.parametrize("path", ["in full", "8 bits"])
def test_a_wide_chain_gives_the_bits_of_one_token_at_a_time(name, path):
    """More rows than a tile has lines, in full and in few bits: also along a row that others stand beside."""
    runtime = runtime_of(name)
    compiled, tokens = runtime.compile(PATHS[path](0)), tokens_for(7, 70)
    chain = PlacedDraft(2, int(tokens[0, 0]), 0, Draft.chain(tokens[0, 1:].tolist()))
    with runtime.session(N):
        rows = slice(1, 2)
        steps = [runtime.forward(tokens[:, i : i + 1], i, rows=rows, path=compiled) for i in range(70)]
        assert compiled.native is None or compiled.batch_invariant_head is not None
        for beside in ([], [PlacedDraft(0, 5, 0)]):
            step = runtime.forward_drafts([*beside, chain], path=compiled)[-1]
            if compiled.native is not None:
                assert torch.equal(step.logits, torch.cat([one.logits for one in steps], 1))


@each_dtype
def test_a_tree_is_what_a_mask_says(name):
    """`over` tells of a tree's own slots alone, `forward` of all."""
    runtime = runtime_of(name)
    draft = random_tree(random.Random(3), 12)
    mask = torch.ones(1, 13, 30 + 13, dtype=torch.bool)
    for node in range(-1, 12):
        mask[0, node + 1, 31:] = torch.tensor([i in draft.path_to(node) for i in range(12)])
    positions = torch.tensor([[30, *(30 + depth for depth in draft.depths)]])
    with runtime.session(N):
        fill(runtime)
        (ours,) = runtime.forward_drafts([PlacedDraft(1, 4, 30, draft)])
        tokens = torch.tensor([[4, *draft.tokens]])
        theirs = runtime.forward(tokens, positions, slots=30, mask=mask, rows=slice(1, 2))
    assert torch.equal(ours.logits, theirs.logits)


def test_without_logits_keys_are_written_and_streams_kept():
    runtime = runtime_of("llama")
    placed = [PlacedDraft(0, 4, 10, Draft.chain([1, 2, 3])), PlacedDraft(3, 5, 2, Draft.chain([9] * 20))]
    with runtime.session(N):
        fill(runtime)
        told = runtime.forward_drafts(placed, hidden=(2,))
        kept = [written(runtime, one) for one in placed]
        fill(runtime)
        untold = runtime.forward_drafts(placed, hidden=(2,), logits=False)
        assert all(bits(written(runtime, one), mine) for one, mine in zip(placed, kept, strict=True))
    for ours, theirs in zip(untold, told, strict=True):
        assert ours.logits is None
        assert torch.equal(ours.hidden[2], theirs.hidden[2])


@pytest.mark.parametrize("layout", ["native", "rows"])
def test_operation_by_operation_it_is_the_same_interface(layout):
    """Padded, each draft's part is near what it is alone."""
    runtime = LeanRuntime(model_of("llama", layout), rows=ROWS)
    assert (runtime.compile(FULL).native is None) == (layout == "rows")
    placed = placed_of(random.Random(1), 12)
    with runtime.session(N):
        fill(runtime)
        for one, step in zip(placed, runtime.forward_drafts(placed, hidden=(0, LAYERS)), strict=True):
            (alone,) = runtime.forward_drafts([one], hidden=(0, LAYERS))
            assert step.logits.shape == alone.logits.shape
            torch.testing.assert_close(step.logits, alone.logits, atol=1e-3, rtol=1e-4)
            torch.testing.assert_close(step.hidden, alone.hidden, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        PlacedDraft(0, 1, -1),
        PlacedDraft(0, 1, 127, Draft.chain([1, 2])),
        PlacedDraft(0, 1, 300),
        PlacedDraft(0, 1, 127, random_tree(random.Random(0), 4)),
    ],
)
def test_places_that_there_are_not_are_refused(wrong):
    runtime = runtime_of("llama")
    with runtime.session(N), pytest.raises(RuntimeError, match="position or slot .*: expected 0 to 127"):
        runtime.forward_drafts([PlacedDraft(1, 1, 3), wrong])


DRAFTERS = {
    "plain": lambda runtime: PlainDrafter(),
    "path": lambda runtime: LayerSkipDrafter(runtime, DraftPath.skipping([1], [1]), FixedK(4), candidates=3),
    "8 bits": lambda runtime: LayerSkipDrafter(runtime, PATHS["8 bits"](0), FixedK(3)),
    "tree": lambda runtime: RecycleDrafter(FixedK(5), candidates=3),
    "lookup": lambda runtime: LookupDrafter([Lookup()], FixedK(5)),
    "draft model": lambda runtime: ModelDrafter(runtime, LeanRuntime(model_of("llama"), kernel=native), FixedK(4)),
}


@each_dtype
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_sequences_together_have_the_bits_that_they_have_alone(name, make):
    """And plainly: the logits that each token was told by, whatever is drafted and whoever joins and leaves."""
    runtime = runtime_of(name)
    prompts, rooms = [tokens_for(seed, 3 + 5 * seed)[0].tolist() for seed in range(6)], [20, 9, 14, 30, 3, 17]

    def told(outcomes):
        return torch.cat([o.step.logits[0, [0, *(1 + node for node in o.path)][: len(o.tokens)]] for o in outcomes])

    alone = [run(runtime, PlainDrafter(), prompt, room) for prompt, room in zip(prompts, rooms, strict=True)]
    seqs = [SequenceState(list(prompt), room, Sampler()) for prompt, room in zip(prompts, rooms, strict=True)]
    found, waiting = {seq: [] for seq in seqs}, list(seqs)
    with Engine(runtime, make(runtime)) as engine:
        while waiting or engine.running:
            while waiting and len(engine.running) < ROWS:
                engine.join(waiting.pop(0))
            for seq, outcome in engine.step():
                found[seq].append(outcome)
    for seq, prompt, (tokens, outcomes) in zip(seqs, prompts, alone, strict=True):
        assert seq.tokens[len(prompt) :] == tokens
        assert torch.equal(told(found[seq]), told(outcomes))
