"""Fitting an EAGLE head to a model's own texts, on its own streams too, as drafting will run it (EAGLE-3's way)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError
from selfspec.parts.eagle import LAYER, EagleShape, part_of
from selfspec.parts.files import PartFile
from selfspec.runtime.forward import Runtime
from selfspec.training.texts import Text

DEPTH = 3  # steps of a draft that are fitted together
LATER = 0.8  # what each further one counts for
PLACES = 6  # of a draft that held-out acceptance is told for
WINDOW = 128  # pairs of a text that are fitted to at once
_MULTIPLE = 16  # tokens: what a head in few bits is over


class _Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class EagleNet(nn.Module):
    """The head's weights, and its steps over whole texts at once."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.shape = s = shape

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.embed_norm, self.stream_norm, self.norm = (_Norm(s.hidden, s.eps) for _ in range(3))
        self.fc = linear(2 * s.hidden, s.hidden)
        self.layer = nn.ModuleDict(
            {
                "input_layernorm": _Norm(s.hidden, s.eps),
                "post_attention_layernorm": _Norm(s.hidden, s.eps),
                "q_proj": linear(s.hidden, s.heads * s.head_dim),
                "k_proj": linear(s.hidden, s.kv_heads * s.head_dim),
                "v_proj": linear(s.hidden, s.kv_heads * s.head_dim),
                "o_proj": linear(s.heads * s.head_dim, s.hidden),
                "gate_proj": linear(s.hidden, s.intermediate),
                "up_proj": linear(s.hidden, s.intermediate),
                "down_proj": linear(s.intermediate, s.hidden),
            }
        )

    def tensors(self) -> dict[str, Tensor]:
        """The weights by the names that a part's file has."""
        named = {f"{name}.weight": getattr(self, name).weight for name in ("embed_norm", "stream_norm", "norm", "fc")}
        return named | {f"layer.{name}.weight": self.layer[name.rpartition(".")[2]].weight for name in LAYER}

    def forward(self, embedded: Tensor, streams: Tensor, depth: int) -> list[Tensor]:
        """For each of `depth` steps, what the head over the vocabulary reads `[B, n, D]`.

        `embedded` `[B, n + depth - 1, D]`: of the pairs' tokens and those after them; `streams` `[B, n, D]`. At step k
        the row of pair i stands at pair i + k: it reads that pair's token and the stream that step k - 1 left at its
        row, and sees all pairs up to i as the model left them, and its own row's steps.
        """
        s, layer = self.shape, self.layer
        batch, n, _ = streams.shape
        causal = torch.full((n, n), -math.inf, device=streams.device).triu(1)
        keys, values, out = list[Tensor](), list[Tensor](), list[Tensor]()

        def heads(x: Tensor, count: int) -> Tensor:
            return x.float().view(batch, n, count, s.head_dim).transpose(1, 2)

        for k in range(depth):
            x = self.fc(torch.cat((self.embed_norm(embedded[:, k : k + n]), self.stream_norm(streams)), -1)).float()
            normed = layer["input_layernorm"](x)
            at = torch.arange(k, k + n, device=x.device)
            q = _turned(heads(layer["q_proj"](normed), s.heads), at, s.theta) * s.head_dim**-0.5
            group = s.heads // s.kv_heads
            keys.append(_turned(heads(layer["k_proj"](normed), s.kv_heads), at, s.theta).repeat_interleave(group, 1))
            values.append(heads(layer["v_proj"](normed), s.kv_heads).repeat_interleave(group, 1))
            scores = [q @ keys[0].transpose(-1, -2) + causal]
            scores += [(q * own).sum(-1, keepdim=True) for own in keys[1:]]
            shares = torch.cat(scores, -1).softmax(-1)
            mixed = shares[..., :n] @ values[0]
            for i, own in enumerate(values[1:]):
                mixed = mixed + shares[..., n + i : n + i + 1] * own
            x = x + layer["o_proj"](mixed.transpose(1, 2).reshape(batch, n, -1)).float()
            normed = layer["post_attention_layernorm"](x)
            x = x + layer["down_proj"](F.silu(layer["gate_proj"](normed)) * layer["up_proj"](normed)).float()
            streams = x
            out.append(self.norm(x))
        return out


def _turned(x: Tensor, at: Tensor, theta: float) -> Tensor:
    """Rope on `[B, H, n, d]` at positions `[n]`, as a LLaMA has it."""
    half = x.shape[-1] // 2
    angles = at[:, None].float() * theta ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@dataclass(frozen=True, slots=True)
class _Target:
    """What of the model is fitted to: its embeddings, its last norm, and its head over the draft's tokens."""

    embed: Any
    norm: Tensor
    eps: float
    head: Tensor
    words: Tensor


