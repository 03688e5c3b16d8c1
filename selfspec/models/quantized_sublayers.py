"""Quantised copies of a model's sub-layers and head, and the other parts of a draft path, such as bridges.

The model itself is not changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from selfspec.models.dispatch import device_of
from selfspec.models.families.base import Attention, ExpertWeights, Family, Layer, Mlp, Parts, SubLayer, Workspace
from selfspec.models.families.experts import ExpertProducts, Experts, QuantizedExperts
from selfspec.models.kernels import kernel_for
from selfspec.models.linears import Call, Group, Moved
from selfspec.models.low_precision import (
    Bits,
    FusedQuantizedLinear,
    Kernel,
    QuantizedWeight,
    bytes_of,
    groups_of,
    is_quantizable,
    quantize_group,
)
from selfspec.models.norms import Norms
from selfspec.models.shards import summed

Run = tuple[int, int]
"""A run `(first, end)` of layers that a draft path skips entirely, from `first` up to, not including, `end`."""


@dataclass(frozen=True, slots=True, eq=False)
class Bridge:
    """A linear map that replaces skipped layers: it adds `onto` (`into` x) + `bias` to the residual stream x.

    `into` is `[r, D]`, `onto` `[D, r]` and `bias` `[D]`; without `into`, `onto` is `[D, D]`. (ReplaceMe 2505.02819.)
    """

    into: Tensor | None
    onto: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """A low-rank update `up` @ `down` of the weights `[out, in]` of linears that read the same input.

    `down` is `[r, in]`, and `up` `[out, r]` over the linears' concatenated outputs. (LoRA, Hu et al. 2106.09685.)
    """

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """Bridges by the run of layers that they replace, and updates by (layer, index of the group in `Layer.groups`)."""

    bridges: Mapping[Run, Bridge] = field(default_factory=dict)
    updates: Mapping[tuple[int, int], Update] = field(default_factory=dict)


class Int4Weights(Protocol):
    """The int4 weights of some groups of linears, over their concatenated outputs, quantised before.

    A group is named by its layer and its index in `WeightQuantizer.linear_groups`.
    """

    def get(self, layer: int, group: int) -> QuantizedWeight | None:
        """Return a group's weight `[out, in]`; None if the group is not among them."""

    def bytes(self, layer: int, group: int) -> int | None:
        """Return the bytes of a group's weight; None if the group is not among them."""


@dataclass(frozen=True, slots=True, eq=False)
class BridgeModule:
    """A bridge that runs as an `Mlp`. `into` None: `onto` reads the residual stream itself."""

    into: Call | None
    onto: Call

    def run(self, work: Workspace) -> None:
        """Add the bridge's output to the residual stream."""
        x = work.stream if self.into is None else self.into(work.stream).to(work.stream.dtype)
        work.stream.add_(self.onto(x).to(work.stream.dtype))


