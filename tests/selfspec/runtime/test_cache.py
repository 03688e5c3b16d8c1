"""The static cache: what a commit keeps, what growing takes along."""

from __future__ import annotations

import pytest
import torch

from selfspec.runtime.cache import Cache, KVShape

LAYERS, HEADS, DIM = 2, 3, 4


def cache(rows: int, slots: int, *, turned: bool = False, placed: bool = False, shapes=None) -> Cache:
    devices = [torch.device("cpu")] * LAYERS
    sizes = {"rows": rows, "kv_heads": HEADS, "group": 2, "slots": slots, "head_dim": DIM}
    return Cache(
        **sizes, dtype=torch.float64, devices=devices, keys_transposed=turned, track_positions=placed, shapes=shapes
    )


def fill(one: Cache) -> None:
    """Different numbers everywhere."""
    for number, tensor in enumerate((*one.keys, *one.values)):
        tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape) + 1000 * number)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("lengths", [(2, 5, 3), (5, 2, 0), (0, 0, 4)])
def test_a_larger_cache_takes_over_what_every_row_has_committed(lengths, turned):
    small, large = cache(3, 6, turned=turned), cache(3, 20, turned=turned)
    fill(small)
    small.length, small.tokens = list(lengths), [(7,) * n for n in lengths]
    large.copy_from(small)
    assert large.length == list(lengths)
    assert large.tokens == small.tokens
    for mine, old in zip((*large.keys, *large.values), (*small.keys, *small.values), strict=True):
        for row, length in enumerate(lengths):
            assert torch.equal(mine[row, :, :length], old[row, :, :length])


@pytest.mark.parametrize("path", [(), (0,), (0, 1), (1,), (3,), (0, 2), (1, 3), (0, 1, 2, 3)])
def test_a_commit_keeps_the_root_and_the_path_in_order(path):
    one = cache(2, 20, placed=True)
    fill(one)
    one.length = [4, 6]
    before = [tensor.clone() for tensor in (*one.keys, *one.values)]
    one.commit(1, path)
    assert one.length == [4, 7 + len(path)]
    kept = [*range(7), *(7 + node for node in path)]
    for mine, old in zip((*one.keys, *one.values), before, strict=True):
        assert torch.equal(mine[1, :, : one.length[1]], old[1, :, kept])
        assert torch.equal(mine[0], old[0])
    assert one.positions[1, : one.length[1]].tolist() == list(range(one.length[1]))


def test_layers_may_differ_in_shape():
    """Also without keys, and without values, as an indexer's."""
    shapes = [KVShape(3, 4, 2), KVShape(1, 6, 0)]
    small, large = cache(2, 6, shapes=shapes), cache(2, 20, shapes=shapes)
    assert [tuple(t.shape[1:2] + t.shape[3:]) for t in (*small.keys, *small.values)] == [(3, 4), (1, 6), (3, 2), (1, 0)]
    fill(small)
    before = [t.clone() for t in (*small.keys, *small.values)]
    small.length = [2, 4]
    small.commit(0, (1,))
    assert small.length == [4, 4]
    large.copy_from(small)
    for mine, old in zip((*large.keys, *large.values), before, strict=True):
        assert torch.equal(mine[0, :, :4], old[0, :, [0, 1, 2, 4]])
        assert torch.equal(mine[1, :, :4], old[1, :, :4])
    assert small.bytes == sum(t.numel() for t in before) * 8
