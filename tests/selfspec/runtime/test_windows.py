"""Sliding windows past their length: what slots hide depends on where their tokens stand."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from layouts import needs_native
from models import SIZES, tiny
from natives import WINDOW as SHORT
from natives import model_of, tokens_for
from transformers import MistralConfig, Phi3Config

from selfspec.models.families.base import LayerSizes, Sizes
from selfspec.models.layout import apply_layout_
from selfspec.runtime.cache import ALL_ROWS, Cache
from selfspec.runtime.forward import LeanRuntime
from selfspec.runtime.native_bindings import NativePass
from selfspec.runtime.paged import BlockTables, PagedCache
from selfspec.speculation.drafts import Draft
from selfspec.speculation.tree_batch import PlacedDraft

WINDOW, N = 24, 48
WHOLE = {**SIZES, "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96}  # heads of 16


def cache(slots=32):
    one = {"kv_heads": 1, "group": 1, "slots": slots, "head_dim": 2, "dtype": torch.float32}
    return Cache(rows=2, **one, devices=[torch.device("cpu")], track_positions=True)


def blocks():
    sizes = Sizes(**dict.fromkeys((field.name for field in fields(LayerSizes)), 1), dtype=torch.float32)
    return PagedCache(sizes, 1, BlockTables(4), rows=2, slots=32, track_positions=True)


def test_committed_tokens_stand_at_their_slots_number():
    held = cache()
    held.length = [4, 0]
    held.set_positions(torch.tensor([[4, 5, 5, 6, 6]]), 4, 5, slice(0, 1))  # a root, and a tree of two branches
    assert held.positions[0, :9].tolist() == [0, 1, 2, 3, 4, 5, 5, 6, 6]
    held.commit(0, (1, 3))
    assert held.length == [7, 0]
    assert held.positions[0, :7].tolist() == list(range(7))
    assert held.positions[1].tolist() == list(range(len(held.positions[1])))


@pytest.mark.parametrize("held", [cache, blocks], ids=["rows", "blocks"])
def test_slots_that_a_row_takes_over_stand_at_their_number(held):
    """Nodes that were rejected stood there; of the slots from the new length on, nothing is said."""
    one = held()
    one.length = [4, 0]
    one.set_positions(torch.tensor([[4, 5, 5, 6, 6]]), 4, 5, slice(0, 1))
    one.rewind(0, 3)
    one.rewind(0, 8)
    assert one.length == [8, 0]
    assert one.positions[0, :8].tolist() == list(range(8))


def test_what_stands_near_enough_is_seen():
    held = cache()
    held.set_positions(torch.tensor([[8, 9], [3, 4]]), torch.tensor([[10, 11], [3, 4]]), 2, ALL_ROWS)
    near = held.window_mask(3, torch.tensor([[9], [4]]), 1, 12, ALL_ROWS)
    assert [row.nonzero().flatten().tolist() for row in near[:, 0]] == [[7, 8, 9, 10, 11], list(range(2, 12))]


@needs_native
@pytest.mark.parametrize(
    "config",
    [MistralConfig(**WHOLE, sliding_window=WINDOW), Phi3Config(**WHOLE, sliding_window=WINDOW)],
    ids=lambda config: config.model_type,
)
@torch.no_grad()
def test_native_passes_go_on_past_the_window(config, monkeypatch):
    model = tiny(config, dtype=torch.float32)
    tokens = torch.randint(61, (1, N), generator=torch.Generator().manual_seed(0))
    theirs = model(tokens, use_cache=False).logits
    apply_layout_(model, "native")
    runtime, natively, run = LeanRuntime(model), [], NativePass.run
    monkeypatch.setattr(NativePass, "run", lambda *given: (natively.append(given), run(*given))[1])
    with runtime.session(N):
        ours = [runtime.forward(tokens[:, at : at + 1], at).logits for at in range(N)]
    torch.testing.assert_close(torch.cat(ours, 1) / theirs.abs().max(), theirs / theirs.abs().max(), atol=1e-4, rtol=0)
    assert len(natively) == N


DEEP = 20  # more than the window
LONE = tuple(range(-1, DEEP - 1))  # a chain's parents
WINDOWED = ["qwen2-window", "gemma3", "cohere2"]  # some layers of each have a window


@needs_native
@pytest.mark.parametrize("name", WINDOWED)
def test_trees_deeper_than_the_window_are_those_of_operations(name):
    """Nodes hide the root and nodes far above them; then an eager pass reads the same positions."""
    draft = Draft(tuple(range(DEEP + 2)), (*LONE, -1, DEEP - 3), None, (-1,) * (DEEP + 2))
    found = []
    for layout in ("native", "rows"):
        runtime = LeanRuntime(model_of(name, layout))
        with runtime.session(80):
            runtime.forward(tokens_for(0, 30), 0, logits=None)
            (tree,) = runtime.forward_drafts([PlacedDraft(0, 5, 30, draft)])
            mask = torch.ones(1, 1, 30 + DEEP, dtype=torch.bool)
            after = runtime.forward(tokens_for(1, 1), 30 + DEEP, slots=29 + DEEP, mask=mask, between=(0,))
            found.append(torch.cat([tree.logits, after.logits], 1))
    assert DEEP > SHORT
    torch.testing.assert_close(*(logits / found[1].abs().max() for logits in found), atol=1e-4, rtol=0)


@needs_native
@pytest.mark.parametrize("name", WINDOWED)
def test_a_cache_in_blocks_hides_what_rows_hide(name):
    """Under any mask, too: positions of slots are kept for both."""
    rows = LeanRuntime(model_of(name), rows=2)
    pool = rows.with_new_cache(rows=2, blocks=4)
    draft, row = Draft((1, 2, 3, 4), (-1, 0, 0, -1), None, (-1,) * 4), slice(1, 2)
    mask = torch.rand(1, 3, 43, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[:, :, 40:] = True
    found = []
    for runtime in (rows, pool):
        with runtime.session(80):
            if runtime is pool:
                runtime.cache.tables[1][:] = [3, 1]
            for start in (0, 15):
                runtime.forward(tokens_for(start, 15), start, rows=row)
            runtime.forward_drafts([PlacedDraft(1, 5, 30, draft)])
            runtime.cache.length[1] = 30
            runtime.cache.commit(1, (0, 2))
            positions = torch.tensor([[33, 34, 34]])
            found.append(runtime.forward(tokens_for(3, 3), positions, slots=40, mask=mask, rows=row).logits)
            found[-1] = torch.cat([found[-1], runtime.forward(tokens_for(4, 1), 33, rows=row).logits], 1)
    assert torch.equal(*found)
