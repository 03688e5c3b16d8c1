"""Every family that is served, by every feature: the table of `docs/models.md`, each cell a test."""

from __future__ import annotations

import copy
import functools
import types
from pathlib import Path

import pytest
import torch
from families import FAMILY_CONFIGS, FEATURES, NAMES, WINDOW, cell, table, windows
from heads import random_head
from layouts import AVAILABLE
from lowering import as_rounded, random_path
from models import plain, run, tiny
from stores import babble, stored
from toys import RandomTree
from trained import learnt
from transformers import ModernBertDecoderConfig

from selfspec import drafters
from selfspec.controllers import FixedK, StaticThreshold
from selfspec.draft_modules.registry import HEADS
from selfspec.drafters.head_drafter import HeadBelow, HeadDrafter
from selfspec.engine.engine import Engine
from selfspec.models.families import FAMILIES
from selfspec.models.families.common import windows_of
from selfspec.models.layout import apply_layout_
from selfspec.models.low_precision import fake
from selfspec.proposers.base import ProposerChain
from selfspec.proposers.history import AnswerHistory
from selfspec.proposers.lookup import Lookup
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.drafts import Draft
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_path import DraftPath, SkipSet

DOCS = Path(__file__).parents[3] / "docs" / "models.md"
N = 40
VOCABULARY, WORDS = 61, tuple(range(60))
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
SKIPS = [SkipSet((0,), (0,)), SkipSet((1,), (2,)), SkipSet((0, 2), (0, 1)), SkipSet((0, 1, 2), (0, 1, 2))]
LOW = DraftPath(SkipSet((1,), (0,)), int8=SkipSet((0, 2), (1, 2)), head="int8")
TRAINED = DraftPath(SkipSet((1,), (1,)), int8=SkipSet((0, 2), (0, 2)), head="int8")
STORED = stored(babble(VOCABULARY), VOCABULARY)
TESTED: set[str] = set()
PRODUCTS = ("drafters", "trained")  # of so much else that one configuration of each family is enough


def every(feature):
    """The test is run for all that the table says has the feature."""
    TESTED.add(feature)
    return pytest.mark.parametrize("name", [name for name in FAMILY_CONFIGS if has(name, feature)])


def has(name, feature):
    if feature == "window":
        return windows(FAMILY_CONFIGS[name])
    return bool(cell(name, feature)) and (feature not in PRODUCTS or name in NAMES)


@functools.cache
def plainly(name, prompt=PROMPT, room=12):
    """What plain decoding gives."""
    return plain(runtime_of(name), list(prompt), room)


@functools.cache
def model_of(name):
    return tiny(FAMILY_CONFIGS[name])


@functools.cache
def runtime_of(name, rows=1):
    return LeanRuntime(model_of(name), rows=rows, kernel=fake)


def text_of(n=N, seed=1):
    return torch.randint(VOCABULARY, (1, n), generator=torch.Generator().manual_seed(seed))


def close(ours, theirs, tolerance=1e-5):
    """To what the models' own norms, ropes and softmax round to float32 in the reference."""
    scale = theirs.abs().max()
    torch.testing.assert_close(ours / scale, theirs / scale, atol=tolerance, rtol=0)


def in_portions(runtime, tokens, widths, path=None):
    """Logits of all tokens, fed in passes of these widths."""
    parts, start = [], 0
    with runtime.session(tokens.shape[1]):
        for width in widths:
            parts.append(runtime.forward(tokens[:, start : start + width], start, path=path).logits)
            start += width
    return torch.cat(parts, 1)


