from __future__ import annotations

import pytest
import torch
from models import CONFIGS, run, tiny
from scipy import stats as scipy_stats
from toys import RandomTree, Scripted
from transformers import LogitsProcessor
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.sampling import Sampler
from selfspec.types.draft_path import SkipSet


def hf_distribution(model, tokens, **options):
    """The distribution that `transformers`' own generate samples the next token from."""
    out = model.generate(
        tokens, do_sample=True, max_new_tokens=1, output_scores=True, return_dict_in_generate=True, **options
    )
    return out.scores[0].softmax(-1)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.6},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.9},
    ],
    ids=str,
)
def test_probabilities_are_those_of_transformers(options):
    model = tiny(CONFIGS["llama"], dtype=torch.float32)
    tokens = torch.tensor([[5, 9, 2]])
    theirs = hf_distribution(model, tokens, **{"top_k": 0, **options})
    sampler = Sampler(**options)
    with torch.no_grad():
        logits = model(tokens).logits[0, -1:]
    ours = sampler.probs(sampler.scores(logits, iter([])))[0]
    torch.testing.assert_close(ours, theirs)


class Recording(LogitsProcessor):
    """Notes every prefix it is shown."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen += [tuple(row) for row in input_ids.tolist()]
        return scores


def test_processors_see_the_right_prefix_at_every_position():
    runtime = LeanRuntime(tiny(CONFIGS["llama"]))
    prompt = [3, 1, 4]
    for drafter in (RandomTree(61, (2, 2, 1)), LayerSkipDrafter(runtime, SkipSet((1,), (1,)), FixedK(3))):
        recording = Recording()
        tokens, outcomes = run(runtime, drafter, prompt, 8, sampler=Sampler(processors=[recording]))
        emitted = list(prompt)
        wanted = set()
        for outcome in outcomes:
            wanted |= {tuple(prefix) for prefix in outcome.draft.prefixes(emitted)}
            emitted += outcome.tokens
        assert emitted == prompt + tokens
        assert wanted == set(recording.seen)


class EvenUpTo(LogitsProcessor):
    """Allows even tokens only, and is only made for prefixes of them that no end token is in."""

    def __init__(self, prompt, end):
        self.prompt, self.end = prompt, end

    def __call__(self, input_ids, scores):
        for token in input_ids[0, self.prompt :].tolist():
            if token % 2 or token == self.end:
                raise KeyError(token)
        return scores.masked_fill(torch.arange(scores.shape[-1]) % 2 == 1, -torch.inf)


@pytest.mark.parametrize(("rule", "seed"), [("greedy", None), ("match", 3), ("block", 3), ("token", 3)])
@pytest.mark.parametrize(
    "drafter", [RandomTree(61, (4, 3, 2)), Scripted(lambda _: [8, 9, 30, 8])], ids=["tree", "chain"]
)
def test_processors_see_no_prefix_that_plain_decoding_cannot_reach(rule, seed, drafter):
    runtime, prompt, ends = LeanRuntime(tiny(CONFIGS["llama"])), [2, 8, 4], frozenset({8, 30})

    def sampler(end):
        sampled = {} if rule == "greedy" else {"temperature": 3.0, "seed": seed, "tied": rule == "match"}
        return Sampler(**sampled, processors=[EvenUpTo(len(prompt), end)])

    for end in ends:
        tokens, _ = run(runtime, drafter, prompt, 12, sampler=sampler(end), ends=frozenset({end}), rule=rule)
        assert not any(token % 2 for token in tokens)
        if rule in ("greedy", "match"):
            plainly, _ = run(
                runtime, PlainDrafter(), prompt, 12, sampler=sampler(end), ends=frozenset({end}), rule=rule
            )
            assert tokens == plainly


@pytest.mark.parametrize(
    "make",
    [lambda: [NoRepeatNGramLogitsProcessor(2)], lambda: [RepetitionPenaltyLogitsProcessor(1.7)]],
    ids=["no-repeat", "penalty"],
)
def test_prefix_dependent_processors_give_transformers_greedy_text(make):
    model = tiny(CONFIGS["llama"], dtype=torch.float32)
    runtime = LeanRuntime(model)
    prompt = [3, 1, 4]
    theirs = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=30, logits_processor=make())
    for drafter in (
        PlainDrafter(),
        RandomTree(61, (3, 1)),
        LayerSkipDrafter(runtime, SkipSet((2,), (1,)), FixedK(3)),
    ):
        ours, _ = run(runtime, drafter, prompt, 30, sampler=Sampler(processors=make()))
        assert ours == theirs[0, len(prompt) :].tolist()


def test_draws_follow_p():
    p = torch.tensor([0.0, 0.1, 0.25, 0.0, 0.6, 0.05, 0.0])
    sampler = Sampler(temperature=1.0, seed=0, tied=False)
    counts = torch.bincount(torch.tensor([sampler.draw(p * 3, 0) for _ in range(20000)]), minlength=7)
    assert counts[p == 0].sum() == 0
    kept = p > 0
    assert scipy_stats.chisquare(counts[kept], 20000 * p[kept].double() / p[kept].double().sum()).pvalue > 1e-4


def test_a_draw_at_the_very_end_of_the_sum_has_probability(monkeypatch):
    sampler = Sampler(temperature=1.0, seed=0, tied=False)
    monkeypatch.setattr(sampler._random, "random", lambda: 1.0)  # beyond what it can return
    assert sampler.draw(torch.tensor([0.5, 0.5, 0.0]), 0) == 1


def test_probabilities_that_are_not_finite_are_an_error():
    with pytest.raises(SelfspecError, match="not finite"):
        Sampler(temperature=1.0).draw(torch.tensor([0.5, float("nan")]), 0)


def test_coins_are_certain_at_the_ends():
    sampler = Sampler(temperature=1.0, seed=0)
    assert all(sampler.coin(1.0) and not sampler.coin(0.0) for _ in range(1000))
    assert 4800 < sum(sampler.coin(0.5) for _ in range(10000)) < 5200


def test_float64_scores_stay_float64_and_half_becomes_float32():
    sampler = Sampler()
    assert sampler.scores(torch.zeros(1, 3, dtype=torch.float64), iter([])).dtype == torch.float64
    assert sampler.scores(torch.zeros(1, 3, dtype=torch.bfloat16), iter([])).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature -1: expected 0"),
        ({"temperature": 1e-38}, "temperature 1e-38: expected 0 .*, or 1e-05 or more"),
        ({"seed": -1}, "seed -1: expected a whole number of at least 0"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": float("inf")}, "temperature inf"),
        ({"top_k": 0}, "top_k 0: expected at least 1"),
        ({"top_p": 0.0}, "top_p 0.0: expected more than 0"),
        ({"top_p": 1.1}, "top_p 1.1: expected"),
    ],
)
def test_wrong_values_are_refused(options, message):
    with pytest.raises(SelfspecError, match=message):
        Sampler(**options)


def test_numbers_that_were_looked_at_are_drawn_all_the_same():
    one, other = (Sampler(temperature=1.0, seed=4, tied=False) for _ in range(2))
    p = torch.rand(50, generator=torch.Generator().manual_seed(0))
    assert one.upcoming(3) == one.upcoming(8)[:3]
    assert one.numbers_used == 0
    one.skip(2)
    for _ in range(2):
        other.coin(0.5)
    assert [one.draw(p, 0) for _ in range(20)] == [other.draw(p, 0) for _ in range(20)]
    assert one.numbers_used == other.numbers_used == 22
