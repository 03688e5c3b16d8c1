"""Quantised weights in the order in which native code reads them."""

from __future__ import annotations

import pytest
import torch
from layouts import needs_native

from selfspec.models.low_precision import PackedWeight, quantize

SIZES = [(16, 32), (17, 64), (100, 96), (33, 77), (64, 1536)]


def weights(bits, dtype=torch.float32):
    """Weights of every size, large and small ones, around zero and beside it, and zeros."""
    generator = torch.Generator().manual_seed(0)
    for out, into in SIZES:
        for size in (1.0, 1e-3, 300.0, 0.0):
            if bits == 8 or into % 32 == 0:
                yield (torch.randn(out, into, generator=generator) * size + 0.3 * size).to(dtype)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_was_packed_is_unpacked(bits):
    for exact in weights(bits):
        weight = quantize(exact, bits)
        packed = PackedWeight.of(weight)
        again = packed.unpacked()
        assert packed.bits == again.bits == bits
        assert torch.equal(again.values, weight.values)
        assert torch.equal(again.weight(torch.float32), weight.weight(torch.float32))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_native_code_rounds_as_quantize_does(bits, dtype):
    for exact in weights(bits, dtype):
        mine, theirs = PackedWeight.rounded(exact, bits), PackedWeight.of(quantize(exact, bits))
        assert torch.equal(mine.values, theirs.values)
        assert torch.equal(mine.scale, theirs.scale)
        assert (mine.kind, mine.group) == (theirs.kind, theirs.group)
