"""Weights kept in a file's blocks: what they stand for, and their products, natively and without a compiler."""

from __future__ import annotations

import copy
import pickle

import gguf
import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import needs_native
from torch import nn

from selfspec.basics.errors import SelfspecError
from selfspec.models.gguf_linear import (
    BlockLinear,
    BlockProduct,
    GGUFWeight,
    SlowBlockProduct,
    concat_weights,
)
from selfspec.models.low_precision import is_quantizable
from selfspec.models.stored_linear import StoredEmbedding

each_bits = pytest.mark.parametrize("bits", [8, 4])


def blocks_of(bits, seed, out, into, *, scale=1.0):
    """Random blocks as a quantised weight's, and what `gguf` says they stand for."""
    weight = np.random.default_rng(seed).normal(size=(out, into)).astype(np.float32) * scale
    kind = gguf.GGMLQuantizationType.Q8_0 if bits == 8 else gguf.GGMLQuantizationType.Q4_1
    raw = gguf.quants.quantize(weight, kind)
    numbers = 1 if bits == 8 else 2
    split = raw.reshape(out, into // 32, -1)
    grid = torch.from_numpy(np.ascontiguousarray(split[..., : 2 * numbers]).view(np.float16))
    values = torch.from_numpy(np.ascontiguousarray(split[..., 2 * numbers :])).view(out, -1)
    blocks = GGUFWeight(bits, values.view(torch.int8) if bits == 8 else values, grid)
    return blocks, torch.from_numpy(gguf.quants.dequantize(raw, kind))


@each_bits
@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-7])  # the last ones with subnormal scales
def test_they_stand_for_what_the_file_says(bits, scale):
    blocks, exact = blocks_of(bits, 0, 6, 96, scale=scale)
    assert torch.equal(blocks.weight(), exact)
    assert blocks.shape == (6, 96)
    assert blocks.bytes == 6 * 3 * (34 if bits == 8 else 20)
    assert torch.equal(blocks.rows(torch.tensor([4, 1])).weight(), exact[[4, 1]])
    assert torch.equal(concat_weights([blocks, blocks.rows(slice(0, 2))]).weight(), torch.cat([exact, exact[:2]]))


@needs_native
@each_bits
@settings(max_examples=examples(30))
@given(seed=st.integers(0, 999), out=st.integers(1, 70), blocks=st.integers(1, 4), rows=st.integers(1, 40))
def test_native_products_are_float32s_and_a_row_is_the_same_alone(bits, seed, out, blocks, rows):
    weight, exact = blocks_of(bits, seed, out, 32 * blocks)
    torch.manual_seed(seed)
    bias, x = torch.randn(out), torch.randn(rows, 32 * blocks)
    product = BlockProduct(weight, bias)
    got = product(x)
    size = x.double().abs() @ exact.double().abs().t() + bias.abs()
    assert ((got.double() - (x.double() @ exact.double().t() + bias)).abs() <= (x.shape[1] + 8) * 2.0**-24 * size).all()
    assert torch.equal(got, torch.cat([product(row[None]) for row in x]))
    base = torch.randn(rows, out)
    added = base.clone()
    product.add(added, x)
    assert torch.equal(added, base + got)


@needs_native
@each_bits
def test_subnormal_scales_count_natively(bits):
    weight, exact = blocks_of(bits, 3, 16, 64, scale=1e-6)
    x = torch.randn(3, 64)
    torch.testing.assert_close(BlockProduct(weight)(x), x @ exact.t(), atol=1e-12, rtol=1e-4)


@needs_native
@each_bits
def test_it_can_be_copied_and_written(bits):
    weight, _ = blocks_of(bits, 1, 40, 64)
    product, x = BlockProduct(weight, torch.randn(40)), torch.randn(5, 64)
    for other in copy.deepcopy(product), pickle.loads(pickle.dumps(product)):
        assert torch.equal(other(x), product(x))


@each_bits
def test_without_a_compiler_products_are_the_dequantised_weights(bits, monkeypatch):
    monkeypatch.setattr("selfspec.models.gguf_linear._AT_ONCE", 16)
    weight, exact = blocks_of(bits, 2, 40, 64)
    bias, x = torch.randn(40), torch.randn(3, 64, dtype=torch.float64)
    product = SlowBlockProduct(weight, bias)
    torch.testing.assert_close(product(x), x @ exact.double().t() + bias.double())


@pytest.mark.parametrize("make", [pytest.param(BlockProduct, marks=needs_native), SlowBlockProduct])
@each_bits
def test_linears_are_parts_of_one_product(bits, make):
    weight, exact = blocks_of(bits, 2, 48, 64)
    whole = make(weight, torch.arange(48.0))
    second = BlockLinear(whole, 16, nn.Linear(64, 32))
    x = torch.randn(2, 3, 64)
    expected = x @ exact[16:].t() + torch.arange(16.0, 48)
    torch.testing.assert_close(second(x), expected)
    assert torch.equal(second.weight, exact[16:])
    over = second.with_outputs(torch.tensor([5, 0]))
    torch.testing.assert_close(over(x[0]), expected[0][:, [5, 0]])
    assert set(second.state_dict()) == {"weight", "bias"}
    with pytest.raises(SelfspecError, match="quantised GGUF weights stay on the CPU"):
        second.to(torch.bfloat16)
    assert second.to("cpu") is second


@each_bits
def test_drafts_in_as_many_bits_are_not_offered(bits):
    """They would read as much; in fewer bits, they would not."""
    weight, _ = blocks_of(bits, 2, 48, 64)
    linear = BlockLinear(SlowBlockProduct(weight), 0, nn.Linear(64, 48))
    assert not is_quantizable([linear], 8)
    assert is_quantizable([linear], 4) == (bits == 8)


@each_bits
def test_an_embedding_gives_its_rows(bits):
    weight, exact = blocks_of(bits, 5, 20, 64)
    embedding, ids = StoredEmbedding(weight), torch.tensor([[3, 19, 3]])
    assert torch.equal(embedding(ids), exact[ids])
    with pytest.raises(SelfspecError, match="stay on the CPU"):
        embedding.to(torch.float64)
