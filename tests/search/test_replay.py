"""Replay against real decoding: the same counts in float64, greedy; the same law, sampled."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict

import pytest
from lowering import random_path
from models import drafting_rounds, plain, run, small
from pruned import PrunedModel
from selfspec.search.replay import Replay
from selfspec.search.replay_state import TargetText
from selfspec.search.trace import deepest, walk
from toys import Branching, Enumerating, enumerate_outcomes
from transformers.generation import RepetitionPenaltyLogitsProcessor

from selfspec import builtin
from selfspec.basics.errors import SelfspecError
from selfspec.controllers import AdaptiveThreshold, FixedK, RateOptimal, StaticThreshold
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.models.low_precision import fake
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.rules import RULES
from selfspec.speculation.sampling import Sampler
from selfspec.types.acceptance import Confidence, PayoffModel
from selfspec.types.draft_path import DraftPath, SkipSet

CONTROLLERS = [
    FixedK(1),
    FixedK(5),
    StaticThreshold(0.5, 6),
    AdaptiveThreshold(threshold=0.6, k_max=8, floor=0.2),
    RateOptimal(k_max=7, floor=0.1, strength=8.0, payoff=PayoffModel(draft=0.3)),
]
DEPTH = deepest(CONTROLLERS)
NEW = 12


def counts(stats):
    return stats.rounds, stats.drafted, stats.nodes, stats.accepted, stats.tokens


def random_skips(n, layers, *, rate=0.35, seed=0):
    draw = random.Random(seed)
    return [SkipSet.from_bits([draw.random() < rate for _ in range(2 * layers)]) for _ in range(n)]


@pytest.fixture(scope="module")
def texts(llm64):
    """Three prompts and the whole model's greedy continuations."""
    made = []
    for prompt in builtin.prompts("calibration")[:3]:
        ids = llm64.encode(prompt)
        new = llm64.generate(ids, max_new_tokens=NEW, drafter=PlainDrafter()).tokens
        made.append(TargetText((*ids, *new), len(ids), NEW))
    return made


@pytest.fixture(scope="module")
def real(llm64, texts):
    """What real decoding counts, for every skip set, controller and number of candidates, prompt by prompt."""
    found = {}
    for skip in random_skips(3, llm64.runtime.layers):
        for controller in CONTROLLERS:
            for candidates in (1, 3):
                drafter = LayerSkipDrafter(llm64.runtime, skip, controller.start(), candidates=candidates)
                found[skip, controller.spec().model_dump_json(), candidates] = [
                    counts(llm64.generate(text.tokens[: text.prompt_length], max_new_tokens=NEW, drafter=drafter).stats)
                    for text in texts
                ]
    return found


@pytest.mark.parametrize("chunk", [3, 64])
def test_counts_are_those_of_real_decoding(llm64, texts, real, chunk):
    with Replay(llm64.model, texts, depth=DEPTH, chunk=chunk) as replay:
        for skip in random_skips(3, llm64.runtime.layers):
            traces = replay.trace(skip, CONTROLLERS)
            for controller in CONTROLLERS:
                for candidates in (1, 3):
                    walked = [counts(w.stats) for w in walk(traces, controller, candidates=candidates)]
                    assert walked == real[skip, controller.spec().model_dump_json(), candidates]


def test_a_share_is_the_beginning_of_the_whole(llm64, texts):
    with Replay(llm64.model, texts, depth=DEPTH, chunk=24) as replay:
        for skip in random_skips(2, llm64.runtime.layers):
            whole = replay.trace(skip, CONTROLLERS)
            quarter = replay.trace(skip, CONTROLLERS, share=0.25)
            assert [len(t.runs) for t in quarter] == [3] * 3
            grown = replay.trace(skip, CONTROLLERS, known=quarter)
            for a, b in zip(whole, grown, strict=True):
                assert (a.runs, a.ranks, a.unfinished) == (b.runs, b.ranks, b.unfinished)
                for mine, theirs in zip(a.confidences, b.confidences, strict=True):
                    assert mine == pytest.approx(theirs, abs=1e-9)


