"""Layers over pairs under training: EAGLE's one, on its own streams too (EAGLE-3's way), and MTP's several.

A net gives, for each of `depth` steps, what the head over the vocabulary reads `[B, n, D]`. It is told the pairs'
tokens and those after them, embedded `[B, n + depth - 1, D]`, and the model's streams there `[B, n, D * layers]`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.parts.layer import LayerShape


class _Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class PairModule(nn.Module):
    """A `PairLayer`'s weights, by its names. `layers`: so many streams of the model stand side by side."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    fc: nn.Linear
    fuse: nn.Linear

    def __init__(self, shape: LayerShape, *, layers: int = 1) -> None:
        super().__init__()
        self.shape = s = shape
        self.embed_norm, self.stream_norm, self.norm = (_Norm(s.hidden, s.eps) for _ in range(3))
        self.input_layernorm, self.post_attention_layernorm = (_Norm(s.hidden, s.eps) for _ in range(2))
        linear = {
            "q_proj": (s.hidden, s.heads * s.head_dim),
            "k_proj": (s.hidden, s.kv_heads * s.head_dim),
            "v_proj": (s.hidden, s.kv_heads * s.head_dim),
            "o_proj": (s.heads * s.head_dim, s.hidden),
            "gate_proj": (s.hidden, s.intermediate),
            "up_proj": (s.hidden, s.intermediate),
            "down_proj": (s.intermediate, s.hidden),
            "fc": (2 * s.hidden, s.hidden),
        }
        if layers > 1:
            linear["fuse"] = (layers * s.hidden, s.hidden)
        for name, (inputs, outputs) in linear.items():
            self.add_module(name, nn.Linear(inputs, outputs, bias=False))

    @torch.no_grad()
    def begin(self, layer: nn.Module, norm: Tensor) -> None:
        """From a layer of the model's, where it is a LLaMA's, and the model's last norm; of streams, the last one."""
        own = {name.removeprefix("self_attn.").removeprefix("mlp."): p for name, p in layer.named_parameters()}
        for name, tensor in self.named_parameters():
            given = own.get(name)
            if given is not None and given.shape == tensor.shape:
                tensor.copy_(given)
        self.norm.weight.copy_(norm)
        self.fc.weight.normal_(0, 0.02)
        if "fuse" in self._modules:
            self.fuse.weight.normal_(0, 0.02)[:, -self.shape.hidden :] += torch.eye(self.shape.hidden)

    def given(self, streams: Tensor) -> Tensor:
        """The model's streams as one."""
        return self.fuse(streams).float() if "fuse" in self._modules else streams

    def joined(self, embedded: Tensor, stream: Tensor) -> Tensor:
        """The layer's own stream `[B, n, D]`."""
        joined: Tensor = self.fc(torch.cat((self.embed_norm(embedded), self.stream_norm(stream)), -1)).float()
        return joined

    def heads(self, x: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, scaled, keys and values `[B, H, n, d]` of the own stream at pairs from `first` on."""
        s, (batch, n, _) = self.shape, x.shape
        read, at, group = (
            self.input_layernorm(x),
            torch.arange(first, first + n, device=x.device),
            s.heads // s.kv_heads,
        )

        def split(projected: Tensor, count: int) -> Tensor:
            return projected.float().view(batch, n, count, s.head_dim).transpose(1, 2)

        q = _turned(split(self.q_proj(read), s.heads), at, s.theta) * s.head_dim**-0.5
        k = _turned(split(self.k_proj(read), s.kv_heads), at, s.theta).repeat_interleave(group, 1)
        return q, k, split(self.v_proj(read), s.kv_heads).repeat_interleave(group, 1)

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The stream that leaves the layer, by what attention mixed `[B, H, n, d]`."""
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2)).float()
        read = self.post_attention_layernorm(x)
        left: Tensor = x + self.down_proj(F.silu(self.gate_proj(read)) * self.up_proj(read)).float()
        return left


class EagleNet(nn.Module):
    """One layer: at step k, the row of pair i stands at pair i + k, and reads its own stream of step k - 1.

    It sees all pairs up to i as the model left them, and its own row's steps.
    """

    def __init__(self, shape: LayerShape, *, layers: int = 1) -> None:
        super().__init__()
        self.layer = PairModule(shape, layers=layers)

    def forward(self, tokens: Tensor, embedded: Tensor, streams: Tensor, depth: int) -> list[Tensor]:
        """See the module's docstring."""
        stream, n = self.layer.given(streams), streams.shape[1]
        causal = _causal(n, streams)
        keys, values, out = list[Tensor](), list[Tensor](), list[Tensor]()
        for k in range(depth):
            x = self.layer.joined(embedded[:, k : k + n], stream)
            q, key, value = self.layer.heads(x, k)
            keys.append(key)
            values.append(value)
            scores = [q @ keys[0].transpose(-1, -2) + causal]
            scores += [(q * own).sum(-1, keepdim=True) for own in keys[1:]]
            shares = torch.cat(scores, -1).softmax(-1)
            mixed = shares[..., :n] @ values[0]
            for i, own in enumerate(values[1:]):
                mixed = mixed + shares[..., n + i : n + i + 1] * own
            stream = self.layer.after(x, mixed)
            out.append(self.layer.norm(stream))
        return out


class MtpNet(nn.Module):
    """A layer for each step: at step k, layer k reads at pair i the token of pair i + k, and layer k - 1's stream."""

    def __init__(self, shape: LayerShape, places: int, *, layers: int = 1) -> None:
        super().__init__()
        self.stack = [PairModule(shape, layers=1 if k else layers) for k in range(places)]
        self.layers = nn.ModuleList(self.stack)

    def forward(self, tokens: Tensor, embedded: Tensor, streams: Tensor, depth: int) -> list[Tensor]:
        """See the module's docstring."""
        stream, n = self.stack[0].given(streams), streams.shape[1]
        causal, out = _causal(n, streams), list[Tensor]()
        for k, layer in enumerate(self.stack[:depth]):
            x = layer.joined(embedded[:, k : k + n], stream)
            q, key, value = layer.heads(x, 0)
            stream = layer.after(x, (q @ key.transpose(-1, -2) + causal).softmax(-1) @ value)
            out.append(layer.norm(stream))
        return out


def _causal(n: int, like: Tensor) -> Tensor:
    return torch.full((n, n), -math.inf, device=like.device).triu(1)


def _turned(x: Tensor, at: Tensor, theta: float) -> Tensor:
    """Rope on `[B, H, n, d]` at positions `[n]`, as a LLaMA has it."""
    half = x.shape[-1] // 2
    angles = at[:, None].float() * theta ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
