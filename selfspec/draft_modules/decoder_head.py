"""Decoder layers with their own KV cache, over (token embedding, hidden state) pairs, for EAGLE and MTP heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.draft_modules.heads import LinearFactory, normed
from selfspec.runtime.base import Runtime


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a layer, named as in the configuration of LLaMA in `transformers`."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float = 10000.0


class OwnLayer:
    """A LLaMA decoder layer with its own KV cache.

    `tensors` are the weights, under the names of the projections and norms in `transformers`' LLaMA layer, optionally
    with biases of q, k and v. The optional tensor `inv_freq` holds RoPE's frequencies, if they do not follow from
    `theta`. `make` creates the linears.
    """

    def __init__(self, target: Runtime, shape: LayerShape, tensors: Mapping[str, Tensor], make: LinearFactory) -> None:
        self.shape = s = shape
        self._rows, self._dtype, self._device = target.rows, target.dtype, target.device
        self._norms = {name.removesuffix(".weight"): t for name, t in tensors.items() if t.dim() == 1}
        biases = [tensors[f"{name}_proj.bias"] for name in "qkv" if f"{name}_proj.bias" in tensors]
        self._qkv = make.linear(
            torch.cat([tensors[f"{name}_proj.weight"] for name in "qkv"]), torch.cat(biases) if biases else None
        )
        self._o = make.linear(tensors["o_proj.weight"])
        self._gate_up = make.linear(torch.cat([tensors["gate_proj.weight"], tensors["up_proj.weight"]]))
        self._down = make.linear(tensors["down_proj.weight"])
        inverse = self._norms.pop("inv_freq", None)
        if inverse is None:
            inverse = s.theta ** (-torch.arange(0, s.head_dim, 2, device=self._device) / s.head_dim)
        self._inverse = inverse.double()
        self._slots, self._cache = 0, torch.empty(0)

    def reserve(self, slots: int) -> None:
        """Grow the layer's KV cache to at least `slots` entries per cache row, keeping its contents."""
        if slots <= self._slots:
            return
        s, old_slots = self.shape, self._slots
        cache = torch.zeros(2, self._rows, s.kv_heads, slots, s.head_dim, dtype=self._dtype, device=self._device)
        if old_slots:
            cache[:, :, :, :old_slots] = self._cache
        self._cache, self._slots = cache, slots
        angles = torch.arange(slots, device=self._device)[:, None] * self._inverse
        self._cos = torch.cat([angles.cos()] * 2, -1).to(self._dtype).unsqueeze(1)
        self._sin = torch.cat([-angles.sin(), angles.sin()], -1).to(self._dtype).unsqueeze(1)

    def run(self, row: int, start: int, stream: Tensor, read: Tensor, positions: slice | Tensor) -> Tensor:
        """Return the layer's output `[n, D]` for n tokens, whose keys and values become the entries from `start` on.

        The entries have to be reserved. `stream` `[n, D]` is the residual stream, `read` `[n, D or 2 D]` the input of
        the attention projections, and `positions` are the sequence positions.
        """
        s, n, end = self.shape, len(read), start + len(read)
        heads = self._qkv(read).view(n, -1, s.head_dim)
        qk, v = heads[:, : s.heads + s.kv_heads], heads[:, s.heads + s.kv_heads :]
        rotated = qk * self._cos[positions] + qk.roll(s.head_dim // 2, -1) * self._sin[positions]
        cache = self._cache[:, row]
        cache[0, :, start:end], cache[1, :, start:end] = rotated[:, s.heads :].transpose(0, 1), v.transpose(0, 1)
        mask = None if n == 1 or not start else self._causal_mask(n, end)
        mixed = F.scaled_dot_product_attention(
            rotated[:, : s.heads].transpose(0, 1).unsqueeze(0),
            cache[:1, :, :end],
            cache[1:, :, :end],
            attn_mask=mask,
            is_causal=n > 1 and mask is None,
            enable_gqa=s.heads != s.kv_heads,
        )
        stream = stream + self._o(mixed[0].transpose(0, 1).reshape(n, -1))
        gate, up = self._gate_up(self.normed("post_attention_layernorm", stream)).chunk(2, -1)
        return stream + self._down(F.silu(gate) * up)

    def last(self, streams: Tensor) -> Tensor:
        """Return the last hidden state `[1, D]` for an output head: after the layer's norm `norm`, if there is one."""
        return self.normed("norm", streams[-1:])

    def normed(self, name: str, x: Tensor) -> Tensor:
        """Return `x` after the layer's norm of this name, or `x` itself if the layer has no norm of this name."""
        return normed(x, self._norms.get(name), self.shape.eps)

    def _causal_mask(self, n: int, end: int) -> Tensor:
        return torch.ones(n, end, dtype=torch.bool, device=self._device).tril(end - n)


class PairLayer(OwnLayer):
    """A decoder layer that reads a token embedding and a hidden state for each pair; it predicts the next hidden state.

    The steps below name their tensors; a step whose tensor is missing is skipped. The model's hidden states, of one or
    several concatenated layers, are mapped to `[n, D]` (`fuse`) and normed (`given_norm`). These two steps are left out
    for the layer's own outputs, which it reads while drafting. Then embedding and hidden state are normed
    (`embed_norm`, `stream_norm`). With `fc`, their concatenation is mapped to the layer's residual stream, which
    attention reads normed (`input_layernorm`). Without `fc`, attention reads the concatenation, and its output is added
    to the hidden state (EAGLE-3). The layer's output is normed before an output head reads it (`norm`).
    """

    def __init__(self, target: Runtime, shape: LayerShape, tensors: Mapping[str, Tensor], make: LinearFactory) -> None:
        super().__init__(target, shape, tensors, make)
        self._eps = target.skeleton.sizes.eps
        fuse, fc = tensors.get("fuse.weight"), tensors.get("fc.weight")
        self._fuse = None if fuse is None else make.linear(fuse)
        self._fc = None if fc is None else make.linear(fc, tensors.get("fc.bias"))

    def read(self, row: int, start: int, embedded: Tensor, streams: Tensor, *, from_target: bool) -> Tensor:
        """Return the layer's outputs `[n, D]` for n pairs, which are the pairs from number `start` on.

        `embedded` `[n, D]` are the token embeddings of the pairs, `streams` `[n, D or more]` the hidden states.
        `from_target`: whether the hidden states are the model's; if not, they are outputs of this layer.
        """
        stream = streams
        if from_target:
            stream = stream if self._fuse is None else self._fuse(stream)
            stream = normed(stream, self._norms.get("given_norm"), self._eps)
        both = torch.cat((self.normed("embed_norm", embedded), self.normed("stream_norm", stream)), -1)
        if self._fc is not None:
            stream = self._fc(both)
            both = self.normed("input_layernorm", stream)
        return self.run(row, start, stream, both, slice(start, start + len(both)))


def layer_of(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with `prefix`, by their names without the prefix."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
