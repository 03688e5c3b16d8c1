"""What a family says of its models: where their modules are (`Parts`), and how their sub-layers compute (`Block`).

The runtime's loop is the same for all families: the embedding starts the residual stream; each layer's attention and
MLP sub-layer read the stream and add to it; the last norm and the head make logits of it. What differs goes into the
callables: a norm of queries and keys into `Attention.qkv`, a norm or a multiplier of what a sub-layer gives into
`Attention.add` and the MLP's `run`, multipliers of the embedding and the logits into `Family.embed` and `Family.head`,
experts into an `Mlp` of their own. What a layer's tokens see, and how they are turned, is its
`AttentionSpec`. Knows nothing of caches, prompts and drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from selfspec.models.linears import Call, Group, Into, Onto
from selfspec.models.norms import LLAMAS, Formula, Norm, Norms

SubLayer = Literal["attention", "mlp"]

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""`rotary(x, positions)`: rope's cosines and sines `[B, n, r]`, of the dtype of `x`, at `positions` `[B, n]`.

They turn the first r of a head's d dimensions; none where r is 0.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """How heads are turned: x * cos + y * sin, where y is (-x2, x1) of the halves x1 and x2 of what is turned.

    With `neighbours`, each two dimensions side by side are such a pair, in place of those half of them apart.
    """

    rotary: Rotary
    neighbours: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What tokens see in an attention sub-layer, and how they are turned: layers that have it in common share it.

    `window`: each sees itself and the tokens less than so many positions before it; None: all before it.
    `custom_attention`: what becomes of the scores is the sub-layer's own, `Attention.weights`.
    """

    rope: Rope
    window: int | None = None
    custom_attention: bool = False


Weights = Callable[[Tensor, Tensor | None], Tensor]
"""`weights(scores, mask)`: what values are weighted with, from scaled scores `[B * H_kv, G * n, S]`.

The rows of a key head are its query heads', one after the other. `mask` is additive. Scores may be changed.
"""


Plain = tuple[Sequence[Any], Sequence[Any]]
"""A sub-layer's linears: those that read the normed stream side by side, and the one that writes to the stream."""


class Workspace(Protocol):
    """The residual stream of a pass over N rows, and tensors to compute in, which whoever comes next overwrites."""

    stream: Tensor  # [N, D], the residual stream: added to in place, otherwise only read
    longer: Tensor  # [N, D + 1], the stream and one more column, see `Norm`
    normed: Tensor  # [N, D], overwritten by nothing but norms
    gate_up: Tensor  # [N, 2 * I], I units of the MLP: gate and up side by side
    gate: Tensor  # [N, I], a view of `gate_up`
    up: Tensor  # [N, I], a view of `gate_up`
    activated: Tensor  # [N, I]


@dataclass(frozen=True, slots=True)
class Attention:
    """What a family computes of an attention sub-layer. Rope, cache and attention itself are the runtime's.

    `norm` gives what is read of the stream. `qkv` writes its queries, keys and values before rope, side by side, `[N,
    (H + 2 * H_kv) * d]`. `add` adds to the stream what the heads' outputs `[N, H * d]` come to. `plain`: the linears,
    where `qkv` and `add` are nothing else, and attention itself is Llama's. `attention_spec` is the number of its
    `AttentionSpec` among `Parts.attention_specs`. `weights`: in the place of softmax, see `Weights`.
    """

    norm: Norm
    qkv: Into
    add: Onto
    plain: Plain | None = None
    attention_spec: int = 0
    weights: Weights | None = None