WIDTHS = {"whole": (N,), "steps": (1,) * N, "drafts": (N - 12, 5, 1, 6), "wide": (2, N - 2)}


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@every("plain")
@torch.no_grad()
def test_logits_are_the_models_own(name, widths):
    close(in_portions(runtime_of(name), text_of(), widths), model_of(name)(text_of(), use_cache=False).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every("plain")
@torch.no_grad()
def test_logits_in_less_precision(name, dtype):
    model = copy.deepcopy(model_of(name)).to(dtype)
    theirs = model(text_of(), use_cache=False).logits
    ours = in_portions(LeanRuntime(model), text_of(), WIDTHS["drafts"])
    if dtype == torch.float32:
        close(ours, theirs, 2e-5)
    else:  # experts may change where their router's scores are near each other
        assert (ours - theirs).abs().mean() < 0.02 * theirs.abs().max()


@every("plain")
def test_greedy_tokens_are_those_of_generate(name):
    theirs = model_of(name).generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)
    assert plainly(name) == theirs[0, len(PROMPT) :].tolist()


@every("window")
@torch.no_grad()
def test_windows_hide_what_is_before_them(name):
    """Of a model whose every layer has one, the last token's logits are those of the tokens that it can hear of."""
    assert N > 2 * WINDOW
    open_config = copy.deepcopy(FAMILY_CONFIGS[name])
    open_config.sliding_window = 10 * N
    theirs = tiny(open_config)(text_of(), use_cache=False).logits
    ours = in_portions(runtime_of(name), text_of(), (1,) * N)
    close(ours[:, :WINDOW], theirs[:, :WINDOW])
    assert ((ours - theirs).abs().amax(-1)[0, WINDOW:] > 1e-3 * theirs.abs().max()).all()


def test_a_window_that_the_models_own_attention_does_not_know_is_none():
    """As in the configuration of a model that was converted from a family with windows."""
    config = copy.deepcopy(FAMILY_CONFIGS["llama"])
    config.sliding_window = WINDOW
    assert windows_of(config, 2) == [None, None]
    assert windows_of(FAMILY_CONFIGS["starcoder2"], 2) == [WINDOW, WINDOW]
    assert any(windows_of(ModernBertDecoderConfig(), 6)), "set by the class after its arguments"
    with torch.no_grad():
        theirs = tiny(config)(text_of(), use_cache=False).logits
    close(in_portions(LeanRuntime(tiny(config)), text_of(), (1,) * N), theirs)


def silenced(model, skip):
    """A copy whose skipped sub-layers give nothing."""
    model = copy.deepcopy(model)
    for number, layer in enumerate(model.base_model.layers):
        attention = getattr(layer, "self_attn", None) or layer.attention
        if number in skip.attention:
            attention.forward = types.MethodType(_no_attention, attention)
        if number in skip.mlp:
            pair = model.config.model_type == "gpt_oss"
            layer.mlp.forward = types.MethodType(_no_scores if pair else _nothing, layer.mlp)
    return model


def _no_attention(_self, hidden_states, **_):
    return torch.zeros_like(hidden_states), None


def _no_scores(_self, x):
    return torch.zeros_like(x), None


def _nothing(_self, x):
    return torch.zeros_like(x)


@pytest.mark.parametrize("skip", SKIPS, ids=str)
@every("skip")
@torch.no_grad()
def test_skipping_is_a_model_whose_sub_layers_add_nothing(name, skip):
    runtime = runtime_of(name)
    theirs = silenced(model_of(name), skip)(text_of(), use_cache=False).logits
    path = runtime.compile(DraftPath(skip))
    for widths in (WIDTHS["steps"], WIDTHS["drafts"]):
        close(in_portions(runtime, text_of(), widths, path), theirs)


@every("skip")
def test_drafts_along_paths_are_checked(name):
    runtime = runtime_of(name)
    for skip in SKIPS:
        drafter = drafters.LayerSkipDrafter(runtime, skip, StaticThreshold(0.1, 5))
        assert run(runtime, drafter, list(PROMPT), 12)[0] == plainly(name)


