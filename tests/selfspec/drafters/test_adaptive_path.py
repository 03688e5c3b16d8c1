"""What is skipped is chosen as the text goes: by trials (SWIFT), and by a programme (CLaSp)."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from models import exact_norms, plain, run, small, tiny
from transformers import LlamaConfig

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK
from selfspec.drafters import ClaspDrafter, SwiftDrafter
from selfspec.drafters.adaptive_path import every_second
from selfspec.engine.engine import Engine
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.drafts import NO_DRAFT
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_path import SkipSet, as_path

VOCABULARY, LAYERS = 11, 6
PROMPT = [1, 4, 2, 9, 3, 3, 7, 0, 5, 10, 8, 6]
USELESS = (2, 3)  # layers


def idle(model, layers):
    """The model, in which some layers add nothing at all."""
    with torch.no_grad():
        for layer in layers:
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    return model


@pytest.fixture(scope="module")
def model():
    return idle(exact_norms(small(VOCABULARY, LAYERS, seed=5)), USELESS)


@pytest.fixture(scope="module")
def runtime(model):
    return LeanRuntime(model)


def begun(runtime, tokens, room=20, **sampler):
    """An engine in which a sequence has joined, for what a drafter makes of it."""
    return SequenceState(list(tokens), room, Sampler(**sampler))


class TestSwift:
    def test_it_finds_what_adds_nothing(self, runtime):
        drafter = SwiftDrafter(runtime, FixedK(3), window=16, every=1, patience=100)
        assert run(runtime, drafter, PROMPT, 110)[0] == plain(runtime, PROMPT, 110)
        assert drafter._known != every_second(LAYERS)
        assert set(USELESS) <= set(drafter._known.attention)
        assert set(USELESS) <= set(drafter._known.mlp)

    def test_matches_are_those_of_drafts_from_each_place(self, runtime, model):
        """Against the drafter itself, which drafts one token after each prefix."""
        drafter, skip = SwiftDrafter(runtime, FixedK(1), window=8), SkipSet((1, 4), (3,))
        text = PROMPT + plain(runtime, PROMPT, 8)
        seq = begun(runtime, text)
        with Engine(runtime, drafter) as engine:
            engine.join(seq)
            right, tried = drafter._matches(seq, skip)
            engine.leave(seq)
        path, expected = runtime.compile(as_path(skip)), 0
        for end in range(len(text) - 8, len(text)):
            with runtime.session(64):
                ids = torch.tensor([text[: end - 1]])
                runtime.forward(ids, 0, logits=None)
                runtime.cache.commit(0, range(end - 2))
                step = runtime.forward(torch.tensor([[text[end - 1]]]), end - 1, path=path)
                expected += int(step.logits[0, -1].argmax()) == text[end]
        assert (right, tried) == (expected, 8)

    def test_a_search_ends(self, runtime, monkeypatch):
        drafter, tried = SwiftDrafter(runtime, FixedK(2), window=4, every=3, patience=5), []
        monkeypatch.setattr(drafter, "_promise", lambda seq, skip: (tried.append(skip), 1.0)[1])
        rounds = len(run(runtime, drafter, PROMPT, 60)[1])
        assert rounds >= 20
        assert len(tried) == 10  # two for each of five trials without a better set
        assert {len(set(pair)) for pair in zip(tried[::2], tried[1::2], strict=True)} == {2}

    def test_a_seed_begins_anew(self, runtime):
        drafter = SwiftDrafter(runtime, FixedK(3), window=16, every=1)
        run(runtime, drafter, PROMPT, 60)
        known = drafter._known
        assert known != drafter.start
        seq = begun(runtime, PROMPT, temperature=1.0, seed=3)
        with Engine(runtime, drafter) as engine:
            engine.join(seq)
            assert drafter._studies[seq].best == drafter.start
        assert drafter._known == known  # which texts with a seed do not change

    def test_first_and_last_layer_stay(self, runtime):
        drafter = SwiftDrafter(runtime, FixedK(3), window=8, every=1, patience=1000)
        seen = set()
        drafter._promise = lambda seq, skip: (seen.add(skip), float(len(seen)))[1]
        run(runtime, drafter, PROMPT, 80)
        assert len(seen) > 10
        assert not any({0, LAYERS - 1} & ({*skip.attention} | {*skip.mlp}) for skip in seen)

    @pytest.mark.parametrize("layers", [1, 2])
    def test_a_model_without_inner_layers(self, layers):
        runtime = LeanRuntime(small(VOCABULARY, layers))
        assert run(runtime, SwiftDrafter(runtime, FixedK(2)), PROMPT, 12)[0] == plain(runtime, PROMPT, 12)

    def test_wrong_window(self, runtime):
        with pytest.raises(SelfspecError, match="window 0: expected 1 to 64 tokens"):
            SwiftDrafter(runtime, FixedK(2), window=0)


class TestClasp:
    def test_it_finds_what_adds_nothing(self, runtime):
        drafter, chosen = ClaspDrafter(runtime, FixedK(3), skip=2, every=1), []
        choose = drafter._choose
        drafter._choose = lambda seq: (chosen.append(choose(seq)), chosen[-1])[1]
        assert run(runtime, drafter, PROMPT, 20)[0] == plain(runtime, PROMPT, 20)
        assert [skip for skip in chosen if skip is not None]
        assert all(skip == SkipSet(USELESS, USELESS) for skip in chosen if skip is not None)

    def test_states_of_an_earlier_round_are_not_chosen_by(self, runtime):
        """A guard may not ask for a draft; then the choice is made after the next round."""
        drafter, chosen = ClaspDrafter(runtime, FixedK(3), skip=2, every=16), []
        choose = drafter._choose
        drafter._choose = lambda seq: (chosen.append((len(seq.tokens), choose(seq))), chosen[-1][1])[1]
        seq = begun(runtime, PROMPT)
        with Engine(runtime, drafter) as engine:
            engine.join(seq)
            propose = drafter.propose
            drafter.propose = lambda seqs, limits: [NO_DRAFT] * len(seqs)
            for _ in range(3):
                engine.step()
            drafter.propose = propose
            while engine.running:
                engine.step()
        assert seq.tokens == [*PROMPT, *plain(runtime, PROMPT, 20)]
        (first, none), (_, found), *_ = chosen
        assert (first, none, found) == (len(PROMPT) + 3, None, SkipSet(USELESS, USELESS))

    def test_one_layer_less_is_the_best_by_the_whole_models_streams(self):
        """For one layer the programme is exact where what follows keeps the order: here nothing follows."""
        model = exact_norms(small(VOCABULARY, 2, seed=2))
        runtime = LeanRuntime(model)
        drafter = ClaspDrafter(runtime, FixedK(1), skip=1, every=1)
        text = PROMPT + plain(runtime, PROMPT, 12)
        chosen = []
        choose = drafter._choose
        drafter._choose = lambda seq: (chosen.append((len(seq.tokens), choose(seq))), chosen[-1][1])[1]
        assert run(runtime, drafter, PROMPT, 12)[0] == text[len(PROMPT) :]
        found = [(length, skip) for length, skip in chosen if skip is not None]
        assert found
        for length, skip in found:
            assert skip.attention == skip.mlp == best_layers(model, text[: length - 1], 1)

    def test_the_programme_against_all_sets(self, model):
        """What it chooses is as near to the whole model as the best of all sets, where each step's choice is kept."""
        config = LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 4})
        torch.manual_seed(1)
        whole = exact_norms(tiny(config, seed=9))
        for layer in whole.model.layers:  # small additions: the streams stay alike, and choices independent
            layer.self_attn.o_proj.weight.data.mul_(0.02)
            layer.mlp.down_proj.weight.data.mul_(0.02)
        runtime = LeanRuntime(whole)
        drafter = ClaspDrafter(runtime, FixedK(2), skip=2, every=1)
        found = []
        choose = drafter._choose
        drafter._choose = lambda seq: (found.append((len(seq.tokens), choose(seq))), found[-1][1])[1]
        text = PROMPT + run(runtime, drafter, PROMPT, 12)[0]
        near = [
            (
                nearness(whole, text[: n - 1], skip.attention),
                nearness(whole, text[: n - 1], best_layers(whole, text[: n - 1], 2)),
            )
            for n, skip in found
            if skip is not None
        ]
        assert near
        assert sum(mine >= best - 1e-3 for mine, best in near) >= len(near) * 0.8

    def test_it_waits_for_its_turn(self, runtime):
        drafter, chosen = ClaspDrafter(runtime, FixedK(2), skip=2, every=4), []
        choose = drafter._choose
        drafter._choose = lambda seq: (chosen.append(choose(seq)), chosen[-1])[1]
        run(runtime, drafter, PROMPT, 60)
        made = [i for i, skip in enumerate(chosen) if skip is not None]
        assert len(made) >= 3
        assert {b - a for a, b in pairwise(made)} == {4}

    def test_nothing_is_kept_of_a_text_that_is_over(self, runtime):
        drafter = ClaspDrafter(runtime, FixedK(2), skip=2, every=1)
        run(runtime, drafter, PROMPT, 20)
        assert [*drafter._hidden_states, *drafter._rounds, *drafter._compiled_paths] == []

    def test_wrong_number(self, runtime):
        with pytest.raises(SelfspecError, match="skip 7: expected 1 to 6 of the model's 6 layers"):
            ClaspDrafter(runtime, FixedK(2), skip=7)


