"""Searching for drafts with a cache of their own, against draft models that have one."""

from __future__ import annotations

import random

import pytest
import torch
from models import run, small
from pruned import PrunedModel, pruned
from selfspec.search import finalists, find_profile, prepare
from selfspec.search.objective import predict
from selfspec.search.replay import Replay
from selfspec.search.replay_state import TargetText
from selfspec.search.space import Space
from selfspec.search.trace import deepest, walk
from selfspec.search.warm_starts import programme

from selfspec import builtin
from selfspec.basics.errors import SelfspecError
from selfspec.controllers import AdaptiveThreshold, FixedK, RateOptimal, StaticThreshold
from selfspec.drafters import PlainDrafter
from selfspec.profile.draft_spec import LayerSkipSpec, PlainSpec
from selfspec.profile.reading import parse_profile, profile_text
from selfspec.profile.schema import Profile
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.sampling import Sampler
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import SkipSet
from selfspec.types.identity import Identity

CONTROLLERS = [
    FixedK(1),
    FixedK(4),
    StaticThreshold(0.5, 6),
    AdaptiveThreshold(threshold=0.6, k_max=6, floor=0.2),
    RateOptimal(k_max=5, floor=0.1, strength=8.0),
]
DEPTH = deepest(CONTROLLERS)
PROMPTS = [[1, 2, 3], [4, 5], [7], [3, 3, 9, 1, 0, 2, 8, 8, 5]]
ROOM = 14
COSTS = CostModel(
    context=9, base=0.1, attention=0.1, mlp=0.1, widths=[1, 8], verify=[1.0, 1.7], round=0.05, prefill=0.01
)


def skips(n, layers=3, *, seed=0):
    draw = random.Random(seed)
    return [SkipSet.from_bits([draw.random() < 0.35 for _ in range(2 * layers)]) for _ in range(n)]


def rounds(outcomes):
    return sorted((o.draft.work, 1 + len(o.draft)) for o in outcomes)


@pytest.fixture(scope="module")
def model():
    return small(vocabulary=31)


@pytest.fixture(scope="module")
def runtime(model):
    return LeanRuntime(model)


def texts_of(runtime, **options):
    made = []
    for number, prompt in enumerate(PROMPTS):
        seed = number if options else None
        new, _ = run(runtime, PlainDrafter(), prompt, ROOM, sampler=Sampler(**options, seed=seed))
        made.append(TargetText((*prompt, *new), len(prompt), ROOM, seed))
    return made


@pytest.fixture(scope="module")
def texts(runtime):
    return texts_of(runtime)


def test_counts_are_those_of_a_draft_model_with_a_cache_of_its_own(model, runtime, texts):
    differ = 0
    for skip in skips(5):
        drafter = PrunedModel(runtime, skip, CONTROLLERS[0])
        with Replay(model, texts, depth=DEPTH, chunk=9, own_keys=True) as replay:
            traces = replay.trace(skip, CONTROLLERS)
        with Replay(model, texts, depth=DEPTH) as replay:
            differ += replay.trace(skip, CONTROLLERS) != traces
        for controller in CONTROLLERS:
            for candidates in (1, 3):
                drafter.controller, drafter.candidates = controller.start(), candidates
                walks = walk(traces, controller, candidates=candidates)
                for prompt, text, walked in zip(PROMPTS, texts, walks, strict=True):
                    new, outcomes = run(runtime, drafter, prompt, ROOM)
                    assert (*prompt, *new) == text.tokens
                    assert walked.stats.accepted == sum(o.accepted for o in outcomes)
                    assert sorted(walked.rounds.elements()) == rounds(outcomes)
    assert differ > 2


