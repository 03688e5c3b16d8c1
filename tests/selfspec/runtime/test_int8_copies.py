"""Int8 copies of keys and values, which quantised drafts read, and attention over many slots."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache as cached

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import needs_native
from models import threads
from natives import LAYERS, MODELS, model_of, random_tree, tokens_for

from selfspec.runtime.base import Runtime
from selfspec.runtime.cache import Int8Copies
from selfspec.runtime.forward import COPIED, LeanRuntime
from selfspec.speculation.drafts import NO_DRAFT, Draft
from selfspec.speculation.tree_batch import PlacedDraft
from selfspec.types.draft_path import FULL, DraftPath

pytestmark = needs_native
LOW = DraftPath.from_modes(["int8"] * 2 * LAYERS, head="int8")
N = 700


@cached
def runtime_of(name: str) -> Runtime:
    return LeanRuntime(model_of(name, max_position_embeddings=N), rows=2)


def drafted(runtime, tokens, start, row):
    return runtime.forward(tokens, start, path=runtime.compile(LOW), rows=slice(row, row + 1)).logits


@pytest.mark.parametrize("name", ["llama", "llama-mqa-tied", "llama in bfloat16"])
def test_copies_are_near_what_they_copy(name):
    runtime = runtime_of(name)
    tokens = tokens_for(0, 90)
    with runtime.session(N):
        runtime.forward(tokens[:, :80], 0, logits=None, rows=slice(1, 2))
        drafted(runtime, tokens[:, 80:], 80, 1)
        copies = runtime.cache.copies
        assert copies.valid == [[0] * LAYERS, [80] * LAYERS]
        for layer in range(LAYERS):
            keys, values = (t[layer][1, :, :90].float() for t in (runtime.cache.keys, runtime.cache.values))
            scales = copies.scales[:, layer, 1].flatten(1).view(2, len(keys), -1)[..., :90]
            mine = copies.keys[layer, 1].transpose(-1, -2).flatten(1, 2)[:, :90].float() * scales[0].unsqueeze(-1)
            theirs = copies.values[layer, 1].flatten(1, 2)[:, :90].float() * scales[1].unsqueeze(-1)
            for full, copy in ((keys, mine), (values, theirs)):
                assert ((full - copy).abs() <= full.abs().amax(-1, keepdim=True) / 253).all()


def test_where_copies_take_too_much_memory_drafts_read_the_full_cache():
    runtime, tokens = runtime_of("llama").with_new_cache(rows=2), tokens_for(0, 90)
    full = replace(runtime.compile(LOW), int8_cache=False)
    runtime.max_copy_bytes = 0
    with runtime.session(90):
        runtime.forward(tokens[:, :80], 0, logits=None, rows=slice(1, 2))
        of_full = runtime.forward(tokens[:, 80:], 80, path=full, rows=slice(1, 2)).logits
        cache = runtime.cache
        needed = Int8Copies.size(torch.stack(cache.values))
        for limit in (0, needed - 1):
            cache.max_copy_bytes = limit
            assert torch.equal(drafted(runtime, tokens[:, 80:], 80, 1), of_full)
            assert (cache.copies, cache.copy_bytes) == (None, 0)
        cache.max_copy_bytes = needed
        assert not torch.equal(drafted(runtime, tokens[:, 80:], 80, 1), of_full)
        assert cache.copy_bytes == cache.copies.bytes == needed


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 9999), name=st.sampled_from(["llama", "qwen2 in bfloat16"]))
def test_drafts_never_read_a_copy_of_what_was_overwritten(seed, name):
    """Whatever came before: passes in full, drafts, trees, moved slots, another row, a cache that grew."""
    runtime, chance = runtime_of(name), random.Random(seed)
    used, fresh = runtime.with_new_cache(rows=2), runtime.with_new_cache(rows=2)
    texts = [tokens_for(seed + row, 240)[0].tolist() for row in range(2)]
    length = [20, 30]
    with used.session(240), fresh.session(N):
        for row in range(2):
            used.forward(torch.tensor([texts[row][: length[row]]]), 0, logits=None, rows=slice(row, row + 1))
            drafted(used, tokens_for(seed + 5, 2), length[row], row)
        for _ in range(12):
            row = chance.randrange(2)
            rows, n = slice(row, row + 1), chance.randint(1, 12)
            here = torch.tensor([texts[row][length[row] : length[row] + n]])
            match chance.choice(["full", "full", "draft", "draft", "tree", "rewrite", "copy", "grow"]):
                case "full":
                    used.forward(here, length[row], rows=rows)
                    length[row] += n
                case "draft":
                    drafted(used, tokens_for(seed + 7, n), length[row], row)
                case "tree":
                    tree = random_tree(chance, 6)
                    placed = PlacedDraft(row, texts[row][length[row]], length[row], tree)
                    used.forward_drafts([placed])
                    used.cache.length[row] = length[row]
                    path = [node for node in range(6) if tree.parents[node] == -1][:1]
                    used.cache.commit(row, path)
                    length[row] += 1
                    texts[row][length[row] : length[row] + len(path)] = [tree.tokens[node] for node in path]
                    length[row] += len(path)
                case "rewrite":
                    length[row] = chance.randint(0, length[row])
                    texts[row][length[row] :] = tokens_for(chance.randrange(9999), 240 - length[row])[0].tolist()
                case "copy" if length[row]:
                    used.cache.copy(row, 1 - row, 0, length[row])
                    texts[1 - row][: length[row]] = texts[row][: length[row]]
                    length[1 - row] = length[row]
                case "grow":
                    used.cache.length = list(length)
                    used.reserve(used.cache.slots + 1)
        for row in range(2):
            rows = slice(row, row + 1)
            if length[row]:
                fresh.forward(torch.tensor([texts[row][: length[row]]]), 0, logits=None, rows=rows)
                for t, own in ((fresh.cache.keys, used.cache.keys), (fresh.cache.values, used.cache.values)):
                    for mine, theirs in zip(t, own, strict=True):
                        mine[row, :, : length[row]] = theirs[row, :, : length[row]]
            step = tokens_for(seed + 3, 4)
            assert torch.equal(drafted(used, step, length[row], row), drafted(fresh, step, length[row], row))


def test_a_pass_that_is_refused_spoils_no_copies():
    runtime = runtime_of("llama").with_new_cache(rows=2)
    tokens, rows = tokens_for(0, 40), slice(0, 1)
    with runtime.session(60):
        runtime.forward(tokens[:, :32], 0, logits=None, rows=rows)
        expected = drafted(runtime, tokens[:, 32:34], 32, 0)
        for start in (-1, 500):
            for refused in (
                lambda start=start: drafted(runtime, tokens[:, 32:34], start, 0),
                lambda start=start: runtime.forward_drafts(
                    [PlacedDraft(1, 0, 3, NO_DRAFT), PlacedDraft(0, 0, start, NO_DRAFT)], path=runtime.compile(LOW)
                ),
            ):
                with pytest.raises(RuntimeError, match="position or slot"):
                    refused()
                assert min(runtime.cache.copies.valid[0]) >= 0
                assert runtime.cache.copies.valid[1] == [0] * LAYERS  # the pass of this row did not run either
                assert torch.equal(drafted(runtime, tokens[:, 32:34], 32, 0), expected)


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 9999))
def test_paths_that_skip_other_attentions_read_no_copies_that_none_of_them_made(seed):
    """Profiles with several drafts, and searches, run several paths over one cache; each copies its own layers."""
    chance = random.Random(seed)
    used, fresh = (runtime_of("llama").with_new_cache(rows=1) for _ in range(2))
    paths = [DraftPath.from_modes(chance.choices(["int8", "skip"], k=2 * LAYERS)) for _ in range(3)]
    tokens, length = tokens_for(seed, 200), 40
    with used.session(N), fresh.session(N):
        used.forward(tokens[:, :length], 0, logits=None)
        used.cache.copies.keys.fill_(99)
        used.cache.copies.scales.fill_(torch.nan)
        for _ in range(8):
            n, path = chance.randint(1, 8), chance.choice(paths)
            used.forward(tokens[:, length : length + n], length, path=used.compile(path))
            if chance.random() < 0.7:
                used.forward(tokens[:, length : length + n], length)
                length += n
        for path in paths:
            fresh.forward(tokens[:, :length], 0, logits=None)
            for mine, own in zip(
                fresh.cache.keys + fresh.cache.values, used.cache.keys + used.cache.values, strict=True
            ):
                mine[:, :, :length] = own[:, :, :length]
            step = tokens[:, 180:184]
            found, expected = (r.forward(step, length, path=r.compile(path)).logits for r in (used, fresh))
            assert torch.equal(found, expected)


def test_copies_of_a_long_prompt_are_made_before_the_first_draft():
    """By `warm_up`, which drafters call with the prompt; what it writes is read by no pass."""
    runtime = runtime_of("llama").with_new_cache(rows=2)
    tokens, rows = tokens_for(0, COPIED + 4), slice(0, 1)
    with runtime.session(COPIED + 10):
        for length, made in ((COPIED - 1, 0), (COPIED, COPIED)):
            runtime.forward(tokens[:, :length], 0, logits=None, rows=rows)
            expected = runtime.forward(tokens[:, length : length + 2], length, rows=rows).logits
            runtime.warm_up(runtime.compile(LOW), 0, length)
            assert min(*runtime.cache.copies.valid[0], length) == made
            assert torch.equal(runtime.forward(tokens[:, length : length + 2], length, rows=rows).logits, expected)


def test_a_prompt_that_fills_the_context_has_no_draft_to_prepare():
    runtime = runtime_of("llama").with_new_cache(rows=2)
    with runtime.session(N):
        runtime.forward(tokens_for(0, N), 0, logits=None, rows=slice(0, 1))
        assert runtime.cache.slots > N
        runtime.warm_up(runtime.compile(LOW), 0, N)
        assert runtime.cache.copies.valid[0] == [0] * LAYERS


@pytest.mark.parametrize("path", [FULL, LOW], ids=["full", "int8"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "qwen2"])
def test_over_many_slots_a_token_has_the_same_bits_alone_and_among_others(name, path):
    """With any number of threads, which share a head's slots; and nearly those of attention operation by operation."""
    runtime = runtime_of(name)
    prefix, tokens, compiled = tokens_for(0, 640), tokens_for(1, 16), runtime.compile(path)
    found = []
    with runtime.session(N):
        for several, widths in ((1, [1] * 16), (2, [16]), (2, [1] * 16), (3, [5, 8, 3]), (4, [2] * 8)):
            runtime.forward(prefix, 0, logits=None, rows=slice(0, 1))
            with threads(several):
                at, parts = 0, []
                for width in widths:
                    here = tokens[:, at : at + width]
                    parts.append(runtime.forward(here, 640 + at, path=compiled, rows=slice(0, 1)).logits)
                    at += width
            found.append(torch.cat(parts, 1))
        other = runtime.forward(tokens, 640, path=compiled, rows=slice(0, 1), between=(0,)).logits
    assert all(torch.equal(found[0], one) for one in found[1:])
    assert float((found[0] - other).float().norm()) < (0.1 if path is LOW else 0.06 if "bf" in name else 1e-4) * float(
        other.float().norm()
    )


@pytest.mark.parametrize("path", [FULL, LOW], ids=["full", "int8"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "qwen2"])
@pytest.mark.parametrize("start", [635, 640])
def test_over_many_slots_a_branch_of_a_tree_has_the_bits_of_its_chain(name, path, start):
    """The slots of a branch are not its positions, by whose parity products in bfloat16 are paired."""
    runtime, chance = runtime_of(name), random.Random(start)
    draft, branch = random_tree(chance, 20), [19]
    while draft.parents[branch[0]] >= 0:
        branch.insert(0, draft.parents[branch[0]])
    compiled, chain = runtime.compile(path), Draft.chain([draft.tokens[node] for node in branch])
    with runtime.session(N), threads(2):
        found = []
        for one in (draft, chain):
            runtime.forward(tokens_for(0, start), 0, logits=None, rows=slice(0, 1))
            found.append(runtime.forward_drafts([PlacedDraft(0, 7, start, one)], path=compiled)[0].logits)
    assert torch.equal(found[0][:, [0, *(1 + node for node in branch)]], found[1])
