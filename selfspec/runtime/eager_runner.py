"""Eager passes: the residual loop, the KV cache writes and the attention call, for any path on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.models.families.base import Attention, AttentionSpec, Block
from selfspec.models.skeleton import Skeleton
from selfspec.runtime.attention_inputs import (
    AttentionInputs,
    Masks,
    PassInputs,
    RotaryTable,
    build_attention_inputs,
    to_device,
)
from selfspec.runtime.cache import Cache
from selfspec.runtime.compiled_path import LeanPath
from selfspec.runtime.triton_attention import TritonInputs, triton_attention
from selfspec.runtime.workspace import Scratch, ScratchPool
from selfspec.speculation.forward_output import ForwardOutput

_NARROW = 16  # tokens up to which explicit products on a CPU beat its fused attention and elementwise RoPE


class EagerRunner:
    """Eager passes over one cache.

    `attention_specs`: the model's attention specs, each with its rotary table. `scaling` multiplies attention scores.
    `direct`: compute passes over few tokens by explicit products, which round differently from fused attention.
    `triton`: compute attention of few tokens by Triton kernels, if they support the model.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        cache: Cache,
        attention_specs: Sequence[tuple[AttentionSpec, RotaryTable]],
        masks: Masks,
        *,
        scaling: float,
        direct: bool,
        triton: bool = False,
    ) -> None:
        self.skeleton, self.cache = skeleton, cache
        self._attention_specs, self._masks, self._scaling, self._direct = attention_specs, masks, scaling, direct
        self._scratches = ScratchPool(skeleton.sizes)
        self._triton = triton_attention(skeleton, cache, attention_specs, scaling) if triton else None

    @property
    def reads_lengths(self) -> bool:
        """Whether passes over few tokens read the KV length on the device, so that a captured one serves any length."""
        return self._triton is not None

    def forward(
        self,
        compiled: LeanPath,
        tokens: Tensor,
        pass_inputs: PassInputs,
        *,
        logits: Literal["all", "last"] | None,
        hidden: Sequence[int] = (),
        between: Sequence[int] = (),
        scratch: Scratch | None = None,
    ) -> ForwardOutput:
        """Run a pass as `Runtime.forward` does. `scratch`: the workspace to use, on the first layer's device."""
        batch, n = tokens.shape
        inputs_by_spec = self._attention_inputs(pass_inputs)
        scratch = scratch or self._scratches.get(batch, n, self.skeleton.device)
        scratch.stream.copy_(self.skeleton.embed(tokens).flatten(0, 1))
        layers = len(self.skeleton.blocks)
        streams, halves = dict[int, Tensor](), dict[int, Tensor]()
        for index, device, attention, mlp in compiled.blocks:
            if index in hidden:
                streams[index] = scratch.copy_stream()
            if scratch.device != device:
                scratch, inputs_by_spec = (
                    self._scratches.moved(scratch, device),
                    [_on(inputs, device) for inputs in inputs_by_spec],
                )
            if attention is not None:
                self._attention(attention, index, scratch, inputs_by_spec[attention.attention_spec])
            if index in between:
                halves[index] = scratch.copy_stream()
            if mlp is not None:
                mlp.run(scratch)
        if layers in hidden:
            streams[layers] = scratch.copy_stream()
        if logits is None:
            return ForwardOutput(None, streams, halves)
        rows = slice(None) if logits == "all" or n == 1 else slice(n - 1, None, n)
        normed = self.skeleton.norm(scratch.stream[rows], scratch.stream_with_eps[rows], scratch.normed[rows])
        out = compiled.head(normed)
        return ForwardOutput(out.to(self.skeleton.device).view(batch, -1, out.shape[-1]), streams, halves)

    def branch(self, index: int, part: Literal["attention", "mlp"], x: Tensor, pass_inputs: PassInputs) -> Tensor:
        """Return the output of one sub-layer for hidden states `x` `[B, n, D]`, as `Runtime.branch` does."""
        block = self.skeleton.blocks[index]
        scratch = self._scratches.get(pass_inputs.batch, pass_inputs.n, block.device)
        x = x.to(block.device).flatten(0, 1)
        scratch.stream.copy_(x)
        if part == "mlp":
            block.mlp.run(scratch)
        else:
            inputs = _on(self._attention_inputs(pass_inputs)[block.attention.attention_spec], block.device)
            self._attention(block.attention, index, scratch, inputs)
        return (scratch.stream - x).view(pass_inputs.batch, pass_inputs.n, -1)

    def run_layer(self, index: int, block: Block, x: Tensor, pass_inputs: PassInputs) -> Tensor:
        """Return the output `[B, n, D]` of layer `index`, run as `block`, for hidden states `x`."""
        scratch = self._scratches.get(pass_inputs.batch, pass_inputs.n, block.device)
        scratch.stream.copy_(x.to(block.device).flatten(0, 1))
        attention, mlp = block.running(attention=True, mlp=True)
        assert attention is not None
        assert mlp is not None
        inputs = _on(self._attention_inputs(pass_inputs)[attention.attention_spec], block.device)
        self._attention(attention, index, scratch, inputs)
        mlp.run(scratch)
        return scratch.copy_stream()

    def _attention_inputs(self, pass_inputs: PassInputs) -> Sequence[AttentionInputs | TritonInputs]:
        """Return the attention inputs of a pass for each attention spec of the model."""
        if self._triton is not None and (inputs := self._triton.inputs(pass_inputs)) is not None:
            return inputs
        narrow = self._direct and pass_inputs.batch * pass_inputs.n <= _NARROW
        return [
            build_attention_inputs(*attention_spec, self.cache, self._masks, pass_inputs, narrow=narrow)
            for attention_spec in self._attention_specs
        ]

    def _attention(
        self, attention: Attention, index: int, scratch: Scratch, inputs: AttentionInputs | TritonInputs
    ) -> None:
        """Write a layer's keys and values to the cache, and add its attention output to the residual stream."""
        attention.qkv(attention.norm(scratch.stream, scratch.stream_with_eps, scratch.normed), scratch.qkv)
        if isinstance(inputs, TritonInputs):
            assert self._triton is not None
            self._triton.run(index, scratch, inputs)
        else:
            self._attend(attention, index, scratch, inputs)
        attention.add(scratch.stream, scratch.attention_out)

    def _attend(self, attention: Attention, index: int, scratch: Scratch, inputs: AttentionInputs) -> None:
        """Write a layer's keys and values to the cache, and its attention output to `scratch.attention_out`."""
        if isinstance(inputs.rotation, Tensor):
            if scratch.single_row is not None:
                torch.mm(scratch.single_row[0], inputs.rotation, out=scratch.single_row[1])
            else:
                torch.bmm(scratch.qk, inputs.rotation, out=scratch.rotated)
        else:
            cos, sin = inputs.rotation
            if inputs.partner is None:
                swapped = scratch.qk.roll(self.skeleton.sizes.head_dim // 2, -1)
            else:
                swapped = scratch.qk.index_select(-1, inputs.partner)
            torch.mul(scratch.qk, cos, out=scratch.rotated).addcmul_(swapped, sin)
        if isinstance(inputs.to, Tensor):
            self.cache.scatter(index, scratch.k, scratch.v, inputs.to, inputs.rows)
        else:
            inputs.to[0][index].copy_(scratch.k_to_write)
            inputs.to[1][index].copy_(scratch.v_to_write)
        scratch.gather_q()
        if inputs.direct:
            q, keys = scratch.q_rows, inputs.keys[index]
            if attention.weights is not None:
                weights = attention.weights(torch.bmm(q, keys).mul_(self._scaling), inputs.mask)
            elif inputs.mask is None:
                weights = torch.bmm(q, keys).softmax(-1)
            else:
                weights = torch.baddbmm(inputs.mask, q, keys).softmax(-1)
            out = torch.bmm(weights, inputs.values[index], out=scratch.out)
        else:
            keys = inputs.keys[index]
            if keys.stride(-1) != 1:  # fused attention does not take transposed keys
                keys = keys[:, :1].contiguous().expand_as(keys)
            out = F.scaled_dot_product_attention(
                scratch.q,
                keys,
                inputs.values[index],
                attn_mask=inputs.mask,
                is_causal=inputs.causal,
                scale=self._scaling,
            )
        if out is not scratch.out:
            scratch.store_attention(out)


def _on(inputs: AttentionInputs | TritonInputs, device: torch.device) -> AttentionInputs | TritonInputs:
    """Return attention inputs on `device`; those of Triton kernels are on a model's only device."""
    return inputs if isinstance(inputs, TritonInputs) else to_device(inputs, device)
