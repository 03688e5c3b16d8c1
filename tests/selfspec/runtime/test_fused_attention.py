"""Which backends fused attention may use."""

from __future__ import annotations

import torch

from selfspec.runtime.attention_inputs import fused_backends


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