@pytest.mark.parametrize("seed", range(3))
@every("low")
def test_few_bits_are_the_model_with_rounded_weights(name, seed):
    path = random_path(seed, 3, words=VOCABULARY)
    tokens = text_of(14)
    runtime = runtime_of(name)
    compiled = runtime.compile(path)
    assert compiled.unquantized == ()
    theirs = LeanRuntime(as_rounded(model_of(name), path))
    expected = in_portions(theirs, tokens, (14,), theirs.compile(DraftPath(path.skip, path.vocabulary)))
    for widths in ((14,), (1,) * 14):
        torch.testing.assert_close(in_portions(runtime, tokens, widths, compiled), expected, atol=1e-6, rtol=1e-6)
    held = [
        runtime.part_bytes(part, i, mode)
        for part in ("attention", "mlp")
        for i in range(3)
        for mode in ("int8", "int4")
    ]
    assert all(held)


@pytest.mark.parametrize("layout", [name for name in AVAILABLE if name != "rows"])
@every("plain")
@torch.no_grad()
def test_in_any_layout_of_weights(name, layout):
    model = copy.deepcopy(model_of(name)).float()
    theirs = model(text_of(), use_cache=False).logits
    apply_layout_(model, layout)
    close(in_portions(LeanRuntime(model), text_of(), WIDTHS["drafts"]), theirs, 2e-5)


