"""A cache in blocks: passes that read it have the bits of those that read rows, wherever blocks lie."""

from __future__ import annotations

import random

import pytest
import torch
from amount import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layouts import needs_native
from lowering import random_path
from models import plain, run, small, threads
from natives import LAYERS, MODELS, WORDS, N, bits, model_of, random_tree, tokens_for

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK
from selfspec.drafters import ClaspDrafter, LayerSkipDrafter, ModelDrafter, PlainDrafter, RecycleDrafter
from selfspec.models.kernels import native
from selfspec.runtime.forward import LeanRuntime
from selfspec.runtime.paged import BLOCK
from selfspec.speculation.drafts import Draft
from selfspec.speculation.tree_batch import PlacedDraft
from selfspec.types.draft_path import FULL, DraftPath
from selfspec.types.methods import WIDEST_DRAFT

pytestmark = needs_native

ROWS, BLOCKS = 3, 16
SEEDS = st.integers(0, 9999)
each_model = pytest.mark.parametrize("name", MODELS)
each_dtype = pytest.mark.parametrize("name", ["llama", "llama in bfloat16"])
made = {}


def both(name):
    """The same model over rows and over blocks."""
    if name not in made:
        rows = LeanRuntime(model_of(name, max_position_embeddings=1024), rows=ROWS, kernel=native)
        made[name] = rows, rows.with_new_cache(rows=ROWS, blocks=BLOCKS)
    return made[name]


def hand_out(cache, chance, each=5):
    """Blocks in any order to every row."""
    numbers = chance.sample(range(cache.blocks), cache.rows * each)
    for row in range(cache.rows):
        cache.tables[row][:] = numbers[row * each : (row + 1) * each]


def held(runtime, row, end):
    """Keys `[L, H_kv, d, end]` and values `[L, H_kv, end, d]` of a row's first slots."""
    cache = runtime.cache
    if runtime.pool is None:
        keys, values = torch.stack(cache.keys)[:, row].transpose(-1, -2), torch.stack(cache.values)[:, row]
    else:
        table = cache.tables[row]
        keys, values = torch.cat(list(cache.keys[:, table].unbind(1)), -1), cache.values[:, table]
        values = torch.cat(list(values.unbind(1)), -2)
    return [keys[..., :end].clone(), values[..., :end, :].clone()]


def read(runtime, tokens, row, start=0, **options):
    """Logits of tokens read by few at once, as any native pass reads them."""
    rows = slice(row, row + 1)
    steps = [
        runtime.forward(tokens[:, i : i + 16], start + i, rows=rows, **options) for i in range(0, tokens.shape[1], 16)
    ]
    return torch.cat([step.logits for step in steps], 1)


@each_model
@settings(max_examples=examples(4))
@given(seed=SEEDS, n=st.integers(1, 260), several=st.sampled_from([1, 2]), skipping=st.booleans())
@example(seed=442, n=1, several=1, skipping=True)  # every sub-layer is skipped
def test_a_text_has_the_bits_that_it_has_in_rows(name, seed, n, several, skipping):
    """However many tokens come at once; then drafts of all rows at once, and a tree's path is kept.

    Drafts along a path that skips too; quantised ones read int8 copies of keys and values, which a paged cache has not.
    """
    chance, (rows, pool) = random.Random(seed), both(name)
    path = DraftPath(random_path(seed, LAYERS).skip) if skipping else FULL
    tokens = [tokens_for(seed + row, n) for row in range(ROWS)]
    drafts = [random_tree(chance, chance.randint(0, 20)) for _ in range(ROWS)]
    paths = [d.path_to(chance.randrange(-1, len(d))) for d in drafts]
    placed = [PlacedDraft(row, 7, n, draft) for row, draft in enumerate(drafts)]
    found = []
    with rows.session(N + 260), pool.session(N + 260):
        hand_out(pool.cache, chance)
        for row in range(ROWS):
            mine = pool.forward(tokens[row], 0, rows=slice(row, row + 1), path=pool.compile(path)).logits
            assert torch.equal(mine, read(rows, tokens[row], row, path=rows.compile(path)))
            pool.forward(tokens[row], 0, rows=slice(row, row + 1), logits=None)
            read(rows, tokens[row], row)
            assert bits(held(pool, row, n), held(rows, row, n))
        for runtime in (rows, pool):
            with threads(several if runtime is pool else 1):
                steps = runtime.forward_drafts(placed, hidden=(1,), path=runtime.compile(path))
                steps += runtime.forward_drafts(placed, hidden=(1,))
            for row, kept in enumerate(paths):
                runtime.cache.length[row] = n
                runtime.cache.commit(row, kept)
            after = [
                runtime.forward_drafts([PlacedDraft(row, 5, n + 1 + len(kept))])[0] for row, kept in enumerate(paths)
            ]
            found.append([t for s in (*steps, *after) for t in (s.logits, *s.hidden.values())])
        assert pool.cache.length == rows.cache.length == [n + 1 + len(kept) for kept in paths]
        for row, kept in enumerate(paths):
            assert bits(held(pool, row, n + 2 + len(kept)), held(rows, row, n + 2 + len(kept)))
    assert bits(*found)