def small_texts(model, prompts, room, **options):
    runtime = LeanRuntime(model)
    ends = runtime.skeleton.ends
    made = []
    for prompt in prompts:
        new, _ = run(runtime, PlainDrafter(), prompt, room, ends=ends, **options)
        made.append(TargetText((*prompt, *new), len(prompt), room))
    return runtime, made


PROMPTS = [[1, 2, 3], [4, 5], [7], [3, 3, 9, 1, 0, 2]]


@pytest.mark.parametrize("candidates", [1, 2, 4])
def test_texts_that_end_by_themselves(candidates):
    """End-of-sequence tokens among the text's, the draft's and the candidates'."""
    model = small()
    text = plain(LeanRuntime(model), PROMPTS[0], 20)
    model.generation_config.eos_token_id = [text[9], text[14]]
    runtime, texts = small_texts(model, PROMPTS, 20)
    assert min(text.num_new_tokens for text in texts) < 20
    ended = 0
    for skip in random_skips(12, 3):
        with Replay(model, texts, depth=DEPTH, chunk=9) as replay:
            traces = replay.trace(skip, CONTROLLERS)
        for controller in CONTROLLERS:
            drafter = LayerSkipDrafter(runtime, skip, controller.start(), candidates=candidates)
            for prompt, walked in zip(PROMPTS, walk(traces, controller, candidates=candidates), strict=True):
                new, outcomes = run(runtime, drafter, prompt, 20, ends=runtime.skeleton.ends)
                assert walked.stats.tokens == len(new)
                assert walked.stats.rounds == len(outcomes)
                assert walked.stats.drafted == sum(o.draft.depth for o in outcomes)
                assert walked.stats.accepted == sum(o.accepted for o in outcomes)
                assert sorted(walked.rounds.elements()) == sorted((o.draft.work, 1 + len(o.draft)) for o in outcomes)
                ended += any(token in runtime.skeleton.ends for o in outcomes for token in o.draft.tokens)
    assert ended > 20


def test_processors_see_the_drafted_prefix():
    model = small(vocabulary=31)

    def sampler():
        return Sampler(processors=[RepetitionPenaltyLogitsProcessor(3.0)])

    runtime, texts = small_texts(model, PROMPTS, 12, sampler=sampler())
    for skip in random_skips(6, 3):
        with Replay(model, texts, sampler=sampler(), depth=DEPTH, chunk=5) as replay:
            traces = replay.trace(skip, CONTROLLERS)
        for controller in CONTROLLERS:
            drafter = LayerSkipDrafter(runtime, skip, controller.start())
            for prompt, walked in zip(PROMPTS, walk(traces, controller), strict=True):
                _, outcomes = run(runtime, drafter, prompt, 12, sampler=sampler())
                assert sorted(walked.rounds.elements()) == sorted((o.draft.work, 1 + len(o.draft)) for o in outcomes)