def test_counts_on_the_built_in_model(llm64):
    skip, controller, new = SkipSet((2, 4), (1, 4)), StaticThreshold(0.3, 4), 10
    drafter = PrunedModel(llm64.runtime, skip, controller)
    prompts = [llm64.encode(prompt)[:40] for prompt in builtin.prompts("calibration")[:3]]
    found = [llm64.generate(ids, max_new_tokens=new, drafter=drafter) for ids in prompts]
    texts = [TargetText((*ids, *one.tokens), len(ids), new) for ids, one in zip(prompts, found, strict=True)]
    with Replay(llm64.model, texts, depth=4, own_keys=True) as replay:
        walks = walk(replay.trace(skip, [controller]), controller)
    for one, walked in zip(found, walks, strict=True):
        a, b = one.stats, walked.stats
        assert (a.rounds, a.drafted, a.accepted) == (b.rounds, b.drafted, b.accepted)
    assert 0 < sum(one.stats.accepted for one in found) < sum(one.stats.drafted for one in found)


def test_rounds_are_those_of_an_engine_with_a_draft_model(model, texts):
    """`transformers`' own assisted generation, whose draft model keeps a cache from round to round."""
    whole = pruned(model, SkipSet())
    for skip in skips(3, seed=3):
        with Replay(model, texts, depth=3, own_keys=True) as replay:
            walks = walk(replay.trace(skip, [FixedK(3)]), FixedK(3))
        assistant = pruned(model, skip)
        assistant.generation_config.update(
            num_assistant_tokens=3, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
        )
        for prompt, text, walked in zip(PROMPTS, texts, walks, strict=True):
            passes = []
            hook = whole.register_forward_hook(lambda *_, passes=passes: passes.append(1))
            ids = torch.tensor([text.tokens[: len(prompt) + 1]])  # its first pass drafts, ours emits one token
            out = whole.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=ROOM - 1,
                do_sample=False,
                assistant_model=assistant,
            )
            hook.remove()
            assert tuple(out[0].tolist()) == text.tokens
            assert 1 + len(passes) == walked.stats.rounds


@pytest.mark.parametrize("candidates", [1, 3])
def test_counts_under_shared_noise(model, runtime, candidates):
    texts = texts_of(runtime, temperature=0.9)
    for skip in skips(2, seed=1):
        drafter = PrunedModel(runtime, skip, CONTROLLERS[0], candidates=candidates)
        options = {"sampler": Sampler(temperature=0.9), "rule": "match", "depth": DEPTH, "own_keys": True}
        with Replay(model, texts, **options) as replay:
            traces = replay.trace(skip, CONTROLLERS)
        for controller in CONTROLLERS:
            drafter.controller = controller.start()
            walks = walk(traces, controller, candidates=candidates, seeded=True)
            for prompt, text, walked in zip(PROMPTS, texts, walks, strict=True):
                sampler = Sampler(temperature=0.9, seed=text.seed)
                _, outcomes = run(runtime, drafter, prompt, ROOM, sampler=sampler, rule="match")
                assert walked.stats.accepted == sum(o.accepted for o in outcomes)
                assert sorted(walked.rounds.elements()) == rounds(outcomes)


def test_a_longer_share_and_the_streams_disturb_nothing(model, texts):
    first, other = skips(2, seed=5)
    with Replay(model, texts, depth=3, own_keys=True) as replay:
        whole = replay.trace(first, [FixedK(3)])
        replay.trace(other, [FixedK(3)])
        streams = replay.streams(4)
        quarter = replay.trace(first, [FixedK(3)], share=0.25)
        streams.branch(0, "attention", streams.entering[0])
        grown = replay.trace(first, [FixedK(3)], known=quarter)
    for a, b in zip(whole, grown, strict=True):
        assert (a.runs, a.ranks, a.unfinished) == (b.runs, b.ranks, b.unfinished)
        for mine, theirs in zip(a.confidences, b.confidences, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-9)