@each_dtype
def test_rows_may_share_the_blocks_of_what_they_begin_with(name):
    """One has read it; the others go on behind it, each with the bits of all of it."""
    rows, pool = both(name)
    start = tokens_for(0, 2 * BLOCK)
    rest = [tokens_for(1 + row, 30) for row in range(ROWS)]
    with rows.session(200), pool.session(200):
        for row in range(ROWS):
            pool.cache.tables[row][:] = [9, 3, 5 + row]
        pool.forward(start, 0, rows=slice(0, 1), logits=None)
        for row in range(ROWS):
            ours = pool.forward(rest[row], 2 * BLOCK, rows=slice(row, row + 1)).logits
            read(rows, start, row)
            assert torch.equal(ours, read(rows, rest[row], row, 2 * BLOCK))
        together = pool.forward_drafts(
            [PlacedDraft(row, 1, 2 * BLOCK + 30, Draft.chain([2, 3])) for row in range(ROWS)]
        )
        theirs = rows.forward_drafts([PlacedDraft(row, 1, 2 * BLOCK + 30, Draft.chain([2, 3])) for row in range(ROWS)])
    assert bits([step.logits for step in together], [step.logits for step in theirs])


@each_dtype
def test_a_table_may_change_between_passes(name):
    """Blocks are added, and others, with what they hold, put in their places."""
    rows, pool = both(name)
    tokens = tokens_for(4, 150)
    with rows.session(200), pool.session(200):
        expected = read(rows, tokens, 1)
        pool.cache.tables[1][:] = [2]
        parts = [pool.forward(tokens[:, :60], 0, rows=slice(1, 2)).logits]
        pool.cache.tables[1] += [7, 0]
        parts.append(pool.forward(tokens[:, 60:140], 60, rows=slice(1, 2)).logits)
        pool.cache.keys[:, 11], pool.cache.values[:, 11] = pool.cache.keys[:, 7], pool.cache.values[:, 7]
        pool.cache.keys[:, 7] = pool.cache.values[:, 7] = 3.0
        pool.cache.tables[1][1] = 11
        parts.append(pool.forward(tokens[:, 140:], 140, rows=slice(1, 2)).logits)
    assert torch.equal(torch.cat(parts, 1), expected)


@each_dtype
def test_what_a_long_prefill_gives(name):
    """Logits of all, of the last or of none, and streams; near those of torch's operations."""
    rows, pool = both(name)
    tokens = tokens_for(2, 300)
    with rows.session(300), pool.session(300):
        hand_out(pool.cache, random.Random(0))
        steps = {
            logits: pool.forward(tokens, 0, rows=slice(2, 3), logits=logits, hidden=(0, LAYERS))
            for logits in ("all", "last", None)
        }
        theirs = rows.forward(tokens, 0, rows=slice(2, 3), hidden=(0, LAYERS))
    assert steps[None].logits is None
    assert steps["all"].logits.shape == (1, 300, WORDS)
    assert torch.equal(steps["last"].logits, steps["all"].logits[:, -1:])
    assert all(bits(step.hidden.values(), steps["all"].hidden.values()) for step in steps.values())
    assert steps["all"].hidden[LAYERS].shape == theirs.hidden[LAYERS].shape
    ours, scale = steps["all"].logits.float(), theirs.logits.float().abs().max()
    error = 0.1 if "bfloat16" in name else 1e-4
    torch.testing.assert_close(ours / scale, theirs.logits.float() / scale, atol=error, rtol=0)


