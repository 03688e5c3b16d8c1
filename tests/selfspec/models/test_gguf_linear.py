"""Weights kept in a file's blocks: what they stand for, and their products, natively and without a compiler."""

from __future__ import annotations

import copy
import pickle

import gguf
import numpy as np
import pytest
import torch
from amount import examples
from gguf_weights import blocks_of, multiplied
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import needs_native
from models import threads
from torch import nn

from selfspec.basics.errors import SelfspecError
from selfspec.models.gguf_blocks import TYPES
from selfspec.models.gguf_linear import (
    BlockLinear,
    BlockProduct,
    GGUFWeight,
    SlowBlockProduct,
    block_product,
    concat_weights,
)
from selfspec.models.half_storage import HalfWeight
from selfspec.models.low_precision import is_quantizable
from selfspec.models.stored_linear import StoredEmbedding

each_type = pytest.mark.parametrize("kind", list(TYPES))
BITS = {"Q8_0": 8.5, "Q4_0": 5, "Q4_1": 5, "Q5_0": 6, "Q5_1": 6, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625}


@each_type
@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-7])  # the last ones with subnormal scales
def test_they_stand_for_what_the_file_says(kind, scale):
    blocks, exact = blocks_of(kind, 0, 6, 768, scale=scale)
    assert torch.equal(blocks.weight(), exact)
    assert blocks.shape == (6, 768)
    assert blocks.bytes == 6 * 768 * BITS[kind] / 8
    assert torch.equal(blocks.rows(torch.tensor([4, 1])).weight(), exact[[4, 1]])
    assert torch.equal(concat_weights([blocks, blocks.rows(slice(0, 2))]).weight(), torch.cat([exact, exact[:2]]))