class Mlp(Protocol):
    """An MLP sub-layer."""

    def run(self, work: Workspace) -> None:
        """Add to the stream what the MLP makes of it."""


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(act(gate(x)) * up(x)) of the normed stream x; `act` may change what it is given.

    `plain`: the linears, where `act` is SiLU.
    """

    norm: Norm
    gate_up: Into
    act: Call
    down: Onto
    plain: Plain | None = None

    def run(self, work: Workspace) -> None:
        """Add that to the stream."""
        self.gate_up(self.norm(work.stream, work.longer, work.normed), work.gate_up)
        self.down(work.stream, torch.mul(self.act(work.gate), work.up, out=work.activated))


@dataclass(frozen=True, slots=True)
class Block:
    """A decoder layer: an attention and an MLP sub-layer on `device`, the second reading what the first has added."""

    attention: Attention
    mlp: Mlp
    device: torch.device

    def with_(self, attention: Attention | None, mlp: Any) -> Block:
        """The same with another attention or MLP, where they are given."""
        if attention is None and mlp is None:
            return self
        return replace(self, attention=attention or self.attention, mlp=mlp or self.mlp)

    def running(self, *, attention: bool, mlp: bool) -> tuple[Attention | None, Mlp | None]:
        """The sub-layers as they run when only these do; None: bypassed.

        In a family whose sub-layers both read the stream as it enters the layer (parallel residual), the MLP must not
        read what attention has just added: where both run, the MLP given here takes the normed rows that attention's
        norm has left in `Workspace.normed`.
        """
        return self.attention if attention else None, self.mlp if mlp else None


class ExpertWeights(Protocol):
    """A router, and experts whose weights are at hand one by one."""

    @property
    def router(self) -> Any:
        """Gives its logits, then weights and numbers of the chosen experts for each row `[N, k]`."""

    def readable(self) -> bool:
        """Whether the weights are at hand, and all that experts multiply with."""

    def each(self) -> Iterator[tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]]:
        """Each expert's gate and up, as one, and its down: weights `[out, in]` and biases."""

    def mixed(self, gate_up: Tensor) -> Tensor:
        """What an expert's down reads of its gate and up `[n, 2 * I]`."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Where a decoder layer keeps its modules.

    `module` is the layer itself. `groups` are its linears in the order of their use, those together that read the same
    input. `norms` are those over the width of the residual stream, in the order of their use. `attention_spec` is the
    number of its `AttentionSpec` among `Parts.attention_specs`. `names` are what the layer calls its attention and its
    MLP. `rotary` is what the layer is given cosines and sines by. `beside`: whether its MLP gives something beside,
    which nobody uses. `experts` are those in the place of an MLP's linears.
    """

    module: Any
    groups: tuple[Group, ...]
    norms: tuple[nn.Module, ...]
    attention_spec: int = 0
    names: tuple[str, str] = ("self_attn", "mlp")
    rotary: Rotary | None = None
    beside: bool = False
    experts: ExpertWeights | None = None

    def groups_of(self, part: SubLayer) -> tuple[Group, ...]:
        """The groups of one sub-layer: attention's go up to the first that writes to the stream."""
        own = 1 + next((i for i, group in enumerate(self.groups) if group.writes), len(self.groups) - 1)
        return self.groups[:own] if part == "attention" else self.groups[own:]


@dataclass(frozen=True, slots=True)
class Parts:
    """Where a model keeps its modules, and numbers that not every family's configuration has, or has by one name.

    `norm` is the last one, before `head`. `attention_specs` are those of the layers. `scaling` multiplies the products
    of queries and keys. `eps` and `formula` are those of the stream's norms. `embedded` multiplies what the embedding
    gives. `logits`: what the head's products become, if they are not the logits themselves; minus infinity stays.
    """

    embedding: Any
    layers: tuple[Layer, ...]
    norm: Any
    head: Group
    attention_specs: tuple[AttentionSpec, ...]
    head_dim: int
    scaling: float
    eps: float
    formula: Formula = LLAMAS
    embedded: float = 1.0
    logits: Call | None = None

    def groups(self) -> Iterator[Group]:
        """The linears of all layers, those together that read the same input."""
        for layer in self.layers:
            yield from layer.groups

    def called(self) -> Iterator[nn.Module]:
        """The modules that are called one by one, or whose weights are read, instead of calling the model."""
        yield from (self.embedding, self.norm, self.head.module)
        for layer in self.layers:
            yield from layer.norms
            for group in layer.groups:
                yield from group.modules


class Family(Protocol):
    """Models with one module tree. It holds no state: one instance serves all models of the family."""

    def parts(self, model: Any) -> Parts:
        """Where `model` keeps its modules. Raises `UnsupportedModelError` for one without a head or without layers."""

    def block(self, layer: Layer, norms: Norms) -> Block:
        """How a layer computes; norms of the stream are read through `norms`, which keeps them up to date."""

    def embed(self, parts: Parts) -> Call:
        """From token ids `[B, n]` to the stream `[B, n, D]` that enters the first layer."""

    def head(self, parts: Parts) -> Call:
        """From normed rows `[N, D]` to logits `[N, V]`."""

    def head_over(self, parts: Parts, tokens: Sequence[int]) -> Call | None:
        """As `head`, computing these tokens' logits only; the others are -inf. None without the weight at hand."""