def from_start_1(ids, sampler):
    """Noise that is not random but for start 1, the first that is walked with a draft."""
    return Branching(sampler if int(ids[0]) == 1 else Enumerating())


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    ("candidates", "kind", "skip"),
    [*((n, LayerSkipDrafter, SkipSet((1,), (0,))) for n in (1, 2, 3)), (2, PrunedModel, SkipSet((), (0,)))],
)
def test_a_sampled_round_has_the_joint_law_of_a_real_one(candidates, kind, skip, rule):
    """By enumeration on a vocabulary of three: text, tokens drafted, their confidences, tokens accepted.

    Also of a draft model with keys of its own. Under `block`, what is drafted after a wrong token is not followed
    exactly: the first confidence, and how many.
    """
    model = small(vocabulary=3, layers=2)
    runtime, prompt, room = LeanRuntime(model), [1, 2], 3
    controller = StaticThreshold(0.4, 2)
    drafter = kind(runtime, skip, controller, candidates=candidates)

    def shown(confidences):
        rounded = tuple(round(c, 9) for c in confidences)
        return rounded if rule == "token" else (rounded[:1], len(rounded))

    def real(sampler):
        drafter.controller = controller.start()
        _, rounds = drafting_rounds(runtime, drafter, prompt, room, sampler=sampler, rule=RULES[rule])
        outcome = next(rounds)
        rounds.close()
        return outcome.tokens, outcome.accepted, shown(outcome.draft.confidence)

    def text(sampler):
        return tuple(run(runtime, PlainDrafter(), prompt, room, sampler=sampler)[0])

    expected, found = defaultdict(float), defaultdict(float)
    for outcome, weight in enumerate_outcomes(real):
        expected[outcome] += weight
    for new, chance in enumerate_outcomes(text):

        def replayed(sampler, new=new):
            replay = Replay(
                model,
                [TargetText((*prompt, *new), len(prompt) - 1, room + 1)],  # the first round emits the prompt's last
                sampler=Sampler(temperature=1.0),
                rule=rule,
                depth=2,
                candidates=candidates,
                chunk=1,
                own_keys=kind is PrunedModel,
                noise=lambda ids, depth: from_start_1(ids, sampler),
            )
            with replay:
                (trace,) = replay.trace(skip, [controller], share=0.5)
            (walked,) = walk([trace], controller, candidates=candidates)
            emitted = new[: walked.stats.tokens - 1]
            return emitted, walked.stats.accepted, shown(trace.confidences[1])

        for outcome, weight in enumerate_outcomes(replayed):
            found[outcome] += chance * weight
    assert len(expected) > 15
    for outcome in {*expected, *found}:
        assert found[outcome] == pytest.approx(expected[outcome], abs=1e-9), outcome


@pytest.mark.parametrize("candidates", [1, 3])
def test_counts_under_shared_noise_are_those_of_real_decoding(candidates):
    """Rule match, in float64, with seeds: round by round."""
    model = small(vocabulary=40)
    runtime = LeanRuntime(model)
    texts = []
    for seed, prompt in enumerate(PROMPTS):
        new, _ = run(runtime, PlainDrafter(), prompt, 16, sampler=Sampler(temperature=0.9, seed=seed))
        texts.append(TargetText((*prompt, *new), len(prompt), 16, seed))
    accepted = 0
    for skip in random_skips(5, 3):
        with Replay(model, texts, sampler=Sampler(temperature=0.9), rule="match", depth=DEPTH, chunk=9) as replay:
            traces = replay.trace(skip, CONTROLLERS)
        for controller in CONTROLLERS:
            walks = walk(traces, controller, candidates=candidates, seeded=True)
            drafter = LayerSkipDrafter(runtime, skip, controller.start(), candidates=candidates)
            for seed, (prompt, walked) in enumerate(zip(PROMPTS, walks, strict=True)):
                sampler = Sampler(temperature=0.9, seed=seed)
                new, outcomes = run(runtime, drafter, prompt, 16, sampler=sampler, rule=RULES["match"])
                assert new == list(texts[seed].tokens[len(prompt) :])
                assert walked.stats.accepted == sum(o.accepted for o in outcomes)
                assert sorted(walked.rounds.elements()) == sorted((o.draft.work, 1 + len(o.draft)) for o in outcomes)
                accepted += walked.stats.accepted
    assert accepted > 100


def test_shared_noise_needs_seeds():
    with pytest.raises(SelfspecError, match="a text without a seed"):
        Replay(small(), [TargetText((1, 2, 3), 1, 4)], sampler=Sampler(temperature=1.0), rule="match")