def test_the_streams_are_of_the_texts_from_their_first_token_on(model, texts):
    with Replay(model, texts, depth=2, own_keys=True) as replay:
        streams = replay.streams(4)
        x = streams.entering[0]
        for layer in range(3):
            x = x + streams.branch(layer, "attention", x)
            assert torch.allclose(x, streams.between[layer], atol=1e-10)
            x = x + streams.branch(layer, "mlp", x)
            assert torch.allclose(x, streams.entering[layer + 1], atol=1e-10)
        skip = SkipSet((1,), (0,))
        x = streams.entering[0] + streams.branch(0, "attention", streams.entering[0])
        x = x + streams.branch(1, "mlp", x)
        for part in ("attention", "mlp"):
            x = x + streams.branch(2, part, x)
        planned = programme(Space(3), streams, COSTS)
    for row, text in enumerate(texts):
        seen = min(len(text.tokens), x.shape[1])
        assert streams.real[row].tolist() == [True] * seen + [False] * (x.shape[1] - seen)
        theirs = pruned(model, skip)(torch.tensor([text.tokens[:seen]]), output_hidden_states=True)
        assert torch.allclose(pruned(model, skip).model.norm(x[row, :seen]), theirs.hidden_states[-1], atol=1e-9)
    assert planned


def test_a_prediction_includes_what_the_draft_reads(model, texts):
    skip, controller = SkipSet((1,), (2,)), FixedK(3)
    profile = Profile(model=Identity(layers=3), draft=LayerSkipSpec.from_path(skip, controller.spec()), costs=COSTS)
    with Replay(model, texts, depth=3, own_keys=True) as replay:
        predicted = predict(replay, profile)
    drafter = PrunedModel(LeanRuntime(model), skip, controller)
    outcomes = [o for prompt in PROMPTS for o in run(drafter.runtime, drafter, prompt, ROOM)[1]]
    tokens, prompts, step = ROOM * len(PROMPTS), sum(map(len, PROMPTS)), 0.1 + 2 * 0.1 + 2 * 0.1
    seconds = sum(0.05 + o.draft.depth * step + 1 + 0.1 * o.draft.depth for o in outcomes)
    seconds += 0.01 * prompts * (1 + step / 1.05)
    assert predicted.speedup == pytest.approx((0.01 * prompts + 1.05 * tokens) / seconds, abs=1e-3)


def test_a_search_for_such_drafts(llm, monkeypatch, tmp_path):
    costs = COSTS.model_copy(update={"base": 0.0, "attention": 1e-3, "mlp": 1e-3, "head": 1.0})
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(prepare, "measure_costs", lambda *_, **__: costs)
    for measuring in ("measure", "_fastest"):
        monkeypatch.setattr(finalists, measuring, None)
    options = {"trials": 3, "count": 2, "max_new_tokens": 24, "granularity": "layer"}
    profile = find_profile(llm, kv="own", storage=tmp_path / "trials", **options)
    assert (profile.search.kv, profile.measured) == ("own", [])
    assert (profile.draft.candidates, profile.draft.vocabulary) == (1, None)
    assert len(profile.skip_set) > 0
    assert profile.predicted.speedup > 1
    assert profile.note == "for a draft model with a separate KV cache; its speed is predicted, not measured"
    assert parse_profile(profile_text(profile), source="p") == profile
    with pytest.raises(SelfspecError, match="holds the trials of another search"):
        find_profile(llm, storage=tmp_path / "trials", **options)
    dear = costs.model_copy(update={"base": 5.0})
    monkeypatch.setattr(prepare, "measure_costs", lambda *_, **__: dear)
    nothing = find_profile(llm, kv="own", warm=False, **options)
    assert nothing.draft == PlainSpec()
    assert "nothing is predicted to beat plain decoding: the best skip set found (attention" in nothing.note
    kept = find_profile(llm, kv="own", warm=False, keep_best=True, **options)
    assert len(kept.skip_set) > 0
    assert kept.note == profile.note


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv": "mine"}, "kv 'mine' is not known; known: shared, own"),
        (
            {"kv": "own", "objective": "wallclock"},
            "kv 'own' needs the replay objective: selfspec's drafts share",
        ),
    ],
)
def test_wrong_options_are_refused(llm, options, message):
    with pytest.raises(SelfspecError, match=message):
        find_profile(llm, **options)
