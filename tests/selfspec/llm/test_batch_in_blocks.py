"""Batches over a pool of blocks, in float32: bit for bit what each prompt gives alone, however little memory is."""

from __future__ import annotations

import random

import pytest
from breaking import Breaking
from layouts import needs_native

import selfspec
from selfspec import builtin
from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter, MergedDrafter, ModelDrafter
from selfspec.engine.block_scheduler import PagedAllocator
from selfspec.llm import batch as batch_module
from selfspec.llm.batch import Batch
from selfspec.llm.batch_memory import copy_bytes, runtime_for, slot_bytes
from selfspec.llm.options import Options
from selfspec.runtime.cache import Int8Copies
from selfspec.runtime.paged import BLOCK
from selfspec.types.draft_path import DraftPath, SkipSet

pytestmark = needs_native

PROMPTS = [prompt[-200:] for prompt in builtin.prompts("heldout")[:5]]
LOW = DraftPath(SkipSet((3,), (7,)), int8=SkipSet(range(8, 16), range(8, 16)), head="int8")
GREEDY, SEEDED = Options(max_new_tokens=100), Options(max_new_tokens=100, temperature=0.9, seed=7)


@pytest.fixture(scope="module")
def llm():
    return selfspec.load("builtin", layout="native", profile="none")


def path(runtime):
    return LayerSkipDrafter(runtime, LOW, FixedK(3), candidates=2)


def memory_of(llm, blocks):
    return blocks * BLOCK * slot_bytes(llm.runtime) / 2**30


@pytest.mark.parametrize("how", [GREEDY, SEEDED], ids=["greedy", "match"])
@pytest.mark.parametrize("blocks", [None, 8], ids=["enough", "little"])
def test_each_gives_what_it_gives_alone(llm, how, blocks):
    memory = None if blocks is None else memory_of(llm, blocks)
    with Batch(llm, rows=4, memory=memory, make=path) as batch:
        assert isinstance(batch._engine.memory, PagedAllocator)
        requests = [batch.add(prompt, how) for prompt in PROMPTS]
        while not batch.idle:
            batch.step()
        assert batch.free == batch.num_slots
    assert [request.tokens for request in requests] == [llm.run(prompt, how).tokens for prompt in PROMPTS]
    if how is GREEDY:  # the others end too early to need more
        assert (batch.counters.evicted > 0) == (blocks is not None)