def test_how_many_slots_there_are():
    """A row may have the model's context and a draft, or all blocks; within a session, only those of its table."""
    rows, pool = both("llama")
    assert pool.cache.slots == BLOCKS * BLOCK
    many = rows.with_new_cache(rows=2, blocks=40)
    assert many.cache.slots == 1024 + WIDEST_DRAFT
    s = rows.skeleton.sizes
    assert pool.cache.bytes == 2 * LAYERS * BLOCKS * BLOCK * s.kv_heads * s.head_dim * 4
    with pytest.raises(SelfspecError, match="1025 slots requested; expected at most 1024"):
        pool.session(1025).__enter__()
    with pool.session(10):
        pool.cache.tables[0][:] = [3]
        pool.forward(tokens_for(0, BLOCK), 0, rows=slice(0, 1))
        for wrong in (
            lambda: pool.forward(tokens_for(0, 1), BLOCK, rows=slice(0, 1)),
            lambda: pool.forward_drafts([PlacedDraft(0, 1, BLOCK)]),
        ):
            with pytest.raises(RuntimeError, match="position or slot 64: expected 0 to 63"):
                wrong()
        for table in ([3, BLOCKS], [-1]):
            pool.cache.tables[0][:] = table
            with pytest.raises(SelfspecError, match="block table of row 0: .*; expected numbers from 0 to 15"):
                pool.forward(tokens_for(0, 1), 0, rows=slice(0, 1))


def test_what_cannot_be_had():
    rows, pool = both("llama")
    with pytest.raises(SelfspecError, match="paged KV cache: this model has no native passes"):
        LeanRuntime(small(), blocks=4)
    with pytest.raises(SelfspecError, match="paged KV cache: this model has no native passes"):
        LeanRuntime(model_of("llama", "rows")).with_new_cache(blocks=4)
    with pytest.raises(SelfspecError, match="3 tables of 16 blocks; expected 2 tables"):
        rows.with_new_cache(rows=2, pool=pool.cache.pool)
    with pool.session(10):
        pool.cache.tables[0][:] = [3]
        for wrong in (
            lambda: pool.forward(tokens_for(0, 3), 0, rows=slice(0, 1), between=(1,)),
            lambda: pool.branch(0, "attention", torch.zeros(1, 1, 64), 0, rows=slice(0, 1)),
        ):
            with pytest.raises(SelfspecError, match="expected a native pass or a static cache"):
                wrong()


DRAFTERS = {
    "plain": lambda runtime: PlainDrafter(),
    "path": lambda runtime: LayerSkipDrafter(runtime, DraftPath.skipping([1], [1]), FixedK(4), candidates=3),
    "tree": lambda runtime: RecycleDrafter(FixedK(5), candidates=3),
    "draft model": lambda runtime: ModelDrafter(
        runtime, LeanRuntime(model_of("llama", max_position_embeddings=1024), kernel=native), FixedK(4)
    ),
}


@each_dtype
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_decoding_goes_on_in_blocks(name, make):
    """Texts one after the other in the same row, whose blocks change, also in order, in between."""
    _, pool = both(name)
    drafter = make(pool)
    for seed, table in enumerate([[1, 2, 3], [3, 2, 1], [1, 2, 3], [2, 5, 9]]):
        prompt = tokens_for(seed % 2, 70 + 10 * seed)[0].tolist()
        pool.cache.tables[0][:] = [4, 8, 12]
        expected = plain(pool, prompt, 30)
        pool.cache.tables[0][:] = table
        assert run(pool, drafter, prompt, 30)[0] == expected


def test_a_draft_model_reads_its_own_keys_in_the_targets_blocks(monkeypatch):
    """It is the target itself, so that all is accepted: also what begins as a text before it did, in other blocks."""
    _, pool = both("llama")
    drafter = ModelDrafter(pool, pool, FixedK(3))
    assert drafter.runtime.cache.tables is pool.cache.tables
    assert drafter.runtime.cache.keys.data_ptr() != pool.cache.keys.data_ptr()
    prompt = tokens_for(3, 80)[0].tolist()
    for table, text in (([1, 2], prompt), ([2, 1], prompt), ([1, 2], [*prompt[:50], 1, 2, 3])):
        pool.cache.tables[0][:] = table
        _, outcomes = run(pool, drafter, text, 20)
        assert all(outcome.accepted == len(outcome.draft) for outcome in outcomes)


def test_what_needs_streams_inside_layers_says_so():
    _, pool = both("llama")
    drafter = ClaspDrafter(pool, FixedK(3), skip=2, every=1)
    pool.cache.tables[0][:] = [1, 2]
    with pytest.raises(SelfspecError, match="expected a native pass or a static cache"):
        run(pool, drafter, tokens_for(0, 20)[0].tolist(), 20)
