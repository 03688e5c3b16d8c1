"""Every kind of head drafts as it is trained to, and reads pairs in any portions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from heads import random_head, random_learner
from models import small

from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.module_files import PartFile
from selfspec.draft_modules.registry import HEADS, make_head
from selfspec.runtime.forward import LeanRuntime
from selfspec.training.texts import layers_of

WORDS = (0, 1, 2, 4, 5, 8, 9)
DEPTH = 3


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(small(11, seed=2))


@pytest.fixture(params=HEADS)
def kind(request):
    return request.param


def pairs(runtime, n):
    """Tokens, and streams of some layers each."""
    torch.manual_seed(1)
    shape = n, len(layers_of(runtime.layers)), runtime.skeleton.sizes.hidden
    return torch.randint(0, 11, (n,)), torch.randn(shape, dtype=runtime.dtype)


def read_by(head, streams):
    """What a head reads of some layers' streams."""
    return streams[:, -1] if len(head.layers) == 1 else streams.flatten(1)


def trained_on(runtime, kind, tokens, streams, depth=DEPTH):
    """Logits over the draft's tokens as training has them: of step k at the row of each pair."""
    learner = random_learner(runtime, WORDS, kind)
    ids, embedded, streams = learner._read(tokens[None], streams[None])
    n = len(tokens) - depth + 1
    weight = runtime.model.get_output_embeddings().weight[list(WORDS)]
    given = learner._net_input(streams[:, :n])
    return [F.linear(out[0].double(), weight) for out in learner.net(ids, embedded, given, depth)]


def ready(runtime, kind):
    head = random_head(runtime, WORDS, kind, low=False)
    head.reserve(32)
    return head


def test_a_step_is_what_training_has(runtime, kind):
    tokens, streams = pairs(runtime, 7)
    wanted = trained_on(runtime, kind, tokens, streams, 1)[0]
    head = ready(runtime, kind)
    for n in range(1, 8):
        logits, _ = head.read(0, 0, tokens[:n], read_by(head, streams[:n]))
        torch.testing.assert_close(logits, wanted[n - 1], atol=1e-4, rtol=1e-4)
        over_all = head.to_full_vocabulary(logits)
        assert torch.equal(over_all[list(WORDS)], logits)
        assert torch.isinf(over_all[[3, 6, 7, 10]]).all()


@pytest.mark.parametrize("portions", [[8], [1] * 8, [3, 1, 4], [2, 5, 1]], ids=str)
def test_it_goes_on_by_itself_as_it_is_trained_to(runtime, kind, portions):
    tokens, streams = pairs(runtime, 8 + DEPTH - 1)
    wanted = trained_on(runtime, kind, tokens, streams)
    head, at = ready(runtime, kind), 0
    for n in portions:
        logits, state = head.read(0, at, tokens[at : at + n], read_by(head, streams[at : at + n]))
        at += n
        for k in range(DEPTH):
            torch.testing.assert_close(logits, wanted[k][at - 1], atol=1e-4, rtol=1e-4)
            if k < DEPTH - 1:
                logits, state = head.draft_step(0, at, k + 1, int(tokens[at + k]), state)


def test_pairs_of_a_draft_are_read_again_when_they_are_committed(runtime, kind):
    tokens, streams = pairs(runtime, 10)
    head = ready(runtime, kind)
    read = read_by(head, streams)
    head.read(0, 0, tokens[:4], read[:4])
    others, more = tokens.flip(0), read.flip(0)
    _, state = head.read(0, 4, others[4:7], more[4:7])  # a draft's, that will be rejected
    head.draft_step(0, 7, 1, 3, state)
    found, state = head.read(0, 4, tokens[4:6], read[4:6])
    again, _ = head.draft_step(0, 6, 1, 5, state)
    fresh = ready(runtime, kind)
    whole, state = fresh.read(0, 0, tokens[:6], read[:6])
    torch.testing.assert_close(found, whole)
    torch.testing.assert_close(again, fresh.draft_step(0, 6, 1, 5, state)[0])


def test_more_room_keeps_what_was_read(runtime, kind):
    tokens, streams = pairs(runtime, 6)
    head = random_head(runtime, WORDS, kind, low=False)
    head.reserve(6)
    read = read_by(head, streams)
    head.read(0, 0, tokens[:5], read[:5])
    head.reserve(600)
    logits, _ = head.read(0, 5, tokens[5:], read[5:])
    whole, _ = head.read(0, 0, tokens, read)
    torch.testing.assert_close(logits, whole)


def test_rows_are_apart(kind):
    runtime = LeanRuntime(small(11, seed=2), rows=2)
    tokens, streams = pairs(runtime, 6)
    head = ready(runtime, kind)
    read = read_by(head, streams)
    head.read(0, 0, tokens[:3], read[:3])
    head.read(1, 0, tokens.flip(0), read.flip(0))
    logits, _ = head.read(0, 3, tokens[3:], read[3:])
    whole, _ = ready(runtime, kind).read(0, 0, tokens, read)
    torch.testing.assert_close(logits, whole)


def test_in_8_bits_it_says_nearly_the_same(runtime, kind):
    tokens, streams = pairs(runtime, 6)
    exact, low = ready(runtime, kind), random_head(runtime, WORDS, kind)
    low.reserve(32)
    one, other = (head.read(0, 0, tokens, read_by(head, streams))[0] for head in (exact, low))
    assert float((one - other).norm()) < 0.1 * float(one.norm())
    assert 0 < low.bytes < exact.bytes / 3


def test_a_part_without_its_tensors(runtime, kind):
    made = random_learner(runtime, WORDS, kind).part()
    name = next(name for name in made.tensors if name.endswith(("proj.weight", "linear.weight", "proj.0.weight")))
    torn = PartFile(made.kind, made.settings, {n: t for n, t in made.tensors.items() if n != name}, made.model)
    with pytest.raises(SelfspecError, match=f"part file of a head of kind {kind}: wrong contents"):
        make_head(runtime, torn)


def test_kinds_that_are_no_heads(runtime):
    with pytest.raises(SelfspecError, match="of kind 'wings'; expected a head"):
        make_head(runtime, PartFile("wings", {}, {}, runtime.skeleton.identity))


@pytest.mark.parametrize(("kind", "name"), [("medusa", "places"), ("medusa", "blocks"), ("mlp", "places")])
@pytest.mark.parametrize("number", [10**9, 0])
def test_a_head_of_a_billion_modules_is_refused_at_once(kind, name, number, runtime):
    made = random_learner(runtime, WORDS, kind).part()
    settings = {**made.settings, "net": {**made.settings["net"], name: number}}
    with pytest.raises(SelfspecError, match=f"a head of {number} {name}; expected 1 to 64"):
        make_head(runtime, PartFile(kind, settings, made.tensors, made.model))
