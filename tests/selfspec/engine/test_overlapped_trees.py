"""Rounds on the device that verify trees: drafted tokens, further candidates, and lookup tokens from the text there."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from device_rounds import VOCABULARY
from device_rounds import model as model
from device_rounds import switched_on as switched_on
from models import plain, run, tiny
from overlapping import CONTROLLERS, GAP, PATH, LaggingTree, assert_one_read_a_round, compared, device, host, looked_up
from transformers import MistralConfig

from selfspec.controllers import FixedK
from selfspec.drafters import Guard, LayerSkipDrafter, PlainDrafter
from selfspec.engine.engine import Engine
from selfspec.proposers.base import ProposerChain
from selfspec.proposers.lookup import Lookup
from selfspec.runtime.device_trees import MATCHED, TREE_ROWS, Texts
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import DRAFT_PATH


class Other(Lookup):
    """A proposer of lookup tokens that a device does not know."""


REPEATED = [1, 4, 2, 9, 3, 1, 4, 2, 9]
SAMPLERS = {"greedy": lambda: Sampler(), "match": lambda: Sampler(temperature=0.7, top_k=7, seed=3)}
TREES = {
    "lookup": {"proposer_chain": ProposerChain([Lookup()])},
    "candidates": {"candidates": 3},
    "both": {"proposer_chain": ProposerChain([Lookup()]), "candidates": 2},
}
every_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
every_tree = pytest.mark.parametrize("tree", TREES.values(), ids=TREES)


def trees(model, controller, sampler, tree, **options):
    """Both ways of decoding with trees, compared: the runtime, the text and the outcomes of the device."""
    return compared(model, controller, sampler, on_host=LaggingTree, drafting=tree, **options)


def shapes(runtime):
    """The tokens that captured rounds draft, their candidates, and their lookup tokens."""
    keys = [key for made in runtime.device_rounds._made.values() for key in made]
    return {(key.length, key.candidates, key.lookup) for key in keys}


@every_tree
@every_sampler
@pytest.mark.parametrize("name", ["1 tokens", "2 tokens", "6 tokens", "12 tokens", "static", "adaptive"])
def test_rounds_are_the_hosts(model, name, sampler, tree):
    runtime, _, rounds = trees(model, CONTROLLERS[name], sampler, tree, prompt=REPEATED, room=40)
    assert any(not one.draft.is_chain for one in rounds) or name == "12 tokens"
    assert all(length * candidates + (lookup or 0) < TREE_ROWS for length, candidates, lookup in shapes(runtime))


@every_sampler
def test_the_rate_optimal_controller(model, sampler):
    trees(model, CONTROLLERS["rate"], sampler, TREES["lookup"], prompt=REPEATED, room=40, confidence=GAP)


def test_each_branch_is_accepted_somewhere(model):
    """A further candidate, a lookup token where no drafted one is right, and lookup tokens behind drafted ones."""
    ways = set()
    for prompt in (REPEATED, [7, 2, 7, 2, 7], [5, 5, 6]):
        for sampler in (SAMPLERS["greedy"], lambda: Sampler(temperature=0.3, seed=1)):
            for one in trees(model, FixedK(2), sampler, TREES["both"], prompt=prompt, room=60)[2]:
                kinds = ["chain" if node < len(one.draft.confidence) else one.draft.sources[node] for node in one.path]
                ways.add(tuple(kinds[:3]))
    drafted, looked_up = "chain", "lookup"
    expected = {(), (drafted,), (DRAFT_PATH,), (looked_up,), (drafted, DRAFT_PATH), (drafted, drafted, looked_up)}
    assert ways >= expected, ways


@every_tree
@every_sampler
def test_windows(sampler, tree):
    """Accepted tokens have moved to the slots of their positions when the next round reads them."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    config = MistralConfig(**sizes, **heads, sliding_window=8, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    trees(tiny(config, seed=2), FixedK(4), sampler, tree, prompt=REPEATED, room=50)


@every_tree
@every_sampler
@pytest.mark.parametrize("room", [1, 2, 3, 7, 11])
def test_the_token_limit_within_a_round(model, room, sampler, tree):
    trees(model, FixedK(4), sampler, tree, prompt=REPEATED, room=room)