@pytest.mark.parametrize(
    ("quantised", "merges", "copied"), [(True, False, False), (True, True, True), (False, True, False)]
)
def test_a_cache_without_blocks_counts_the_copies_that_drafts_read(llm, monkeypatch, quantised, merges, copied):
    """Drafts merged to a tree read no blocks, and so read int8 copies of keys and values if they are quantised."""
    options = {}

    def make(runtime):
        drafter = LayerSkipDrafter(runtime, LOW if quantised else LOW.skip, FixedK(3))
        return MergedDrafter([drafter]) if merges else drafter

    def recorded(*args, **given):
        options.update(given)
        return runtime_for(*args, **given)

    monkeypatch.setattr(batch_module, "runtime_for", recorded)
    with Batch(llm, rows=2, memory=0.05, make=make) as batch:
        batch.add(PROMPTS[0], GREEDY)
        while not batch.idle:
            batch.step()
        cache = batch._runtime.cache
    sizes = llm.runtime.skeleton.sizes
    each = copy_bytes(llm.runtime.layers, sizes.kv_heads, sizes.head_dim) if copied else 0
    assert (options["blocks"], options["extra_slot_bytes"]) == (not merges, each)
    if copied:
        _, slots = cache.blocks_of(0)
        assert cache.copy_bytes == each * 2 * -(-slots // Int8Copies.BLOCK) * Int8Copies.BLOCK
    else:
        assert cache.copy_bytes == 0


def test_beginnings_are_shared_while_they_last_and_after(llm):
    system = "".join(builtin.prompts("heldout")[7:12])[:1600]
    texts = [system + f"\n\ndef number_{i}(" for i in range(3)]
    with Batch(llm, rows=3, make=path) as batch:
        alone = batch.add(texts[0], GREEDY)
        batch.step()
        used = batch.num_slots - batch.free
        others = [batch.add(text, GREEDY) for text in texts[1:]]
        batch.step()
        assert batch.num_slots - batch.free < 2 * used
        while not batch.idle:
            batch.step()
        again = batch.add(texts[0], GREEDY)
        while not batch.idle:
            batch.step()
    assert again.stats.num_cached >= len(llm.encode(system)) - 2 * BLOCK
    for request, text in zip((alone, *others, again), (*texts, texts[0]), strict=True):
        assert request.tokens == llm.run(text, GREEDY).tokens


def test_a_draft_model_has_the_same_blocks(llm):
    small = selfspec.load("builtin", layout="native", profile="none").runtime

    with Batch(llm, rows=3, memory=2 * memory_of(llm, 8), make=lambda rt: ModelDrafter(rt, small, FixedK(3))) as batch:
        assert batch.num_slots == 8 * BLOCK
        requests = [batch.add(prompt, GREEDY) for prompt in PROMPTS[:4]]
        while not batch.idle:
            batch.step()
    assert [request.tokens for request in requests] == [llm.run(prompt, GREEDY).tokens for prompt in PROMPTS[:4]]
    assert batch.counters.evicted
    assert batch.counters.accepted > 0.9 * batch.counters.drafted


@pytest.mark.parametrize("seed", range(3))
def test_whoever_comes_and_goes_nothing_is_lost_or_held(llm, seed):
    """Prompts of all lengths come, wait, are cancelled; memory for few of them."""
    draw = random.Random(seed)
    with Batch(llm, rows=3, memory=memory_of(llm, 8), make=path) as batch:
        requests = []
        for _ in range(60):
            if draw.random() < 0.3:
                prompt = draw.choice(PROMPTS)[-draw.randrange(10, 200) :]
                requests.append((prompt, n := draw.randrange(1, 30), batch.add(prompt, Options(max_new_tokens=n))))
            if requests and draw.random() < 0.1:
                batch.cancel(draw.choice(requests)[2])
            batch.step()
        while not batch.idle:
            batch.step()
        assert batch.free == batch.num_slots
    assert all(request.done and request.error is None for _, _, request in requests)
    for prompt, n, request in requests:
        expected = llm.run(prompt, Options(max_new_tokens=n)).tokens
        assert request.tokens == (expected if request.finish else expected[: len(request.tokens)])


class Broken(BaseException):
    """As Ctrl-C is, no `Exception`."""


@pytest.mark.parametrize("at", [2, 5, 9, 14])
def test_an_interrupt_anywhere_leaves_the_model_usable(llm, monkeypatch, at):
    """While some are read and others decoded: what had come is there, nobody else's text is another one."""
    breaking, requests = Breaking(Broken, at), []
    expected = [llm.run(prompt, GREEDY).tokens for prompt in PROMPTS[:3]]

    def broken_off():
        with batch:
            monkeypatch.setattr(batch._runtime, "forward_drafts", breaking.wrap(batch._runtime.forward_drafts))
            requests.extend(batch.add(prompt, GREEDY) for prompt in PROMPTS[:3])
            while not batch.idle:
                batch.step()

    batch = Batch(llm, rows=2, make=path)
    with pytest.raises(Broken):
        broken_off()
    assert batch.idle
    assert batch.free == batch.num_slots
    for request, tokens in zip(requests, expected, strict=True):
        assert request.tokens == tokens[: len(request.tokens)]
    with Batch(llm, rows=2, make=path) as batch:
        request = batch.add(PROMPTS[1], GREEDY)
        while not batch.idle:
            batch.step()
    assert request.tokens == expected[1]


@pytest.mark.parametrize("new", [1, 2])
def test_a_prompt_may_fill_all_blocks(llm, new):
    prompt = llm.encode("x = 1\n" * 300)[: 8 * BLOCK + 1 - new]
    with Batch(llm, rows=2, memory=memory_of(llm, 8), make=path) as batch:
        assert batch.num_slots == 8 * BLOCK
        request = batch.add(prompt, Options(max_new_tokens=new))
        for _ in range(20):
            batch.step()
        assert batch.idle
    assert request.tokens == llm.run(prompt, Options(max_new_tokens=new)).tokens


def test_who_was_preempted_in_a_round_that_fails_comes_back(llm, monkeypatch):
    """The round takes the blocks of one, then fails: that one waits, and is decoded."""
    with Batch(llm, rows=4, memory=memory_of(llm, 8), make=path) as batch:
        requests = [batch.add(prompt, GREEDY) for prompt in PROMPTS]
        limits, failed = batch._engine._limits, []

        def failing():
            found = limits()
            if batch._engine.preempted and not failed:
                failed.append(True)
                raise ValueError("no")
            return found

        monkeypatch.setattr(batch._engine, "_limits", failing)
        for _ in range(1000):
            if batch.idle:
                break
            batch.step()
        assert batch.idle
    assert failed
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert request.error is None
        assert request.tokens == llm.run(prompt, GREEDY).tokens
