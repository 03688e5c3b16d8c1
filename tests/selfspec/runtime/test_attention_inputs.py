"""Additive masks, where their rows start, and which backends fused attention may use."""

from __future__ import annotations

import pytest
import torch
from models import small

from selfspec.models.skeleton import read_skeleton
from selfspec.runtime.attention_inputs import Masks, fused_backends


@pytest.fixture(scope="module")
def both():
    sizes = read_skeleton(small(11)).sizes
    return Masks(sizes, torch.device("cpu")), Masks(sizes, torch.device("cpu"), aligned=8)


def starts(mask: torch.Tensor) -> bool:
    return mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1])


@pytest.mark.parametrize(("n", "end", "window"), [(1, 1, None), (3, 13, None), (5, 21, 4), (70, 75, None), (8, 16, 3)])
def test_rows_of_a_chain_start_at_multiples_of_8_where_fused_attention_asks_for_it(both, n, end, window):
    ours, aligned = (masks.chain(n, end, window) for masks in both)
    assert torch.equal(ours, aligned)
    assert starts(aligned)
    token, slot = torch.arange(end - n, end)[:, None], torch.arange(end)
    assert torch.equal(ours == 0, (slot <= token) & (slot > token - (window or end + 1)))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("slots", [8, 13])
def test_rows_of_a_tree_mask(both, batch, slots):
    mask = torch.rand(batch, 4, slots, generator=torch.Generator().manual_seed(0)) < 0.5
    ours, aligned = (masks.additive(mask) for masks in both)
    assert torch.equal(ours, aligned)
    assert starts(aligned)
    kv_heads = ours.shape[0] // batch
    assert torch.equal(ours[::kv_heads, 0] == 0, mask)
    assert torch.equal(both[0].grouped(ours), both[1].grouped(aligned))


def enabled() -> list[bool]:
    cuda = torch.backends.cuda
    return [
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()
    ]  # fmt: skip


def test_passes_on_cuda_leave_out_cudnn_and_nothing_else_changes():
    before = enabled()
    with fused_backends(torch.device("cuda", 0)):
        assert enabled() == [True, True, True, False]
    assert enabled() == before
    with fused_backends(torch.device("cpu")):
        assert enabled() == before
