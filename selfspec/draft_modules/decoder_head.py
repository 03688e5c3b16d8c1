"""Decoder layers with keys and values of their own, over pairs of an embedding and a stream: EAGLE's and MTP's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.draft_modules.heads import Products, normed
from selfspec.runtime.forward import Runtime


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a layer, as `transformers` names a LLaMA's."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float = 10000.0


class OwnLayer:
    """A LLaMA's layer with keys and values of its own.

    `tensors` by the names of its projections and norms, biases of q, k and v among them; `inv_freq`: rope's
    frequencies, where they are not those of `theta`.
    """

    def __init__(self, target: Runtime, shape: LayerShape, tensors: Mapping[str, Tensor], make: Products) -> None:
        self.shape = s = shape
        self._rows, self._dtype, self._device = target.rows, target.dtype, target.device
        self._norms = {name.removesuffix(".weight"): t for name, t in tensors.items() if t.dim() == 1}
        biases = [tensors[f"{name}_proj.bias"] for name in "qkv" if f"{name}_proj.bias" in tensors]
        self._qkv = make.of(
            torch.cat([tensors[f"{name}_proj.weight"] for name in "qkv"]), torch.cat(biases) if biases else None
        )
        self._o = make.of(tensors["o_proj.weight"])
        self._gate_up = make.of(torch.cat([tensors["gate_proj.weight"], tensors["up_proj.weight"]]))
        self._down = make.of(tensors["down_proj.weight"])
        inverse = self._norms.pop("inv_freq", None)
        if inverse is None:
            inverse = s.theta ** (-torch.arange(0, s.head_dim, 2, device=self._device) / s.head_dim)
        self._inverse = inverse.double()
        self._slots, self._cache = 0, torch.empty(0)

    def reserve(self, slots: int) -> None:
        """Hold so many entries of each row; what was read stays."""
        if slots <= self._slots:
            return
        s, held = self.shape, self._slots
        cache = torch.zeros(2, self._rows, s.kv_heads, slots, s.head_dim, dtype=self._dtype, device=self._device)
        if held:
            cache[:, :, :, :held] = self._cache
        self._cache, self._slots = cache, slots
        angles = torch.arange(slots, device=self._device)[:, None] * self._inverse
        self._cos = torch.cat([angles.cos()] * 2, -1).to(self._dtype).unsqueeze(1)
        self._sin = torch.cat([-angles.sin(), angles.sin()], -1).to(self._dtype).unsqueeze(1)

    def run(self, row: int, start: int, stream: Tensor, read: Tensor, at: slice | Tensor) -> Tensor:
        """What leaves the layer `[n, D]` at entries from `start` on, which have been reserved.

        `stream` `[n, D]` is what it adds to, `read` what its attention reads, `at` the positions.
        """
        s, n, end = self.shape, len(read), start + len(read)
        heads = self._qkv(read).view(n, -1, s.head_dim)
        turning, v = heads[:, : s.heads + s.kv_heads], heads[:, s.heads + s.kv_heads :]
        turned = turning * self._cos[at] + turning.roll(s.head_dim // 2, -1) * self._sin[at]
        cache = self._cache[:, row]
        cache[0, :, start:end], cache[1, :, start:end] = turned[:, s.heads :].transpose(0, 1), v.transpose(0, 1)
        mask = None if n == 1 or not start else self._seen(n, end)
        mixed = F.scaled_dot_product_attention(
            turned[:, : s.heads].transpose(0, 1).unsqueeze(0),
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
        """What a head over the vocabulary reads of the last stream `[1, D]`."""
        return self.normed("norm", streams[-1:])

    def normed(self, name: str, x: Tensor) -> Tensor:
        """By the norm of that name; `x` itself where there is none."""
        return normed(x, self._norms.get(name), self.shape.eps)

    def _seen(self, n: int, end: int) -> Tensor:
        return torch.ones(n, end, dtype=torch.bool, device=self._device).tril(end - n)


class PairLayer(OwnLayer):
    """One that reads an embedding and a stream for each pair, and gives the next pair's stream.

    Of its tensors, what is not there is left out. Of the model's streams alone, those of several layers side by side
    are brought to one (`fuse`) and normed (`given_norm`). Then embedding and stream are normed (`embed_norm`,
    `stream_norm`), and what comes out before a head over the vocabulary reads it (`norm`). With `fc` they become the
    layer's own stream, which its attention reads normed (`input_layernorm`); without, attention reads both side by
    side, and adds to the stream (EAGLE-3).
    """

    def __init__(self, target: Runtime, shape: LayerShape, tensors: Mapping[str, Tensor], make: Products) -> None:
        super().__init__(target, shape, tensors, make)
        self._eps = target.skeleton.sizes.eps
        fuse, fc = tensors.get("fuse.weight"), tensors.get("fc.weight")
        self._fuse = None if fuse is None else make.of(fuse)
        self._fc = None if fc is None else make.of(fc, tensors.get("fc.bias"))

    def read(self, row: int, start: int, embedded: Tensor, streams: Tensor, *, given: bool) -> Tensor:
        """The streams `[n, D]` that leave the layer at pairs from `start` on, `embedded` `[n, D]`.

        `given`: whether the streams `[n, D or more]` are the model's.
        """
        stream = streams
        if given:
            stream = stream if self._fuse is None else self._fuse(stream)
            stream = normed(stream, self._norms.get("given_norm"), self._eps)
        both = torch.cat((self.normed("embed_norm", embedded), self.normed("stream_norm", stream)), -1)
        if self._fc is not None:
            stream = self._fc(both)
            both = self.normed("input_layernorm", stream)
        return self.run(row, start, stream, both, slice(start, start + len(both)))


def layer_of(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors of one layer, by the names that `PairLayer` knows."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
