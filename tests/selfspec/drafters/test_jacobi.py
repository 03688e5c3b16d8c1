"""Parallel decoding: every pass is a Jacobi iteration of the block, held against one written down plainly."""

from __future__ import annotations

import pytest
import torch
from models import plain, run, run_drafting, small

from selfspec.basics.errors import SelfspecError
from selfspec.drafters import JacobiDrafter
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.sampling import Sampler

VOCABULARY, PROMPT, NEW = 11, [1, 4, 2, 9, 3, 3], 30
PADDING = 0


@pytest.fixture(scope="module")
def model():
    return small(VOCABULARY, seed=2)


@pytest.fixture(scope="module")
def runtime(model):
    return LeanRuntime(model)


def iterations(model, fixed, guess):
    """Jacobi's iterations of a block after the tokens `fixed`: what each of them is given, until it stands still."""
    given = []
    while True:
        logits = model(torch.tensor([[*fixed, *guess[:-1]]])).logits[0, len(fixed) - 1 :]
        given.append(list(guess))
        found = logits.argmax(-1).tolist()
        if found == guess:
            return given, found
        guess = found


def drafted(outcomes):
    """The block as each pass was given it: what had converged, and the draft."""
    done, given = [], []
    for outcome in outcomes:
        given.append([*done, *outcome.draft.tokens])
        done += outcome.tokens
    return given


def test_one_block_is_iterated_as_jacobi_does(model, runtime):
    tokens, outcomes = run_drafting(runtime, JacobiDrafter("jacobi", start="padding"), PROMPT, NEW)
    wanted, found = iterations(model, PROMPT, [PADDING] * NEW)
    assert tokens == found == plain(runtime, PROMPT, NEW)
    given = drafted(outcomes)
    assert len(given) <= len(wanted) <= NEW + 1  # theirs needs one more to see that nothing changes
    for ours, theirs in zip(given, wanted, strict=False):
        assert ours == theirs[: len(ours)]
        assert len(ours) == NEW - 1  # the place after the last guess is the pass's own


@pytest.mark.parametrize("block", [2, 5, 8])
def test_blocks_converge_one_after_the_other(model, runtime, block):
    tokens, outcomes = run_drafting(runtime, JacobiDrafter("gauss-seidel", block=block, start="padding"), PROMPT, NEW)
    text, at = [*PROMPT], 0
    for begin in range(0, NEW, block):
        size = min(block, NEW - begin)
        wanted, found = iterations(model, text, [PADDING] * size)
        done = list[int]()
        for theirs in wanted:
            if len(done) == size:
                break
            ours = [*done, *outcomes[at].draft.tokens]
            assert ours == theirs[: len(ours)]
            assert len(done) + len(outcomes[at].draft) + 1 == size
            done += outcomes[at].tokens
            at += 1
        assert done == found
        text += found
    assert at == len(outcomes) <= NEW
    assert tokens == text[len(PROMPT) :]


def test_hybrid_ends_with_single_tokens(runtime):
    tokens, outcomes = run(runtime, JacobiDrafter("hybrid", block=4, parallel=10), PROMPT, NEW)
    assert tokens == plain(runtime, PROMPT, NEW)
    done = 1
    for outcome in outcomes[1:]:
        assert (len(outcome.draft) > 0) == (done < 10 and done % 4 != 0)
        done += len(outcome.tokens)


@pytest.mark.parametrize(("start", "first"), [("padding", [0, 0, 0]), ("prompt", [4, 2, 9]), ("before", [2, 9, 3])])
def test_what_unknown_places_hold(runtime, start, first):
    _, outcomes = run_drafting(runtime, JacobiDrafter("gauss-seidel", block=4, start=start), PROMPT, NEW)
    assert list(outcomes[0].draft.tokens) == first


def test_never_more_passes_than_tokens_and_fewer_where_text_repeats(runtime):
    for method in ("jacobi", "gauss-seidel", "hybrid"):
        for sampler in (Sampler(), Sampler(temperature=0.7, seed=3)):
            tokens, outcomes = run(runtime, JacobiDrafter(method), PROMPT, NEW, sampler=sampler)
            assert len(outcomes) <= len(tokens)
    looping = plain(runtime, PROMPT, 60)
    _, outcomes = run(runtime, JacobiDrafter("gauss-seidel", block=6), [*PROMPT, *looping], NEW)
    assert len(outcomes) < 0.8 * NEW


def test_an_end_inside_a_block(runtime):
    """A guessed end cuts the draft; it ends the text only when it is right."""
    ends = frozenset([0, 5])
    wanted = run(runtime, JacobiDrafter("hybrid", parallel=1), PROMPT, NEW, ends=ends)[0]
    tokens, outcomes = run(runtime, JacobiDrafter("gauss-seidel", block=8, start="padding"), PROMPT, NEW, ends=ends)
    assert tokens == wanted
    for outcome in outcomes:
        assert not ends & set(outcome.draft.tokens[:-1])


def test_blocks_out_of_range():
    for wrong in ({"block": 1}, {"parallel": 0}):
        with pytest.raises(SelfspecError, match="expected blocks of 2 tokens or more"):
            JacobiDrafter(**wrong)