def last_streams(model, tokens, skip=()):
    """The streams of the last token through a model without some layers, keys of tokens before from the whole one."""
    ids = torch.tensor([tokens])
    streams = model(ids, output_hidden_states=True).hidden_states
    x = [s.clone() for s in streams[:-1]]
    mine = x[0][:, -1:]
    position = torch.tensor([[len(tokens) - 1]])
    everywhere = torch.arange(len(tokens)).unsqueeze(0)
    for i, layer in enumerate(model.model.layers):
        if i in skip:
            continue
        both = torch.cat([x[i][:, :-1], mine], dim=1)
        turn = model.model.rotary_emb(both, everywhere)
        n = len(tokens)
        mask = torch.full((n, n), -torch.inf, dtype=both.dtype).triu(1)[None, None]
        mine = layer(both, attention_mask=mask, position_embeddings=turn, position_ids=everywhere)
        mine = (mine[0] if isinstance(mine, tuple) else mine)[:, -1:]
    del position
    return mine[0, 0]


@torch.no_grad()
def nearness(model, tokens, skip):
    return float(torch.cosine_similarity(last_streams(model, tokens, skip), last_streams(model, tokens), dim=0))


def best_layers(model, tokens, count):
    sets = combinations(range(len(model.model.layers)), count)
    return max(sets, key=lambda skip: nearness(model, tokens, skip))
