"""The interface of a model family: where its models' modules are (`Parts`), and how sub-layers compute (`Block`).

The runtime's loop is the same for all families: the embedding starts the residual stream; each layer's attention and
MLP sub-layer read the residual stream and add to it; the last norm and the head compute logits from it. A family's
differences go into the callables: a norm of queries and keys into `Attention.qkv`, a norm or a multiplier of a
sub-layer's output into `Attention.add` and the MLP's `run`, multipliers of the embedding and the logits into
`Family.embed` and `Family.head`, experts into a separate `Mlp` class. A layer's sliding window and RoPE are its
`AttentionSpec`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from selfspec.models.linears import Call, Group, Into, Onto
from selfspec.models.norms import LLAMAS, NO_NORM, Formula, Norm, NormData, Norms
from selfspec.models.triton_kernels.switch import ROWS

SubLayer = Literal["attention", "mlp"]

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""`rotary(x, positions)` returns RoPE's cosines and sines `[B, n, r]`, in the dtype of `x`, at `positions` `[B, n]`.

RoPE rotates the first r of a head's d dimensions; r may be 0.
"""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes of a layer. `eps` is the eps of its norms; `intermediate` is the number of MLP units."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True, slots=True)
class Sizes(LayerSizes):
    """The sizes of a model's layers, and its dtype."""

    dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        """The bytes of one token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """The RoPE of queries and keys: rotated x is x * cos + y * sin, where y is (-x2, x1) and x1, x2 are halves of x.

    With `interleaved`, each pair (x1, x2) is two adjacent dimensions, and not two dimensions r / 2 apart.
    """

    rotary: Rotary
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The RoPE and sliding window of an attention sub-layer, shared by all layers with the same RoPE and window.

    `window`: a token sees itself and the tokens less than `window` positions before it; None: all tokens before it.
    `custom_attention`: the sub-layer computes weights from scores by its own function, `Attention.weights`.
    """

    rope: Rope
    window: int | None = None
    custom_attention: bool = False


Weights = Callable[[Tensor, Tensor | None], Tensor]
"""`weights(scores, mask)` returns the attention weights of scaled scores `[B * H_kv, G * n, S]`.

Dimension 1 holds the n rows of each of a KV head's G query heads, one head after the other. `mask` is additive. The
function may overwrite the scores.
"""


Activation = Literal["silu", "gelu", "gelu_tanh"]
"""An MLP's activation, as far as native passes compute it; `gelu_tanh` is the approximation of GELU by tanh."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NativeSubLayer:
    """A sub-layer as data, for native passes, which call no module.

    The linears `into`, side by side, read the residual stream normalised by `before`. The linear `onto` writes:
    `factor` times its output, normalised by `after`, is added to the stream. A norm that is None cannot be computed.
    """

    into: Sequence[Any]
    onto: Any
    before: NormData | None
    after: NormData | None = NO_NORM
    factor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NativeAttention(NativeSubLayer):
    """An attention sub-layer as data.

    `q_norm` and `k_norm` normalise each query and key head, or all query heads together, and all key heads, if their
    weights are as long. `cap` is the soft cap of scores (0: none). `by_head`: `into` computes the query, the key and
    the value of one head after the other, and not all queries, all keys and all values.
    """

    q_norm: NormData | None = NO_NORM
    k_norm: NormData | None = NO_NORM
    cap: float = 0.0
    by_head: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NativeMlp(NativeSubLayer):
    """An MLP sub-layer as data: `into` computes gate and up if `gated`, else the input of `activation` alone.

    `parallel`: the MLP reads the layer's input, and not the stream after attention.
    """

    activation: Activation | None
    gated: bool = True
    parallel: bool = False


class Workspace(Protocol):
    """The residual stream of a pass over N rows, and temporary tensors that each sub-layer overwrites."""

    stream: Tensor  # [N, D], the residual stream: added to in place, otherwise only read
    stream_with_eps: Tensor  # [N, D + 1], the residual stream and one more column, see `Norm`
    normed: Tensor  # [N, D], overwritten by norms only
    gate_up: Tensor  # [N, 2 * I] for I MLP units: gate and up side by side
    gate: Tensor  # [N, I], a view of `gate_up`
    up: Tensor  # [N, I], a view of `gate_up`
    activated: Tensor  # [N, I]


@dataclass(frozen=True, slots=True)
class Attention:
    """A family's part of an attention sub-layer. The runtime does RoPE, the KV cache and attention itself.

    `norm` normalises the residual stream. `qkv` computes queries, keys and values before RoPE, side by side,
    `[N, (H + 2 * H_kv) * d]`. `add` projects the heads' outputs `[N, H * d]` and adds the result to the residual
    stream. `native` describes the sub-layer for native passes; None: they cannot compute it. `attention_spec` is the
    index into `Parts.attention_specs`. `weights` replaces the softmax, see `Weights`.
    """

    norm: Norm
    qkv: Into
    add: Onto
    native: NativeAttention | None = None
    attention_spec: int = 0
    weights: Weights | None = None


class Mlp(Protocol):
    """An MLP sub-layer."""

    def run(self, work: Workspace) -> None:
        """Add the MLP's output to the residual stream."""


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """The MLP down(act(into(x))) of the normalised residual stream x; `act` may overwrite its input.

    `native` describes the MLP for native passes; None: they cannot compute it.
    """

    norm: Norm
    into: Into
    act: Call
    down: Onto
    native: NativeMlp | None = None

    def run(self, work: Workspace) -> None:
        """Add the MLP's output to the residual stream."""
        self.into(self.norm(work.stream, work.stream_with_eps, work.normed), work.activated)
        self.down(work.stream, self.act(work.activated))