class WeightQuantizer(ABC):
    """Base of the factories of quantised sub-layers: it makes the products, and chooses their kernels.

    `kernel` multiplies with the quantised weights; None: the fastest kernel for each shape of weight on this machine,
    which is kept in `chosen` by inputs, outputs and bits.
    """

    __slots__ = ()
    kernel: Kernel | None
    chosen: dict[tuple[int, int, Bits], Kernel]

    @abstractmethod
    def linear_groups(self, index: int) -> Sequence[Group]:
        """Return the groups of linears of layer `index`; empty if there is no such layer.

        A group's index is its number in files of int4 weights.
        """

    @abstractmethod
    def int4_groups(self, index: int) -> Mapping[int, Group]:
        """Return the groups of linears of layer `index` that can be quantised to int4, by index in `linear_groups`."""

    def group_sizes(self, index: int, number: int) -> tuple[int, int] | None:
        """Return the outputs and inputs of group `number` of layer `index`; None if there is no such group."""
        groups = self.linear_groups(index)
        return groups[number].sizes if 0 <= number < len(groups) else None

    def kernel_of(self, weight: Tensor, bits: Bits) -> Kernel:
        """Return the kernel for weights of this shape and number of bits; see `kernel_for`."""
        kind = (weight.shape[1], len(weight), bits)
        kernel = self.kernel or self.chosen.get(kind)
        if kernel is None:
            kernel = self.chosen[kind] = kernel_for(weight, bits)
        return kernel

    def experts(self, experts: ExpertWeights, bits: Bits) -> ExpertProducts:
        """Return the products of all experts, quantised to `bits`."""
        products = [tuple(self._product(*weights, bits) for weights in pair) for pair in experts.each()]
        return ExpertProducts(experts.gated_activation, [(into, onto) for into, onto in products])

    def quantized(
        self,
        groups: Sequence[Group],
        bits: Bits,
        updates: Sequence[Update | None] = (),
        quantized: Sequence[QuantizedWeight | None] = (),
    ) -> tuple[list[Group], int]:
        """Return quantised copies of groups of linears (`quantize_group`), and their bytes."""
        first = groups[0].modules[0]  # whose weight may have to be made anew
        known = self.kernel or self.chosen.get((first.in_features, first.out_features, bits))
        kernel = known or self.kernel_of(first.weight, bits)
        changes = [None if update is None else update.up @ update.down for update in updates] or [None] * len(groups)
        each = zip(groups, changes, quantized or [None] * len(groups), strict=True)
        made = [quantize_group(group, bits, kernel, change, weight) for group, change, weight in each]
        return [group for group, _ in made], sum(nbytes for _, nbytes in made)

    def _product(self, weight: Tensor, bias: Tensor | None, bits: Bits) -> Call:
        return FusedQuantizedLinear(weight, bias, bits, self.kernel_of(weight, bits)).product


