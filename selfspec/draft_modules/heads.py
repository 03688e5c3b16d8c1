"""The base class of draft heads, which read the model's hidden states, and decoder layers for such heads.

A head reads (token, hidden state) pairs: pair i of a text is token i + 1 and the model's hidden states at token i. It
first reads the pairs of committed tokens. While drafting it reads pairs of a drafted token and the head's own state
after the previous pair. From pair i the head computes the logits of token i + 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.basics.errors import SelfspecError, short
from selfspec.draft_modules.module_files import PartFile
from selfspec.models.families.base import LayerSizes
from selfspec.models.kernels import kernel_for
from selfspec.models.linears import Call
from selfspec.models.low_precision import FusedQuantizedLinear
from selfspec.runtime.base import Runtime

ENDLESS = 2**30  # `places` of heads whose drafts may have any length
WORDS = "vocabulary"  # name of the tensor with the draft vocabulary


class LinearFactory:
    """Factory of linear layers for `[N, in]`, int8 if `low`, else in full precision; `bytes`: size of all weights."""

    def __init__(self, target: Runtime, *, low: bool) -> None:
        self._target, self._low = target, low
        self.bytes = 0

    @torch.no_grad()
    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Call:
        """Return a linear layer with a weight `[out, in]` and a bias `[out]`, as a function of `[N, in]`."""
        if not self._low:
            self.bytes += weight.numel() * weight.element_size()
            return lambda x: F.linear(x, weight, bias)
        quantized = FusedQuantizedLinear(
            weight, bias, 8, self._target.skeleton.quantizer.kernel or kernel_for(weight, 8)
        )
        self.bytes += quantized.bytes
        product, dtype = quantized.product, weight.dtype
        return lambda x: product(x).to(dtype)


class Head(ABC):
    """A draft head loaded from a part file, for a target model; `low`: quantise its weights to int8.

    `places` is the length of its longest draft. `layers` are the hidden states that it reads, numbered as in
    `ForwardOutput.hidden`. `words` is its draft vocabulary as a tensor, and `token_ids` the same as Python ints. The
    part file may hold output heads over the draft vocabulary: one for all draft positions (`head.weight`, `head.bias`),
    or one for each position (`head.0.weight`, ..); otherwise the target's head is used. Raises `SelfspecError` for a
    part file of another kind or model, and if the target's head is needed but cannot be read (quantised, adapted).
    """

    kind: ClassVar[str]
    places = ENDLESS

    def __init__(self, target: Runtime, part: PartFile, *, low: bool = True) -> None:
        part.check(self.kind, target.skeleton.identity)
        self.target = target
        self.layers = tuple(part.settings.get("layers", (target.layers,)))
        if not self.layers or not all(type(layer) is int and 0 <= layer <= target.layers for layer in self.layers):
            raise SelfspecError(f"a head that reads layers {short(self.layers)}; expected some of 0 to {target.layers}")
        dtype, device = target.dtype, target.device
        take = {
            name: t.to(device) if name.endswith("inv_freq") else t.to(device, dtype)
            for name, t in part.tensors.items()
            if t.is_floating_point()
        }
        self._all = target.skeleton.identity.vocabulary or 0
        words = part.tensors.get(WORDS)
        if words is not None and not (words.dim() == 1 and len(words) and 0 <= words.min() <= words.max() < self._all):
            raise SelfspecError(f"a head whose draft vocabulary is not of the model's {self._all} tokens")
        self.words = (torch.arange(self._all) if words is None else words.long()).to(device)
        self.token_ids = range(self._all) if words is None else words.tolist()
        self._linears = LinearFactory(target, low=low)
        own = sorted((name for name in take if name.startswith("head.") and name.endswith("weight")), key=_number)
        heads = [(take.pop(name), take.pop(name.replace("weight", "bias"), None)) for name in own]
        self._heads = [self._linears.linear(*head) for head in heads or [(head_rows(target, self.words), None)]]
        self._then = None if heads else target.skeleton.parts.logits  # maps the target's head output to logits
        self._begin(part.settings, take)

    @abstractmethod
    def _begin(self, settings: Any, tensors: dict[str, Tensor]) -> None:
        """Set up the head from the part file's settings and tensors, which have the target's dtype and device."""

    @property
    def bytes(self) -> int:
        """Size of the head's weights in bytes."""
        return self._linears.bytes

    def reserve(self, slots: int) -> None:  # noqa: B027 (most hold nothing)
        """Reserve memory for `slots` pairs in each cache row; most heads need none."""

    def read(self, row: int, start: int, tokens: Tensor, streams: Tensor) -> tuple[Tensor, Any]:
        """Read n pairs, from number `start` on; return logits over `words` after the last pair, and the head's state.

        `tokens` `[n]` are the tokens of the pairs; `streams` `[n, D * number of layers]` are their hidden states,
        concatenated in the order of `layers`. Pairs from number `start` on that were read before are overwritten.
        """
        out, state = self._read(row, start, tokens, self._embedded(tokens), streams)
        return self._logits(0, out), state

    def draft_step(self, row: int, start: int, place: int, token: int, state: Any) -> tuple[Tensor, Any]:
        """Return logits and state after a drafted `token`, number `place` (from 1) of the draft after `start` pairs."""
        tokens = torch.tensor([token], device=self.target.device)
        out, state = self._draft_step(row, start, place, tokens, self._embedded(tokens), state)
        return self._logits(min(place, len(self._heads) - 1), out), state

    def _logits(self, number: int, out: Tensor) -> Tensor:
        logits = self._heads[number](out)[0]
        return logits if self._then is None else self._then(logits)

    @abstractmethod
    def _read(self, row: int, start: int, tokens: Tensor, embedded: Tensor, streams: Tensor) -> tuple[Tensor, Any]:
        """Return the input `[1, D]` of the output head after the last pair, and the state to continue from."""

    @abstractmethod
    def _draft_step(
        self, row: int, start: int, place: int, tokens: Tensor, embedded: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        """Return the input `[1, D]` of the output head, and the state, after a drafted token `[1]`."""

    def _embedded(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.target.skeleton.embed(tokens.unsqueeze(0))[0]
        return embedded.detach()  # as an embedding called as a module tracks gradients

    def to_full_vocabulary(self, logits: Tensor) -> Tensor:
        """Scatter logits over `words` to all tokens `[V]`, with -inf for tokens outside the draft vocabulary."""
        every = logits.new_full((self._all,), -torch.inf)
        every[self.words] = logits
        return every


def _number(name: str) -> int:
    number = name.split(".")[1]
    return int(number) if number.isdigit() else 0


def head_rows(target: Runtime, words: Tensor) -> Tensor:
    """Return the rows `[len(words), D]` of the weight of the target's head.

    Raises `SelfspecError` if the head has a bias, or no floating-point weight (quantised).
    """
    head = target.model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or not weight.is_floating_point() or getattr(head, "bias", None) is not None:
        raise SelfspecError("the model's head has no floating-point weight without a bias; a draft head needs one")
    rows: Tensor = weight.detach()[words.to(weight.device)]
    return rows


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return the RMSNorm of `x` over the last dimension, or `x` itself if `weight` is None."""
    return x if weight is None else F.rms_norm(x, (x.shape[-1],), weight, eps)


def make_part_file(
    kind: str, settings: dict[str, Any], tensors: dict[str, Tensor], words: Sequence[int] | None, target: Runtime
) -> PartFile:
    """Return a head's part file, with matrices in 16-bit floats; `words`: its draft vocabulary (None: all tokens)."""
    of_16 = {name: torch.float16 if t.dtype == torch.float16 else torch.bfloat16 for name, t in tensors.items()}
    kinds = {name: torch.float32 if t.dim() < 2 else of_16[name] for name, t in tensors.items()}
    stored = {name: tensor.detach().to("cpu", kinds[name]) for name, tensor in tensors.items()}
    if words is not None:
        stored[WORDS] = torch.tensor(list(words), dtype=torch.int32)
    return PartFile(kind, settings, stored, target.skeleton.identity)


@dataclass(frozen=True, slots=True)
class LayerShape(LayerSizes):
    """Sizes of a LLaMA layer, and the base of its RoPE."""

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
            places = torch.arange(0, s.head_dim, 2, device=self._device, dtype=torch.float32)
            inverse = s.theta ** (-places / s.head_dim)
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