@dataclass(frozen=True, slots=True)
class GatedMlp(DenseMlp):
    """The MLP down(act(gate(x)) * up(x)): `into` computes gate and up, side by side.

    `gated`, if not None, computes act(gate(x)) * up(x) at once for up to `ROWS` rows.
    """

    gated: Into | None = None

    def run(self, work: Workspace) -> None:
        """Add the MLP's output to the residual stream."""
        x = self.norm(work.stream, work.stream_with_eps, work.normed)
        if self.gated is not None and len(x) <= ROWS:
            self.gated(x, work.activated)
            self.down(work.stream, work.activated)
            return
        self.into(x, work.gate_up)
        self.down(work.stream, torch.mul(self.act(work.gate), work.up, out=work.activated))


@dataclass(frozen=True, slots=True)
class Block:
    """A decoder layer on `device`: attention, then an MLP that reads the residual stream after attention."""

    attention: Attention
    mlp: Mlp
    device: torch.device

    def with_(self, attention: Attention | None, mlp: Any) -> Block:
        """Return the block with `attention` or `mlp` replaced, if not None."""
        if attention is None and mlp is None:
            return self
        return replace(self, attention=attention or self.attention, mlp=mlp or self.mlp)

    def running(self, *, attention: bool, mlp: bool) -> tuple[Attention | None, Mlp | None]:
        """Return the sub-layers to run; None: skipped.

        In a family whose sub-layers both read the layer's input (parallel residual), the MLP must not read what
        attention has just added: if both run, the returned MLP takes the normalised rows that attention's norm has left
        in `Workspace.normed`.
        """
        return self.attention if attention else None, self.mlp if mlp else None


class ExpertWeights(Protocol):
    """A router, and experts whose weights can be read one by one."""

    @property
    def router(self) -> Any:
        """The router: returns its logits, then the weights and indices `[N, k]` of the chosen experts of each row."""

    def readable(self) -> bool:
        """Return whether the weights can be read, and are exactly what the experts multiply with."""

    def each(self) -> Iterator[tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]]:
        """Yield each expert's fused gate and up, and its down projection: weights `[out, in]` and biases."""

    def gated_activation(self, gate_up: Tensor) -> Tensor:
        """Return the input of an expert's down projection from its gate and up outputs `[n, 2 * I]`."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The modules of a decoder layer.

    `module` is the layer itself. `groups` are its linears in order of use, grouped by common input. `norms` are the
    norms over the width of the residual stream: first all norms before sub-layers, then all norms after sub-layers.
    `attention_spec` is the index into `Parts.attention_specs`. `names` are the attributes of `module` that hold its
    attention and MLP. `rotary` computes the layer's RoPE cosines and sines. `mlp_returns_tuple`: whether the MLP
    returns a second, unused output. `experts` take the place of an MLP's linears.
    """

    module: Any
    groups: tuple[Group, ...]
    norms: tuple[nn.Module, ...]
    attention_spec: int = 0
    names: tuple[str, str] = ("self_attn", "mlp")
    rotary: Rotary | None = None
    mlp_returns_tuple: bool = False
    experts: ExpertWeights | None = None

    def groups_of(self, part: SubLayer) -> tuple[Group, ...]:
        """Return a sub-layer's groups; attention's groups end with the first that writes to the residual stream."""
        own = 1 + next((i for i, group in enumerate(self.groups) if group.writes), len(self.groups) - 1)
        return self.groups[:own] if part == "attention" else self.groups[own:]


@dataclass(frozen=True, slots=True)
class Parts:
    """A model's modules, and the numbers that families' configurations lack or name differently.

    `norm` is the last norm, before `head`. `attention_specs` are the distinct specs of the layers. `scaling` multiplies
    the products of queries and keys. `eps` and `formula` belong to the norms of the residual stream. `embedded`
    multiplies the embedding's output. `logits` maps the head's output to logits and preserves -inf; None: the head's
    output is the logits.
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
        """Yield the linears of all layers, grouped by common input."""
        for layer in self.layers:
            yield from layer.groups

    def linears(self) -> Iterator[nn.Module]:
        """Yield the linears of the head and of all layers."""
        yield from self.head.modules
        for group in self.groups():
            yield from group.modules

    def called(self) -> Iterator[nn.Module]:
        """Yield the modules that the runtime calls, or whose weights it reads, instead of calling the model."""
        yield from (self.embedding, self.norm, self.head.module)
        for layer in self.layers:
            yield from layer.norms
            for group in layer.groups:
                yield from group.modules


class Family(Protocol):
    """The interface of a family of models with the same module tree; stateless, so one instance serves all models."""

    def parts(self, model: Any) -> Parts:
        """Return the model's modules. Raises `UnsupportedModelError` for a model without a head or without layers."""

    def block(self, layer: Layer, norms: Norms) -> Block:
        """Return a layer's block; `norms` makes its norms, and updates them after weight changes."""

    def embed(self, parts: Parts) -> Call:
        """Return the map from token ids `[B, n]` to the residual stream `[B, n, D]` that enters the first layer."""

    def head(self, parts: Parts) -> Call:
        """Return the map from normalised rows `[N, D]` to logits `[N, V]`."""

    def head_over(self, parts: Parts, tokens: Sequence[int]) -> Call | None:
        """Return a head that computes only the logits of `tokens`, all others -inf; None if unsupported."""