@every_tree
@every_sampler
def test_an_end_token_within_a_round(model, sampler, tree):
    text = run(host(model), PlainDrafter(), REPEATED, 24, sampler=sampler())[0]
    for end in set(text):
        _, ours, _ = trees(model, FixedK(4), sampler, tree, prompt=REPEATED, ends=frozenset([end]))
        assert ours == text[: text.index(end) + 1]


@every_sampler
def test_under_a_guard(model, sampler):
    """Plain rounds go on writing the text in which the next ones look up."""
    runtime = device(model)
    guard = Guard(LayerSkipDrafter(runtime, PATH, FixedK(4), **TREES["both"]), clock=itertools.count().__next__)
    for prompt in (REPEATED, [7]):
        text, _ = run(runtime, guard, prompt, 60, sampler=sampler())
        assert text == run(host(model), PlainDrafter(), prompt, 60, sampler=sampler())[0]
    if not sampler().seeded:
        assert (0, 1, 0) in shapes(runtime)
        assert any(lookup for _, _, lookup in shapes(runtime))
    assert not guard._planned


@every_tree
def test_sequences_together(model, tree):
    """Each has the text that it has alone, where they end at different times."""
    prompts, rooms = [REPEATED, [7], [3, 3, 3, 0, 5, 10, 8]], (40, 9, 26)
    runtime = device(model, rows=4)
    seqs = [SequenceState(list(prompt), room, Sampler()) for prompt, room in zip(prompts, rooms, strict=True)]
    with Engine(runtime, LayerSkipDrafter(runtime, PATH, FixedK(4), **tree)) as engine:
        for seq in seqs:
            engine.join(seq)
        while engine.running:
            engine.step()
    for seq, prompt, room in zip(seqs, prompts, rooms, strict=True):
        assert seq.tokens[len(prompt) :] == plain(host(model), prompt, room)
    assert {key.batch for made in runtime.device_rounds._made.values() for key in made} >= {1, 4}


@every_tree
@every_sampler
def test_one_read_a_round(model, monkeypatch, sampler, tree):
    runtime = device(model)
    drafter = LayerSkipDrafter(runtime, PATH, copy.deepcopy(CONTROLLERS["adaptive"]), **tree)
    assert_one_read_a_round(monkeypatch, runtime, drafter, REPEATED, sampler)


@pytest.mark.parametrize(
    ("settings", "tree"),
    [
        ({"temperature": 1.0, "seed": 1, "tied": False}, TREES["lookup"]),
        ({"temperature": 1.0, "seed": 1, "tied": False}, TREES["candidates"]),
        ({}, {"proposer_chain": ProposerChain([Lookup(), Other()])}),
    ],
    ids=["block", "block with candidates", "another proposer"],
)
def test_what_runs_on_the_host(model, settings, tree):
    runtime, other = device(model), host(model)
    ours, theirs = (
        run(
            one,
            LayerSkipDrafter(one, PATH, FixedK(4), **copy.deepcopy(tree)),
            REPEATED,
            20,
            sampler=Sampler(**settings),
        )
        for one in (runtime, other)
    )
    assert ours[0] == theirs[0]
    assert not runtime.device_rounds._made


def test_lookup_finds_the_latest_of_the_longest_matches():
    chance = torch.Generator().manual_seed(0)
    for vocabulary in (2, 3, 8):
        for n in (1, 2, 3, 5, 9, 20, 40):
            rows = [torch.randint(vocabulary, (n,), generator=chance).tolist() for _ in range(3)]
            texts = Texts(4, 64, torch.device("cpu"))
            for row, text in enumerate(rows):
                texts.send(row, text[:1])
                texts.send(row, text)
            tokens, found = texts.look_up(torch.full((3,), n - 1), 11, slice(0, 3))
            for text, ours, any_found in zip(rows, tokens.tolist(), found.tolist(), strict=True):
                expected = list(itertools.islice(looked_up(text), 11))
                assert any_found == bool(expected)
                assert not expected or ours == expected
    assert MATCHED < 20