@pytest.mark.parametrize(("candidates", "rule"), [(1, "token"), (3, "block")])
@pytest.mark.long("statistics of what enumeration proves")
def test_sampled_means_agree_on_the_built_in_model(whole, candidates, rule):
    """Tokens a round and the share accepted, within three standard errors of the difference."""
    prompts = [whole.encode(p) for p in builtin.prompts("heldout")[:6]]
    skip, controller, new, repeats = SkipSet((1, 3, 4), (2, 4)), StaticThreshold(0.4, 4), 24, 8
    options = {"temperature": 0.8, "top_p": 0.95}
    found = {"real": [], "replay": []}
    drafter = LayerSkipDrafter(whole.runtime, skip, controller, candidates=candidates)
    for repeat in range(repeats):
        stats = [
            whole.generate(p, max_new_tokens=new, drafter=drafter, seed=100 * repeat + i, rule=rule, **options).stats
            for i, p in enumerate(prompts)
        ]
        found["real"].append(stats)
        texts = []
        for i, p in enumerate(prompts):
            seed = 50_000 + 100 * repeat + i
            tokens = whole.generate(p, max_new_tokens=new, drafter=PlainDrafter(), seed=seed, **options).tokens
            texts.append(TargetText((*p, *tokens), len(p), new))
        with Replay(whole.model, texts, sampler=Sampler(**options), rule=rule, depth=4, seed=repeat) as replay:
            found["replay"].append(
                [w.stats for w in walk(replay.trace(skip, [controller]), controller, candidates=candidates)]
            )
    for measure in (
        lambda runs: sum(s.tokens for s in runs) / sum(s.rounds for s in runs),
        lambda runs: sum(s.accepted for s in runs) / sum(s.drafted for s in runs),
    ):
        a, b = ([measure(runs) for runs in found[kind]] for kind in ("real", "replay"))
        error = ((statistics.variance(a) + statistics.variance(b)) / repeats) ** 0.5
        assert abs(statistics.mean(a) - statistics.mean(b)) < 3 * error
        assert error < 0.05 * statistics.mean(a)


def test_the_seed_and_not_the_chunk_decides_sampled_drafts(llm64, texts):
    skip = SkipSet((3, 5), (2,))
    traces = []
    for seed, chunk in ((0, 5), (0, 64), (1, 64)):
        with Replay(llm64.model, texts, sampler=Sampler(temperature=1.0), depth=3, chunk=chunk, seed=seed) as replay:
            traces.append([(t.runs, t.ranks) for t in replay.trace(skip, [FixedK(3)])])
    assert traces[0] == traces[1] != traces[2]


def test_a_draft_vocabulary_is_replayed_as_it_is_decoded(llm64, texts):
    seen = sorted({token for text in texts for token in text.tokens})[::2]
    for skip in random_skips(3, llm64.runtime.layers):
        with Replay(llm64.model, texts, depth=DEPTH) as replay:
            traces = replay.trace(DraftPath(skip, tuple(seen)), CONTROLLERS)
            whole = replay.trace(skip, CONTROLLERS)
        assert [t.runs for t in traces] != [t.runs for t in whole]
        for controller in CONTROLLERS:
            drafter = LayerSkipDrafter(llm64.runtime, DraftPath(skip, tuple(seen)), controller.start())
            real = [
                counts(llm64.generate(text.tokens[: text.prompt_length], max_new_tokens=NEW, drafter=drafter).stats)
                for text in texts
            ]
            assert [counts(w.stats) for w in walk(traces, controller)] == real


def test_paths_in_few_bits_are_replayed_as_they_are_decoded(llm64, texts):
    """Exactly, where products are exact; whatever is told of the drafted tokens."""
    runtime = LeanRuntime(llm64.model, kernel=fake)
    for seed in range(3):
        path = random_path(seed, llm64.runtime.layers, words=4096)
        told = Confidence(bias=1.0, probability=0.5 * (seed != 1), gap=0.7)
        with Replay(llm64.model, texts, depth=DEPTH, base_runtime=runtime) as replay:
            replay.confidence = told
            traces = replay.trace(path, CONTROLLERS)
        for controller in CONTROLLERS:
            for candidates in (1, 3):
                drafter = LayerSkipDrafter(runtime, path, controller.start(), candidates=candidates, confidence=told)
                walked = walk(traces, controller, candidates=candidates)
                for text, mine in zip(texts, walked, strict=True):
                    prompt = list(text.tokens[: text.prompt_length])
                    new, outcomes = run(runtime, drafter, prompt, NEW, ends=runtime.skeleton.ends)
                    assert new == list(text.tokens[text.prompt_length :])
                    assert (mine.stats.rounds, mine.stats.drafted) == (
                        len(outcomes),
                        sum(o.draft.depth for o in outcomes),
                    )
                    assert mine.stats.accepted == sum(o.accepted for o in outcomes)
