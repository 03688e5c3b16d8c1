"""Mixture-of-experts MLPs, and the families Mixtral and Qwen3-MoE, which have experts in all layers or some."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.models.dispatch import device_of
from selfspec.models.families.base import Layer, Mlp, Workspace
from selfspec.models.families.llama import Llama
from selfspec.models.families.llama_variants import Qwen3
from selfspec.models.linears import Call, Group, is_plain, on_rows
from selfspec.models.norms import Norm, Norms

Weights = tuple[Tensor, Tensor | None]
"""A weight `[out, in]` and a bias `[out]` or None."""


class Experts:
    """A router and its experts, run as the model's own module. A draft path's MLP mode applies to all experts."""

    def __init__(self, norm: Norm, module: Any) -> None:
        self.norm, self._call = norm, on_rows(_first(module))

    def run(self, work: Workspace) -> None:
        """Add the output of the chosen experts to the residual stream."""
        work.stream.add_(self._call(self.norm(work.stream, work.stream_with_eps, work.normed)))


def _first(module: Any) -> Call:
    """Return a module as a callable that returns only the first entry if the output is a tuple."""

    def call(x: Tensor) -> Tensor:
        output = module(x)
        first: Tensor = output[0] if isinstance(output, tuple) else output
        return first

    return call


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """The router and experts of an MLP with stacked weights `[experts, ..]`, as `base.ExpertWeights`.

    `across`: whether an expert's weights are stored as `[in, out]`.
    """

    router: Any
    module: Any
    across: bool = False

    def readable(self) -> bool:
        """Return whether the weights can be read, and are exactly what the experts multiply with."""
        weights = [getattr(self.module, name, None) for name in ("gate_up_proj", "down_proj")]
        dense = all(
            type(t) is nn.Parameter and not t.is_meta and t.is_floating_point() and t.dim() == 3 for t in weights
        )
        return dense and is_plain(self.module) and is_plain(self.router)

    def each(self) -> Iterator[tuple[Weights, Weights]]:
        """Yield each expert's fused gate and up, and its down projection."""
        for number in range(len(self.module.gate_up_proj)):
            yield self._expert_weights(number, "gate_up_proj"), self._expert_weights(number, "down_proj")

    def _expert_weights(self, number: int, name: str) -> Weights:
        weight, bias = getattr(self.module, name)[number].detach(), getattr(self.module, f"{name}_bias", None)
        return weight.t() if self.across else weight, None if bias is None else bias[number].detach()

    def gated_activation(self, gate_up: Tensor) -> Tensor:
        """Return the input of an expert's down projection from its gate and up outputs `[n, 2 * I]`."""
        if (own := getattr(self.module, "_apply_gate", None)) is not None:
            mixed: Tensor = own(gate_up)
            return mixed
        gate, up = gate_up.chunk(2, -1)
        acted: Tensor = self.module.act_fn(gate)
        return acted * up


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """Quantised experts: `products` are each expert's fused gate and up, and its down projection."""

    gated_activation: Call
    products: Sequence[tuple[Call, Call]]

    def add(self, base: Tensor, x: Tensor, weights: Tensor, chosen: Tensor) -> None:
        """Add to `base` `[N, D]` the output of the experts for `x` `[N, D]`; only the weights of chosen ones are read.

        `chosen` `[N, k]` are the experts of each row, and `weights` `[N, k]` the factors of their outputs.
        """
        for number in torch.unique(chosen).tolist():
            row, place = (chosen == number).nonzero(as_tuple=True)
            into, onto = self.products[number]
            made = onto(self.gated_activation(into(x[row]).to(x.dtype))) * weights[row, place].unsqueeze(1)
            base.index_add_(0, row, made.to(base.dtype))


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """A router with quantised experts."""

    norm: Norm
    router: Callable[[Tensor], Any]
    experts: ExpertProducts

    def run(self, work: Workspace) -> None:
        """Add the output of the chosen experts to the residual stream."""
        x = self.norm(work.stream, work.stream_with_eps, work.normed)
        _, weights, chosen = self.router(x)
        self.experts.add(work.stream, x, weights, chosen)


class Mixtral(Llama):
    """The `Family` of models with the module tree of `MixtralForCausalLM`."""

    def layer(self, layer: Any, attention_spec: int) -> Layer:
        """Return a layer's modules, with its experts if it has any."""
        experts = getattr(layer.mlp, "experts", None)
        expert_parts = None if experts is None else ExpertParts(layer.mlp.gate, experts)
        return replace(super().layer(layer, attention_spec), experts=expert_parts)

    def groups(self, attention: Any, mlp: Any) -> tuple[Group, ...]:
        """Return a layer's linears without its experts, which run as the model's own module."""
        groups = super().groups(attention, mlp)
        return groups[:2] if hasattr(mlp, "experts") else groups

    def mlp(self, layer: Layer, norms: Norms) -> Mlp:
        """Return a layer's experts, or its dense MLP."""
        mlp = layer.module.mlp
        if not hasattr(mlp, "experts"):
            return super().mlp(layer, norms)
        return Experts(norms.read(layer.norms[1], device_of(layer.norms[0])), mlp)


class Qwen3Moe(Mixtral, Qwen3):
    """The `Family` of models with the module tree of `Qwen3MoeForCausalLM`."""
