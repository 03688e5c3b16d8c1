"""Trainable networks over (token, hidden state) pairs: EAGLE, MTP and Chimera.

EAGLE is trained on its own outputs, as EAGLE-3 is. For each of `depth` draft steps, a network returns the input
`[B, n, D]` of the head over the vocabulary. It reads the embedded tokens of the n pairs and of the `depth` - 1 tokens
after the pairs, `[B, n + depth - 1, D]`, and the model's hidden states at the pairs, `[B, n, D * layers]`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.draft_modules.heads import LayerShape
from selfspec.draft_modules.registry import REACH


class _Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class LayerModule(nn.Module):
    """The trainable weights of an `OwnLayer`, under the names that `OwnLayer` reads."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = s = shape
        self.norm, self.input_layernorm, self.post_attention_layernorm = (_Norm(s.hidden, s.eps) for _ in range(3))
        for name, inputs, outputs in (
            ("q_proj", s.hidden, s.heads * s.head_dim),
            ("k_proj", s.hidden, s.kv_heads * s.head_dim),
            ("v_proj", s.hidden, s.kv_heads * s.head_dim),
            ("o_proj", s.heads * s.head_dim, s.hidden),
            ("gate_proj", s.hidden, s.intermediate),
            ("up_proj", s.hidden, s.intermediate),
            ("down_proj", s.intermediate, s.hidden),
        ):
            self.add_module(name, nn.Linear(inputs, outputs, bias=False))

    @torch.no_grad()
    def begin(self, layer: nn.Module, norm: Tensor, plus: float = 0.0) -> None:
        """Initialise from a layer of the model, as far as it matches a LLaMA layer, and from the last norm's gain.

        `plus`: the constant that the model's norms add to their weights.
        """
        own = {name.removeprefix("self_attn.").removeprefix("mlp."): p for name, p in layer.named_parameters()}
        for name, tensor in self.named_parameters():
            weight = own.get(name)
            if weight is not None and weight.shape == tensor.shape:
                tensor.copy_(weight + plus if weight.dim() == 1 else weight)
        self.norm.weight.copy_(norm)

    def heads(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scaled queries, keys and values `[B, H, n, d]` for the input `x` `[B, n, D]` at positions `[n]`."""
        s, (batch, n, _) = self.shape, x.shape
        read, group = self.input_layernorm(x), s.heads // s.kv_heads

        def split(projected: Tensor, count: int) -> Tensor:
            return projected.float().view(batch, n, count, s.head_dim).transpose(1, 2)

        q = _apply_rope(split(self.q_proj(read), s.heads), positions, s.theta) * s.head_dim**-0.5
        k = _apply_rope(split(self.k_proj(read), s.kv_heads), positions, s.theta).repeat_interleave(group, 1)
        return q, k, split(self.v_proj(read), s.kv_heads).repeat_interleave(group, 1)

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return the layer's output for its input `x` `[B, n, D]` and its attention's output `mixed` `[B, H, n, d]`."""
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2)).float()
        read = self.post_attention_layernorm(x)
        left: Tensor = x + self.down_proj(F.silu(self.gate_proj(read)) * self.up_proj(read)).float()
        return left


class PairModule(LayerModule):
    """The trainable weights of a `PairLayer`, under the names that `PairLayer` reads.

    `layers`: the number of layers of the model whose hidden states are read, concatenated.
    """

    def __init__(self, shape: LayerShape, *, layers: int = 1) -> None:
        super().__init__(shape)
        self.embed_norm, self.stream_norm = (_Norm(shape.hidden, shape.eps) for _ in range(2))
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.fuse = nn.Linear(layers * shape.hidden, shape.hidden, bias=False) if layers > 1 else None

    @torch.no_grad()
    def begin(self, layer: nn.Module, norm: Tensor, plus: float = 0.0) -> None:
        """Initialise as `LayerModule.begin` does; at first, `fused` returns almost the last layer's hidden states."""
        super().begin(layer, norm, plus)
        self.fc.weight.normal_(0, 0.02)
        if self.fuse is not None:
            self.fuse.weight.normal_(0, 0.02)[:, -self.shape.hidden :] += torch.eye(self.shape.hidden)

    def fused(self, streams: Tensor) -> Tensor:
        """Map the model's hidden states of several layers `[B, n, D * layers]` to `[B, n, D]`."""
        return streams if self.fuse is None else self.fuse(streams).float()

    def joined(self, embedded: Tensor, stream: Tensor) -> Tensor:
        """Return the layer's input `[B, n, D]` for embeddings and hidden states, each `[B, n, D]`."""
        joined: Tensor = self.fc(torch.cat((self.embed_norm(embedded), self.stream_norm(stream)), -1)).float()
        return joined