class EagleLearner:
    """A head under training for a model; `words`: the tokens that it may draft. Raises `SelfspecError`.

    That is where the model's layers are not a LLaMA's, or its head is not at hand.
    """

    kind = "eagle"

    def __init__(self, runtime: Runtime, words: Sequence[int], *, seed: int = 0) -> None:
        self.runtime = runtime
        torch.manual_seed(seed)
        model = runtime.model
        head = getattr(model.get_output_embeddings(), "weight", None)
        if head is None or not head.is_floating_point():
            raise SelfspecError("the model's head is not at hand as plain weights; an EAGLE head needs it")
        tokens = torch.tensor(sorted(words), device=runtime.device)
        sizes, norm = runtime.skeleton.sizes, model.base_model.norm
        self._target = _Target(
            runtime.skeleton.embed, norm.weight.detach().float(), sizes.eps, head.detach()[tokens].float(), tokens
        )
        self.shape = EagleShape(
            sizes.hidden, sizes.intermediate, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.eps
        )
        self.net = EagleNet(self.shape).to(runtime.device)
        self._begin(model.base_model.layers[-1])

    @torch.no_grad()
    def _begin(self, last: nn.Module) -> None:
        """From the model's own last layer, where it is a LLaMA's, and its last norm."""
        own = dict(last.named_parameters())
        for name, tensor in self.net.tensors().items():
            given = own.get(name.removeprefix("layer."))
            if given is not None and given.shape == tensor.shape:
                tensor.copy_(given)
        self.net.norm.weight.copy_(self._target.norm)
        self.net.fc.weight.normal_(0, 0.02)

    def loss(self, texts: Sequence[tuple[Text, int]]) -> Tensor:
        """Cross-entropy against the model's own distribution over the draft's tokens, in a window of each text.

        A window is told by the number of its first pair.
        """
        n = min(min(WINDOW, pairs_of(text) - first) for text, first in texts)
        tokens = torch.stack([text.tokens[first + 1 : first + n + DEPTH] for text, first in texts])
        streams = torch.stack([text.streams[first : first + n + DEPTH] for text, first in texts])
        embedded, streams = self._read(tokens, streams)
        wanted = self._logits(streams[:, 1:]).softmax(-1)
        total = torch.zeros((), device=streams.device)
        for k, out in enumerate(self.net(embedded, streams[:, :n], DEPTH)):
            drafted = F.linear(out, self._head(out)).float().log_softmax(-1)
            total = total - LATER**k * (wanted[:, k : k + n] * drafted).sum(-1).mean()
        return total

    def _read(self, tokens: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
        device = self.runtime.device
        return self._target.embed(tokens.to(device)).float(), streams.to(device).float()

    def _head(self, like: Tensor) -> Tensor:
        return (
            self._target.head.to(torch.bfloat16) if torch.is_autocast_enabled(like.device.type) else self._target.head
        )

    @torch.no_grad()
    def _logits(self, streams: Tensor) -> Tensor:
        normed = F.rms_norm(streams, (streams.shape[-1],), self._target.norm, self._target.eps)
        return F.linear(normed, self._head(normed)).float()

    @torch.no_grad()
    def acceptance(self, texts: Sequence[Text]) -> list[float]:
        """For each place of a draft, how often all of it up to there is what the text goes on with, in answers."""
        right, all_of = torch.zeros(PLACES), 0
        for text in texts:
            n = pairs_of(text, PLACES)
            if n <= text.answer:
                continue
            embedded, streams = self._read(text.tokens[None, 1 : n + PLACES], text.streams[None, :n])
            so_far = torch.ones(n - text.answer, dtype=torch.bool)
            for k, out in enumerate(self.net(embedded, streams, PLACES)):
                best = self._target.words[F.linear(out[0], self._head(out)).argmax(-1)].cpu()
                so_far &= (best == text.tokens[k + 2 : k + 2 + n])[text.answer :]
                right[k] += so_far.sum()
            all_of += n - text.answer
        return (right / max(all_of, 1)).tolist()

    def part(self) -> PartFile:
        """The head as it now is."""
        return part_of(self.shape, self.net.tensors(), self._target.words, self.runtime)


def pairs_of(text: Text, depth: int = DEPTH) -> int:
    """Pairs of a text that are followed by what `depth` steps from them are held against."""
    return min(len(text.streams) - depth, len(text.tokens) - 1 - depth)


def frequent(tokens: Sequence[int], most: int, vocabulary: int) -> list[int]:
    """The tokens that come most often, `most` at most, in number a multiple of 16 where the vocabulary allows."""
    counts = torch.bincount(torch.tensor(list(tokens), dtype=torch.long), minlength=vocabulary)
    count = min(most, vocabulary)
    count -= count % _MULTIPLE if count >= _MULTIPLE else 0
    return sorted(counts.argsort(descending=True, stable=True)[:count].tolist())