@each_type
def test_any_bytes_stand_for_what_gguf_says(kind, monkeypatch):
    """All scales, zeros and values, also those that no writer writes; in some parts, and in another order."""
    monkeypatch.setattr("selfspec.models.gguf_blocks._AT_ONCE", 1000)
    kinds = TYPES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (7, 512 // kinds.inputs, kinds.size), dtype=np.uint8)
    for at in (208,) if kind == "Q6_K" else (0, 2) if kind not in ("Q8_0", "Q4_0", "Q5_0") else (0,):
        halves = raw[..., at : at + 2].copy().view(np.float16)
        raw[..., at : at + 2] = np.where(np.abs(halves) < 100, halves, np.float16(0.3)).view(np.uint8)
    raw = raw.reshape(7, -1)
    exact = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    order = torch.tensor([6, 0, 1, 5, 2, 4, 3])
    assert torch.equal(GGUFWeight(kinds.layout, *kinds.read(raw)).weight(), exact)
    assert torch.equal(GGUFWeight(kinds.layout, *kinds.read(raw, order)).weight(), exact[order])


@needs_native
@each_type
@settings(max_examples=examples(15))
@given(seed=st.integers(0, 999), out=st.integers(1, 70), blocks=st.integers(1, 4), rows=st.integers(1, 40))
def test_native_products_are_float32s_and_a_row_is_the_same_alone(kind, seed, out, blocks, rows):
    weight, exact = blocks_of(kind, seed, out, TYPES[kind].inputs * blocks)
    torch.manual_seed(seed)
    bias, x = torch.randn(out), torch.randn(rows, exact.shape[1])
    got = multiplied(weight, exact, bias, x)
    base = torch.randn(rows, out)
    added = base.clone()
    BlockProduct(weight, bias).add(added, x)
    assert torch.equal(added, base + got)


@needs_native
def test_weights_of_several_types_are_one_product():
    """Each as if it were alone, with threads' shares that begin and end in any of them."""
    kinds = ("Q4_K", "Q6_K", "Q8_0", "Q5_0")
    parts, exact = zip(*(blocks_of(kind, i, 24 + 16 * i, 512) for i, kind in enumerate(kinds)), strict=True)
    half = HalfWeight(torch.randn(40, 512).half())
    weight, whole = concat_weights([*parts, half]), torch.cat([*exact, half.weight()])
    bias, x = torch.randn(len(whole)), torch.randn(16, 512)
    product = block_product(weight, bias)
    expected = torch.cat(
        [
            block_product(part, own)(x)
            for part, own in zip((*parts, half), bias.split([len(e) for e in (*exact, half.values)]), strict=True)
        ],
        1,
    )
    assert torch.equal(product(x), expected)
    assert torch.equal(torch.cat([product(row[None]) for row in x]), expected)
    with threads(2):
        assert torch.equal(product(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(product))(x), expected)
    assert weight.bytes == sum(part.bytes for part in (*parts, half))
    assert torch.equal(weight.weight(), whole)
    linear = BlockLinear(product, 24, nn.Linear(512, 40))
    assert torch.equal(linear.weight, exact[1])
    assert linear.bits == 6
    torch.testing.assert_close(SlowBlockProduct(weight, bias)(x), expected, atol=1e-2, rtol=1e-3)


@needs_native
@each_type
def test_subnormal_scales_count_natively(kind):
    weight, exact = blocks_of(kind, 3, 16, 512, scale=1e-6)
    x = torch.randn(3, 512)
    torch.testing.assert_close(BlockProduct(weight)(x), x @ exact.t(), atol=1e-10, rtol=1e-4)


@needs_native
@each_type
def test_it_can_be_copied_and_written(kind):
    weight, _ = blocks_of(kind, 1, 40, 256)
    product, x = BlockProduct(weight, torch.randn(40)), torch.randn(5, 256)
    for other in copy.deepcopy(product), pickle.loads(pickle.dumps(product)):
        assert torch.equal(other(x), product(x))


@each_type
def test_without_a_compiler_products_are_the_dequantised_weights(kind, monkeypatch):
    monkeypatch.setattr("selfspec.models.gguf_linear._AT_ONCE", 16)
    weight, exact = blocks_of(kind, 2, 40, 256)
    bias, x = torch.randn(40), torch.randn(3, 256, dtype=torch.float64)
    product = SlowBlockProduct(weight, bias)
    torch.testing.assert_close(product(x), x @ exact.double().t() + bias.double())


@pytest.mark.parametrize("make", [pytest.param(BlockProduct, marks=needs_native), SlowBlockProduct])
@each_type
def test_linears_are_parts_of_one_product(kind, make):
    weight, exact = blocks_of(kind, 2, 48, 256)
    whole = make(weight, torch.arange(48.0))
    second = BlockLinear(whole, 16, nn.Linear(256, 32))
    x = torch.randn(2, 3, 256)
    expected = x @ exact[16:].t() + torch.arange(16.0, 48)
    torch.testing.assert_close(second(x), expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(second.weight, exact[16:])
    over = second.with_outputs(torch.tensor([5, 0]))
    torch.testing.assert_close(over(x[0]), expected[0][:, [5, 0]], atol=1e-4, rtol=1e-5)
    assert set(second.state_dict()) == {"weight", "bias"}
    with pytest.raises(SelfspecError, match="quantised GGUF weights stay on the CPU"):
        second.to(torch.bfloat16)
    assert second.to("cpu") is second


@pytest.mark.parametrize("make", [pytest.param(BlockProduct, marks=needs_native), SlowBlockProduct])
def test_gradients_pass_through_to_inputs(make):
    """Training a path of a GGUF model that is kept in its quantised types needs them."""
    weight, exact = blocks_of("Q8_0", 2, 48, 256)
    linear, x = BlockLinear(make(weight), 0, nn.Linear(256, 48, bias=False)), torch.randn(2, 256, requires_grad=True)
    linear(x).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * (x.detach() @ exact.t()) @ exact, atol=1e-2, rtol=1e-4)


@each_type
def test_drafts_in_as_many_bits_are_not_offered(kind):
    """They would read as much; in fewer bits, they would not."""
    weight, _ = blocks_of(kind, 2, 48, 256)
    linear = BlockLinear(SlowBlockProduct(weight), 0, nn.Linear(256, 48))
    assert not is_quantizable([linear], 8)
    assert is_quantizable([linear], 4) == (linear.bits > 4)


@each_type
def test_an_embedding_gives_its_rows(kind):
    weight, exact = blocks_of(kind, 5, 20, 256)
    embedding, ids = StoredEmbedding(weight), torch.tensor([[3, 19, 3]])
    assert torch.equal(embedding(ids), exact[ids])
    with pytest.raises(SelfspecError, match="stay on the CPU"):
        embedding.to(torch.float64)