@dataclass(frozen=True, slots=True)
class QuantizedSublayers(WeightQuantizer):
    """Factory of quantised sub-layers and heads.

    `kernel` and `chosen` are as in `WeightQuantizer`.
    """

    family: Family
    parts: Parts
    norms: Norms
    kernel: Kernel | None = None
    chosen: dict[tuple[int, int, Bits], Kernel] = field(default_factory=dict, repr=False)  # by inputs, outputs, bits

    def bytes(self, index: int, part: SubLayer, bits: Bits, int4: Int4Weights | None = None) -> int | None:
        """Return the bytes of a layer's quantised attention or MLP; None if it cannot be quantised to `bits`.

        `int4`: as in `sublayer`.
        """
        layer = self.parts.layers[index]
        if part == "mlp" and layer.experts is not None:
            return bytes_of_experts(layer.experts, bits)
        own = layer.groups_of(part)
        if (nbytes := _bytes(own, bits)) is None or bits != 4 or int4 is None:
            return nbytes
        sizes = [(group, int4.bytes(index, layer.groups.index(group))) for group in own]
        return sum((_bytes((group,), bits) or 0) if size is None else size for group, size in sizes)

    def linear_groups(self, index: int) -> Sequence[Group]:
        """Return `Layer.groups` of layer `index`; empty if there is no such layer."""
        return self.parts.layers[index].groups if 0 <= index < len(self.parts.layers) else ()

    def int4_groups(self, index: int) -> Mapping[int, Group]:
        """Return the groups, by index, of the sub-layers of layer `index` that can be quantised to int4."""
        layer = self.parts.layers[index]
        parts: tuple[SubLayer, ...] = ("attention", "mlp")
        fitting = [own for own in map(layer.groups_of, parts) if _bytes(own, 4) is not None]
        return {layer.groups.index(group): group for own in fitting for group in own}

    def head_bytes(self, bits: Bits) -> int | None:
        """Return the bytes that the quantised head takes; None if it cannot be quantised to `bits`."""
        return _bytes((self.parts.head,), bits)

    def sublayer(
        self,
        index: int,
        part: SubLayer,
        bits: Bits,
        trained: Trained | None = None,
        int4: Int4Weights | None = None,
    ) -> tuple[Attention | Mlp, int] | None:
        """Return a layer's quantised attention or MLP, and its bytes; None if it cannot be quantised to `bits`.

        The updates in `trained` for this layer are added to the weights before they are quantised. `int4`: weights to
        use for `bits` 4; groups that have none, or whose weights are updated, are rounded to nearest.
        """
        layer = self.parts.layers[index]
        if part == "mlp" and layer.experts is not None:
            return self._experts(layer, layer.experts, bits)
        own = layer.groups_of(part)
        if _bytes(own, bits) is None:
            return None
        first = layer.groups.index(own[0])
        numbers = range(first, first + len(own))
        updates = [None if trained is None else trained.updates.get((index, number)) for number in numbers]
        quantized = [
            int4.get(index, number) if int4 is not None and bits == 4 and update is None else None
            for number, update in zip(numbers, updates, strict=True)
        ]
        made, nbytes = self.quantized(own, bits, updates, quantized)
        for group in made:
            _ = group.modules[0].fused.product  # quantise now, and not in the first pass
        made = [summed(group) for group in made]
        others = layer.groups_of("mlp" if part == "attention" else "attention")
        groups = (*made, *others) if part == "attention" else (*others, *made)
        block = self.family.block(replace(layer, groups=groups), self.norms)
        return (block.attention if part == "attention" else block.mlp), nbytes

    def _experts(self, layer: Layer, experts: ExpertWeights, bits: Bits) -> tuple[QuantizedExperts, int] | None:
        """Return an MLP with all experts of a layer quantised and the model's own router, and its bytes."""
        nbytes = bytes_of_experts(experts, bits)
        if nbytes is None:
            return None
        mlp = self.family.block(layer, self.norms).mlp
        assert isinstance(mlp, Experts)
        return QuantizedExperts(mlp.norm, experts.router, self.experts(experts, bits)), nbytes

    def head(self, bits: Bits, tokens: Sequence[int] | None) -> tuple[Call, int] | None:
        """Return the quantised head and its bytes; None if it cannot be quantised.

        With `tokens`, the head computes only their logits; all others are -inf.
        """
        if _bytes((self.parts.head,), bits) is None:
            return None
        (head,), nbytes = self.quantized((self.parts.head,), bits)
        parts = replace(self.parts, head=head)
        if tokens is not None:
            call = self.family.head_over(parts, tokens)
            return None if call is None else (call, bytes_of(bits, len(tokens), head.module.in_features))
        return Moved(self.family.head(parts), device_of(self.parts.head.module)), nbytes

    def bridge_module(self, bridge: Bridge) -> tuple[BridgeModule, int]:
        """Return the module that runs a bridge, always in int8, and its bytes."""

        def product(weight: Tensor, bias: Tensor | None) -> FusedQuantizedLinear:
            weight = weight.to(self.parts.norm.weight).contiguous()
            return FusedQuantizedLinear(weight, bias if bias is None else bias.to(weight), 8, self.kernel_of(weight, 8))

        onto = product(bridge.onto, bridge.bias)
        into = None if bridge.into is None else product(bridge.into, None)
        return BridgeModule(None if into is None else into.product, onto.product), onto.bytes + (
            0 if into is None else into.bytes
        )


def bytes_of_experts(experts: ExpertWeights, bits: Bits) -> int | None:
    """Return the bytes of all experts quantised to `bits`; None if they cannot be."""
    if not experts.readable():
        return None
    shapes = [tuple(weight.shape) for pair in experts.each() for weight, _ in pair]
    fits = all(bits == 8 or groups_of(into) for _, into in shapes)
    return sum(bytes_of(bits, out, into) for out, into in shapes) if fits else None


def _bytes(groups: Sequence[Group], bits: Bits) -> int | None:
    modules = [module for group in groups for module in group.modules]
    if not modules or not is_quantizable(modules, bits):
        return None
    return sum(
        bytes_of(bits, sum(module.out_features for module in group.modules), group.modules[0].in_features)
        for group in groups
    )
