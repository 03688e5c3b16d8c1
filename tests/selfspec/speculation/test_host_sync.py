"""What is read of tensors: on a device all at once, and the same as elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from models import plain, run, small
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import SuppressTokensLogitsProcessor, TopPLogitsWarper

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter
from selfspec.runtime.cuda_graphs import CaptureCheck
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation import host_sync, sampling
from selfspec.speculation.drafts import Draft
from selfspec.speculation.host_sync import Transfer, to_lists
from selfspec.speculation.rules import find_rule
from selfspec.speculation.sampling import Sampler, best_and_share
from selfspec.types.acceptance import Confidence
from selfspec.types.draft_path import DraftPath, SkipSet

VOCABULARY = 11
SAMPLERS = {
    "greedy": lambda: Sampler(),
    "match": lambda: Sampler(temperature=1.2, seed=3),
    "drawn": lambda: Sampler(temperature=1.2, seed=3, tied=False),
}


class Reads(TorchDispatchMode):
    """Counts how often values are read; a list is read in one go, which no operation tells."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "item")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def there(monkeypatch):
    """As if tensors were on a device. Gives what was read: how many numbers, reading by reading."""
    read = []

    def noted(tensors):
        read.append(sum(map(len, tensors)))
        return to_lists(tensors)

    monkeypatch.setattr(host_sync, "needs_sync", lambda tensor: True)
    monkeypatch.setattr(sampling, "needs_sync", lambda tensor: True)
    for module in ("sampling", "rules"):
        monkeypatch.setattr(f"selfspec.speculation.{module}.to_lists", noted)
    return read


def test_numbers_are_exact_whatever_their_types(there):
    ids, halves = torch.tensor([2**40 + 1, 3]), torch.tensor([0.1, -math.inf, 2.5], dtype=torch.bfloat16)
    assert to_lists([ids, halves]) == [[2.0**40 + 1, 3.0], [float(halves[0]), -math.inf, 2.5]]


def test_a_transfer_holds_the_values_of_its_time():
    values = torch.arange(4)
    transfer = Transfer(values)
    values.zero_()
    assert transfer.wait().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("least", [1, 3])
def test_top_p_can_be_captured_and_gives_the_bits_of_transformers(least):
    scores = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 2
    warper = TopPLogitsWarper(0.7, min_tokens_to_keep=least)
    with CaptureCheck():
        ours = Sampler(processors=[warper]).scores(scores, ())
    assert torch.equal(ours, warper(torch.zeros(5, 1, dtype=torch.long), scores))


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("with_p", [False, True])
@pytest.mark.parametrize("with_gap", [False, True])
def test_what_is_taken_is_the_same_in_one_reading(make, with_p, with_gap, request):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 50, generator=generator, dtype=torch.float64) * 3
    how = {"with_p": with_p, "with_gap": with_gap}
    sampler = make()
    here = [sampler.take(row, place, **how) for place, row in enumerate(rows)]
    read, sampler = request.getfixturevalue("there"), make()
    with Reads() as reads:
        found = [sampler.take(row, place, **how) for place, row in enumerate(rows)]
    assert [one.token for one in found] == [one.token for one in here]
    for one, other in zip(found, here, strict=True):
        assert one[1:] == pytest.approx(other[1:], abs=1e-12)
    assert len(read) == len(rows)
    assert reads.count == 0


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_where_there_is_no_token(there, make):
    scores = torch.full((5,), -math.inf)
    assert make().take(scores, 0, sure=False) is None
    if not make().greedy:
        with pytest.raises(SelfspecError, match="no token can be chosen"):
            make().take(scores, 0)


def test_the_best_and_its_share(request):
    rows = torch.randn(20, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    here = [best_and_share(row) for row in rows]
    read = request.getfixturevalue("there")
    for row, (token, share) in zip(rows, here, strict=True):
        assert best_and_share(row) == (token, pytest.approx(share, abs=1e-12))
    assert read == [2] * 20
    assert here[0] == pytest.approx((int(rows[0].argmax()), float(rows[0].softmax(0).max())))


@pytest.mark.parametrize(("rule", "most"), [("greedy", 1), ("match", 1), ("token", 2), ("block", 3)])
def test_a_chain_is_judged_in_few_readings_and_the_same(rule, most, request):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(40, 4, VOCABULARY, generator=generator, dtype=torch.float64)

    def judged():
        sampler = SAMPLERS["match" if rule == "match" else "greedy" if rule == "greedy" else "drawn"]()
        q = None if rule in ("greedy", "match") else torch.full((3, VOCABULARY), 1 / VOCABULARY, dtype=torch.float64)
        return [
            find_rule(rule, sampler)(Draft.chain([1, 2, 3], q=q), one, sampler, 5 * i)[:2]
            for i, one in enumerate(scores)
        ]

    here, read = judged(), request.getfixturevalue("there")
    assert judged() == here
    assert len({tuple(path) for path, _ in here}) > 1 or rule == "greedy"
    assert len(read) <= most * len(scores)


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("words", [None, (1, 2, 4, 5)])
def test_a_drafted_token_costs_one_reading(there, make, words):
    """And a round one more, where tokens are greedy or drawn with tied noise."""
    runtime = LeanRuntime(small(VOCABULARY, seed=2))
    told = Confidence(bias=0.2, probability=0.4, gap=0.8)
    drafter = LayerSkipDrafter(runtime, DraftPath(SkipSet((1,), (0,)), words), FixedK(3), confidence=told)
    tokens, outcomes = run(runtime, drafter, [1, 4, 2], 20, sampler=make())
    drafted = sum(len(outcome.draft) for outcome in outcomes)
    drawn = make().greedy or make().tied
    assert len(there) <= drafted + len(outcomes) * (1 if drawn else 3)
    if make().greedy:
        assert tokens == plain(runtime, [1, 4, 2], 20)
        assert len(there) >= drafted + len(outcomes)


def test_a_processor_that_leaves_nothing_ends_the_draft(there):
    runtime = LeanRuntime(small(VOCABULARY, seed=2))
    sampler = Sampler(processors=[SuppressTokensLogitsProcessor([1, 2], device="cpu")])
    drafter = LayerSkipDrafter(runtime, DraftPath(SkipSet((1,), (0,)), (1, 2)), FixedK(3))
    _, outcomes = run(runtime, drafter, [4, 5], 8, sampler=sampler)
    assert all(len(outcome.draft) == 0 for outcome in outcomes)
