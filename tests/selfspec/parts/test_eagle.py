"""The head as it drafts is the head as it is trained, and it reads pairs in any portions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from heads import random_head, random_net
from models import small

from selfspec.runtime.forward import Runtime

WORDS = (0, 1, 2, 4, 5, 8, 9)


@pytest.fixture(scope="module")
def runtime():
    return Runtime(small(11, seed=2))


def pairs(runtime, n):
    torch.manual_seed(1)
    return torch.randint(0, 11, (n,)), torch.randn(n, runtime.skeleton.sizes.hidden, dtype=runtime.dtype)


def trained_on(runtime, tokens, streams, depth):
    """Logits over the draft's tokens as training has them: of step k at the row of each pair."""
    net = random_net(runtime)
    embedded, streams = runtime.skeleton.embed(tokens[None]).float(), streams.float()
    weight = runtime.model.get_output_embeddings().weight[list(WORDS)]
    n = len(tokens) - depth + 1
    return [F.linear(out[0].double(), weight) for out in net(embedded, streams[None, :n], depth)]


def test_a_step_is_what_training_has(runtime):
    tokens, streams = pairs(runtime, 7)
    (wanted,) = trained_on(runtime, tokens, streams, 1)
    head = random_head(runtime, WORDS, low=False)
    head.reserve(32)
    for n in range(1, 8):
        logits, _ = head.read(0, 0, tokens[:n], streams[:n])
        torch.testing.assert_close(logits, wanted[n - 1], atol=1e-4, rtol=1e-4)
        over_all = head.over_all(logits)
        assert torch.equal(over_all[list(WORDS)], logits)
        assert torch.isinf(over_all[[3, 6, 7, 10]]).all()


def test_pairs_are_read_in_any_portions(runtime):
    tokens, streams = pairs(runtime, 9)
    head = random_head(runtime, WORDS, low=False)
    head.reserve(32)
    whole, left = head.read(0, 0, tokens, streams)
    head.read(0, 0, tokens[:4], streams[:4])
    head.read(0, 4, tokens[4:5], streams[4:5])
    parts, again = head.read(0, 5, tokens[5:], streams[5:])
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(left, again)


def test_it_goes_on_from_its_own_streams_as_it_is_trained_to(runtime):
    depth, n = 4, 5
    tokens, streams = pairs(runtime, n + depth - 1)
    wanted = trained_on(runtime, tokens, streams, depth)
    head = random_head(runtime, WORDS, low=False)
    head.reserve(32)
    for row in range(n):
        logits, stream = head.read(0, 0, tokens[: row + 1], streams[: row + 1])
        for k in range(depth):
            torch.testing.assert_close(logits, wanted[k][row], atol=1e-4, rtol=1e-4)
            logits, stream = head.read(0, row + 1 + k, tokens[row + 1 + k :][:1], stream) if k < depth - 1 else (0, 0)


def test_more_room_keeps_what_was_read(runtime):
    tokens, streams = pairs(runtime, 6)
    head = random_head(runtime, WORDS, low=False)
    head.reserve(6)
    head.read(0, 0, tokens[:5], streams[:5])
    head.reserve(600)
    logits, _ = head.read(0, 5, tokens[5:], streams[5:])
    whole, _ = head.read(0, 0, tokens, streams)
    torch.testing.assert_close(logits, whole)