class EagleNet(nn.Module):
    """EAGLE: one decoder layer, which runs once for each draft step.

    A draft starts at each pair. At step k, draft i has the position of pair i + k; it reads the token of pair i + k and
    the layer's output for draft i at step k - 1 (at step 0, the model's hidden states). Draft i attends to the keys of
    step 0 up to pair i, and to the keys of draft i at later steps.
    """

    def __init__(self, shape: LayerShape, *, layers: int = 1) -> None:
        super().__init__()
        self.layer = PairModule(shape, layers=layers)

    def forward(self, tokens: Tensor, embedded: Tensor, streams: Tensor, depth: int) -> list[Tensor]:
        """Return the normalised hidden states after each of the `depth` draft steps; see the module's docstring."""
        stream, n = self.layer.fused(streams), streams.shape[1]
        causal = _causal(n, streams)
        keys, values, out = list[Tensor](), list[Tensor](), list[Tensor]()
        for k in range(depth):
            x = self.layer.joined(embedded[:, k : k + n], stream)
            q, key, value = self.layer.heads(x, torch.arange(k, k + n, device=x.device))
            keys.append(key)
            values.append(value)
            stream = self.layer.after(x, mix(q, keys, values, causal))
            out.append(self.layer.norm(stream))
        return out


class MtpNet(nn.Module):
    """MTP: one decoder layer for each draft step.

    At pair i, layer k reads the token of pair i + k and the output of layer k - 1 (layer 0: the model's hidden states).
    """

    def __init__(self, shape: LayerShape, places: int, *, layers: int = 1) -> None:
        super().__init__()
        self.stack = [PairModule(shape, layers=1 if k else layers) for k in range(places)]
        self.layers = nn.ModuleList(self.stack)

    def forward(self, tokens: Tensor, embedded: Tensor, streams: Tensor, depth: int) -> list[Tensor]:
        """Return the normalised hidden states after each of the `depth` draft steps; see the module's docstring."""
        stream, n = self.stack[0].fused(streams), streams.shape[1]
        causal, out = _causal(n, streams), list[Tensor]()
        for k, layer in enumerate(self.stack[:depth]):
            x = layer.joined(embedded[:, k : k + n], stream)
            q, key, value = layer.heads(x, torch.arange(n, device=x.device))
            stream = layer.after(x, (q @ key.transpose(-1, -2) + causal).softmax(-1) @ value)
            out.append(layer.norm(stream))
        return out


class ChimeraNet(nn.Module):
    """Chimera: a trigram encoder, a decoder layer, and a linear map per draft position, named as in `ChimeraHead`."""

    def __init__(self, shape: LayerShape, places: int) -> None:
        super().__init__()
        hidden, ngram = shape.hidden, REACH + 1
        self.layer = LayerModule(shape)
        self.wide, self.narrow = (
            nn.Linear(ngram * hidden, ngram * hidden),
            nn.Linear(ngram * hidden, hidden, bias=False),
        )
        self.maps = nn.ModuleList(nn.Linear(2 * hidden, hidden, bias=False) for _ in range(places))

    @torch.no_grad()
    def begin(self, layer: nn.Module, norm: Tensor, plus: float = 0.0) -> None:
        """Initialise from a layer of the model; at first, each map returns almost the decoder layer's output."""
        self.layer.begin(layer, norm, plus)
        hidden = self.layer.shape.hidden
        for linear in self.maps:
            linear.weight.normal_(0, 0.005)[:, hidden:] += torch.eye(hidden)  # type: ignore[operator]

    def forward(self, tokens: Tensor, embedded: Tensor, streams: Tensor, depth: int) -> list[Tensor]:
        """Return the mapped hidden states after each of the `depth` draft steps; see the module's docstring.

        `streams` are the last layer's hidden states, normed.
        """
        n, width = streams.shape[1], embedded.shape[1]
        padded = torch.cat((embedded[:, :1].expand(-1, REACH, -1), embedded), 1)
        read = torch.cat([padded[:, i : i + width] for i in range(REACH + 1)], -1)
        codes = self.narrow(read + F.silu(self.wide(read))).float()
        positions = torch.arange(n, device=streams.device)
        causal = _causal(n, streams).repeat_interleave(2, 1)
        keys, values, out, stream = list[Tensor](), list[Tensor](), list[Tensor](), streams
        for k in range(depth):
            code = codes[:, k : k + n]
            _, *of_stream = self.layer.heads(stream, positions + k)
            q, *of_code = self.layer.heads(code, positions + k + 1)
            for cache, stream_entry, code_entry in zip((keys, values), of_stream, of_code, strict=True):
                cache += (
                    [torch.stack((stream_entry, code_entry), 3).flatten(2, 3)] if not k else [stream_entry, code_entry]
                )
            stream = self.layer.after(code, mix(q, keys, values, causal))
            out.append(self.maps[k](torch.cat((streams, self.layer.norm(stream)), -1)))
        return out


def mix(q: Tensor, keys: list[Tensor], values: list[Tensor], causal: Tensor) -> Tensor:
    """Return the attention output `[B, H, n, d]` of draft steps.

    Query i attends to all of `keys[0]`, masked by the additive `causal`, and to entry i of each later tensor in `keys`.
    """
    first = keys[0].shape[2]
    scores = [q @ keys[0].transpose(-1, -2) + causal]
    scores += [(q * own).sum(-1, keepdim=True) for own in keys[1:]]
    shares = torch.cat(scores, -1).softmax(-1)
    mixed = shares[..., :first] @ values[0]
    for i, own in enumerate(values[1:]):
        mixed = mixed + shares[..., first + i : first + i + 1] * own
    return mixed


def _causal(n: int, like: Tensor) -> Tensor:
    return torch.full((n, n), -math.inf, device=like.device).triu(1)


def _apply_rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Apply RoPE to `[B, H, n, d]` at positions `[n]`, as LLaMA does."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() * theta ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