@every("trees")
def test_a_tree_pass_equals_its_chains(name):
    """After more tokens than a window holds; nodes stand at slots that are not their positions."""
    runtime = runtime_of(name)
    length, nodes, parents, depths = 20, [3, 7, 9, 4, 8], [-1, -1, 0, 2, 3], [1, 1, 2, 3, 4]
    with runtime.session(N):
        runtime.forward(text_of(length), 0, logits=None)
        mask = torch.zeros(1, 5, length + 5, dtype=torch.bool)
        mask[:, :, :length] = True
        for node in range(5):
            above = node
            while above >= 0:
                mask[0, node, length + above] = True
                above = parents[above]
        positions = torch.tensor([[length - 1 + depth for depth in depths]])
        tree = runtime.forward(torch.tensor([nodes]), positions, slots=length, mask=mask).logits[0]
        slots = torch.arange(length, length + 5)[None]
        again = runtime.forward(torch.tensor([nodes]), positions, slots=slots, mask=mask).logits[0]
        chain = runtime.forward(torch.tensor([[3, 9, 4, 8]]), length).logits[0]
        alone = runtime.forward(torch.tensor([[7]]), length).logits[0]
    torch.testing.assert_close(again, tree)
    torch.testing.assert_close(tree[[0, 2, 3, 4]], chain, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(tree[1], alone[0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(2, 2, 1), (3, 1, 1, 1)], ids=str)
@every("trees")
def test_trees_are_checked(name, shape):
    runtime = runtime_of(name)
    assert run(runtime, RandomTree(VOCABULARY, shape), list(PROMPT), 12)[0] == plainly(name)


@every("trees")
def test_an_accepted_branch_stands_where_it_belongs(name):
    """The second of two branches is right: what comes after it reads its keys at their places."""
    runtime = runtime_of(name)
    text = plainly(name)

    class Branches(RandomTree):
        def draft(self, seq):
            at = len(seq.tokens) - len(PROMPT)
            right = text[at : at + min(3, seq.remaining - 1)]
            wrong = [(token + 1) % VOCABULARY for token in right]
            tokens = [token for pair in zip(wrong, right, strict=True) for token in pair]
            parents = [-1, -1, 0, 1, 2, 3][: len(tokens)]
            return Draft(tuple(tokens), tuple(parents), None, (-1,) * len(tokens))

    tokens, outcomes = run(runtime, Branches(VOCABULARY), list(PROMPT), 12)
    assert tokens == text
    assert len(outcomes) < 5


@every("batches")
def test_sequences_together_give_what_they_give_alone(name):
    prompts = [PROMPT, (7, 2, 60), (*PROMPT, *PROMPT, 4)]
    runtime = runtime_of(name, rows=2)
    seqs = [SequenceState(list(prompt), 12, Sampler()) for prompt in prompts]
    with Engine(runtime, drafters.LayerSkipDrafter(runtime, SKIPS[1], FixedK(3), candidates=2)) as engine:
        engine.join(seqs[0])
        engine.join(seqs[1])
        engine.step()
        while len(engine.running) == 2:
            engine.step()
        engine.join(seqs[2])
        while engine.running:
            engine.step()
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert seq.tokens[len(prompt) :] == plainly(name, prompt)


DRAFTERS = {
    "layer skip, candidates": lambda runtime, path: drafters.LayerSkipDrafter(
        runtime, SKIPS[2], StaticThreshold(0.05, 4), candidates=3
    ),
    "few bits, guesses": lambda runtime, path: drafters.LayerSkipDrafter(
        runtime, LOW, FixedK(4), proposer_chain=ProposerChain([Lookup(), STORED], (1.0, 1.1, 1.2, 1.3))
    ),
    "lookup": lambda runtime, path: drafters.LookupDrafter([Lookup()], StaticThreshold(0.0, 5)),
    "store": lambda runtime, path: drafters.LookupDrafter([STORED], StaticThreshold(0.0, 5)),
    "answers": lambda runtime, path: drafters.LookupDrafter(
        [AnswerHistory(path / "answers", VOCABULARY)], StaticThreshold(0.0, 5)
    ),
    "recycle": lambda runtime, path: drafters.RecycleDrafter(StaticThreshold(0.0, 5), candidates=3),
    "input": lambda runtime, path: drafters.InputDrafter(StaticThreshold(0.0, 5)),
    "jacobi": lambda runtime, path: drafters.JacobiDrafter("gauss-seidel", block=4),
    "lookahead": lambda runtime, path: drafters.LookaheadDrafter(window=3, ngram=3, guesses=2),
    "swift": lambda runtime, path: drafters.SwiftDrafter(
        runtime, StaticThreshold(0.1, 4), window=6, every=1, candidates=2
    ),
    "clasp": lambda runtime, path: drafters.ClaspDrafter(runtime, FixedK(3), skip=2, every=1),
    "merged": lambda runtime, path: drafters.MergedDrafter(
        [
            drafters.LookupDrafter([Lookup()], StaticThreshold(0.0, 5)),
            drafters.LayerSkipDrafter(runtime, SKIPS[0], FixedK(3)),
        ]
    ),
}
PARTS = {
    "path": lambda runtime: drafters.LayerSkipDrafter(runtime, learnt(runtime, TRAINED), FixedK(4)),
    "below": lambda runtime: drafters.LayerSkipDrafter(
        runtime, LOW, FixedK(5), below=HeadBelow(random_head(runtime, WORDS), (1.0,) * 5, 0.01)
    ),
    **{
        kind: lambda runtime, kind=kind: HeadDrafter(random_head(runtime, WORDS, kind), FixedK(3), candidates=2)
        for kind in HEADS
    },
}


@pytest.mark.parametrize("kind", DRAFTERS)
@every("drafters")
def test_every_drafter(name, kind, tmp_path):
    runtime = runtime_of(name)
    assert run(runtime, DRAFTERS[kind](runtime, tmp_path), list(PROMPT), 8)[0] == plainly(name)[:8]


@pytest.mark.parametrize("kind", PARTS)
@every("trained")
def test_every_trained_part(name, kind):
    runtime = runtime_of(name)
    assert run(runtime, PARTS[kind](runtime), list(PROMPT), 8)[0] == plainly(name)[:8]


def test_the_table_is_what_is_tested():
    assert set(FEATURES) == TESTED
    assert list(NAMES) == list(FAMILIES)
    assert {config.model_type for config in FAMILY_CONFIGS.values()} == set(FAMILIES)
    assert table() in DOCS.read_text(), f"docs/models.md: expected the table\n{table()}"


def test_the_readme_names_every_family():
    said = " ".join((DOCS.parents[1] / "README.md").read_text().split())
    listed = said.partition("Supported by name")[2].partition("fine-tunes")[0]
    for name in NAMES.values():
        first = name.partition(",")[0].partition(" and ")[0].partition(" (")[0]
        assert first in listed, name
