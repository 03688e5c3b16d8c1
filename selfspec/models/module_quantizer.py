"""Forwards of the linears and experts in the sub-layers of a model that runs through its own forward.

The model itself is not changed: a runtime runs these forwards in place of the modules' own for one pass. They multiply
with quantised copies of the weights, or, in full precision, with the weights themselves by native products.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from selfspec.models.dispatch import device_of, in_this_thread
from selfspec.models.families.base import SubLayer
from selfspec.models.families.experts import ExpertParts, ExpertProducts
from selfspec.models.layout import suits_native
from selfspec.models.linears import Call, Group, Moved, PartLinear, is_exact, is_plain, linear_over
from selfspec.models.low_precision import Bits, Kernel, bytes_of, is_quantizable
from selfspec.models.native import NativeProduct
from selfspec.models.quantized_sublayers import Int4Weights, Trained, WeightQuantizer, bytes_of_experts
from selfspec.models.structure import Absent, Forwards, Structure, find_structure

SUB_LAYERS: tuple[SubLayer, SubLayer] = ("attention", "mlp")
_FEWEST = 16  # linears of fewer outputs or inputs, such as gates and adapters of a low rank, are not quantised
_LARGEST_REST = 0.5  # the largest share of a quantised sub-layer's weights that may stay in full precision

Inputs = Mapping[nn.Module, int]
"""A number for the input tensor of each linear in a pass: linears of the same number are computed by one product."""


@contextmanager
def recording_inputs(model: nn.Module) -> Iterator[Inputs]:
    """Record which linears of a model read the same tensor during a pass of this thread."""
    inputs, tensors = dict[nn.Module, int](), dict[int, Tensor]()  # tensors are kept alive: an id stands for one only

    def record(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args:
            inputs[module] = id(tensors.setdefault(id(args[0]), args[0]))

    recorder = in_this_thread(record)
    hooks = [m.register_forward_pre_hook(recorder) for m in model.modules() if isinstance(m, (nn.Linear, Conv1D))]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def quantizer_of(model: Any, inputs: Inputs | None = None, kernel: Kernel | None = None) -> ModuleQuantizer:
    """Return the quantiser of a model of any family; `inputs` and `kernel` are as in `ModuleQuantizer`.

    Raises `UnsupportedModelError` if the model's layers cannot be found.
    """
    return ModuleQuantizer(find_structure(model), model.get_output_embeddings(), inputs or {}, kernel)


@dataclass(frozen=True, slots=True)
class _Quantizable:
    """The modules of a sub-layer that can be quantised: groups of linears, and modules with the weights of experts."""

    groups: Sequence[NamedLinears]
    experts: Sequence[ExpertParts]

    def bytes(self, bits: Bits, sizes: Sequence[int | None] = ()) -> int:
        """Return the bytes that these modules' weights take in `bits`; `sizes`: of groups whose bytes are known."""
        each = zip(self.groups, sizes or [None] * len(self.groups), strict=True)
        groups = [bytes_of(bits, *group.sizes) if size is None else size for group, size in each]
        return sum([*groups, *(bytes_of_experts(parts, bits) or 0 for parts in self.experts)])


@dataclass(frozen=True, slots=True)
class ModuleQuantizer(WeightQuantizer):
    """Factory of forwards that use quantised copies of a sub-layer's or the head's weights.

    `structure` are the model's layers, and `head` is its language-model head. `inputs` are those of a probe pass.
    `kernel` and `chosen` are as in `WeightQuantizer`.
    """

    structure: Structure
    head_module: nn.Module
    inputs: Inputs = field(default_factory=dict, repr=False)
    kernel: Kernel | None = None
    chosen: dict[tuple[int, int, Bits], Kernel] = field(default_factory=dict, repr=False)

    def bytes(self, index: int, part: SubLayer, bits: Bits, int4: Int4Weights | None = None) -> int | None:
        """Return the bytes of a layer's quantised attention or MLP; None if it cannot be quantised to `bits`.

        `int4`: as in `sublayer`.
        """
        own = self._quantizable(index, part, bits)
        return None if own is None else own.bytes(bits, self._sizes(index, part, own, int4 if bits == 4 else None))

    def _sizes(self, index: int, part: SubLayer, own: _Quantizable, int4: Int4Weights | None) -> list[int | None]:
        """Return the bytes of those groups of a sub-layer's `own` that have int4 weights already."""
        if int4 is None:
            return [None] * len(own.groups)
        first = self._first_group(index, part)
        return [int4.bytes(index, number) for number in range(first, first + len(own.groups))]

    def linear_groups(self, index: int) -> Sequence[NamedLinears]:
        """Return the groups of linears of layer `index` that can be quantised to int4: the attention's, then the MLP's.

        Linears that experts hold stacked in one tensor are not among them.
        """
        if not 0 <= index < len(self.structure.layers):
            return ()
        each = [self._quantizable(index, part, 4) for part in SUB_LAYERS]
        return [group for own in each if own is not None for group in own.groups]

    def int4_groups(self, index: int) -> Mapping[int, NamedLinears]:
        """Return the groups of `linear_groups` by index: all of them can be quantised to int4."""
        return dict(enumerate(self.linear_groups(index)))

    def _first_group(self, index: int, part: SubLayer) -> int:
        """Return the index in `linear_groups` of a sub-layer's first group."""
        attention = self._quantizable(index, "attention", 4) if part == "mlp" else None
        return 0 if attention is None else len(attention.groups)

    def sublayer(
        self,
        index: int,
        part: SubLayer,
        bits: Bits,
        trained: Trained | None = None,
        int4: Int4Weights | None = None,
    ) -> tuple[Forwards, int] | None:
        """Return the forwards of a layer's quantised attention or MLP, and its bytes; None if it cannot be quantised.

        Linears that cannot be quantised to `bits`, such as adapters of a low rank, keep their own forwards. `int4`:
        weights to use for `bits` 4; groups that have none, and experts, are rounded to nearest.
        """
        own = self._quantizable(index, part, bits)
        if own is None:
            return None
        forwards: dict[nn.Module, Callable[..., Any]] = {}
        weights = int4 if bits == 4 else None
        first = 0 if weights is None else self._first_group(index, part)
        for number, group in enumerate(own.groups, first):
            weight = None if weights is None else weights.get(index, number)
            (made,), _ = self.quantized([group], bits, quantized=[weight])
            forwards.update(_forwards_of(group, made.modules[0].fused.product))
        for parts in own.experts:
            forwards[parts.module] = _experts_forward(self.experts(parts, bits))
        return forwards, own.bytes(bits, self._sizes(index, part, own, weights))

    def head_bytes(self, bits: Bits) -> int | None:
        """Return the bytes that the quantised head takes; None if it cannot be quantised to `bits`."""
        if not is_quantizable([self.head_module], bits):
            return None
        return bytes_of(bits, self.head_module.out_features, self.head_module.in_features)  # type: ignore[arg-type]

    def head(self, bits: Bits, tokens: Sequence[int] | None) -> tuple[Forwards, int] | None:
        """Return the forward of the quantised head, and its bytes; None if it cannot be quantised.

        With `tokens`, the head computes only their logits; all others are -inf.
        """
        if (nbytes := self.head_bytes(bits)) is None:
            return None
        (made,), _ = self.quantized([Group(SimpleNamespace(head=self.head_module), ("head",))], bits)
        if tokens is None:
            return self._head_by(made.module.fused.product), nbytes
        product = linear_over(made.module, tokens)
        assert product is not None
        into: int = self.head_module.in_features  # type: ignore[assignment]
        return self._head_by(product), bytes_of(bits, len(tokens), into)

    def head_over(self, tokens: Sequence[int]) -> Forwards | None:
        """Return the forward of a head in full precision that computes only the logits of `tokens`, all others -inf.

        Returns None if the head's weight cannot be read.
        """
        product = linear_over(self.head_module, tokens) if is_exact(self.head_module) else None
        return None if product is None else self._head_by(product)

    def _head_by(self, product: Call) -> Forwards:
        """Return the head's forward by a product; rows are moved to the head's device, as hooks of accelerate would."""
        return {self.head_module: on_any_shape(Moved(product, device_of(self.head_module)))}

    def full(self) -> Forwards:
        """Return forwards of all layers' linears in full precision by native products; empty if torch's are as fast.

        The products read the linears' own weights, and need no additional memory.
        """
        modules = [self.head_module, *(module for layer in self.structure.layers for module in layer.modules())]
        linears = {m: linear for m in modules if (linear := _full_linear(m)) is not None}
        if not suits_native(list(linears.values())):
            return {}
        return {
            m: on_any_shape(NativeProduct(one.weight.detach(), None if one.bias is None else one.bias.detach()))
            for m, one in linears.items()
        }

    def all_linears_bytes(self, bits: Bits) -> int | None:
        """Return the bytes of all sub-layers and the head in `bits`; None if one cannot be quantised or has experts."""
        total = self.head_bytes(bits)
        for index in range(len(self.structure.layers)):
            for part in SUB_LAYERS:
                own = self._quantizable(index, part, bits)
                if total is None or own is None or own.experts:
                    return None
                total += own.bytes(bits)
        return total

    def _quantizable(self, index: int, part: SubLayer, bits: Bits) -> _Quantizable | None:
        """Return the modules of a sub-layer to quantise; None if they hold the smaller part of its weights."""
        module = (self.structure.attention if part == "attention" else self.structure.mlp)[index]
        parents: Iterable[nn.Module] = module.modules()
        if part == "mlp" and isinstance(module, Absent):  # OPT, for one: an MLP's linears are the layer's own children
            parents = [self.structure.layers[index]]
        groups = [group for parent in parents for group in self._groups_of(parent, bits)]
        experts = [parts for parts in map(_expert_parts, module.modules()) if parts and bytes_of_experts(parts, bits)]
        linears = [linear for group in groups for linear in group.modules]
        fits = sum(linear.in_features * linear.out_features for linear in linears)
        fits += sum(weight.numel() for parts in experts for pair in parts.each() for weight, _ in pair)
        rest = max(0, sum(parameter.numel() for parameter in module.parameters()) - fits)
        return _Quantizable(groups, experts) if fits and rest <= _LARGEST_REST * (fits + rest) else None

    def _groups_of(self, parent: nn.Module, bits: Bits) -> Iterator[NamedLinears]:
        """Yield the children of a module that are linears to quantise, those with the same input as one group."""
        linears = {name: linear for name, child in parent.named_children() if (linear := _linear_of(child)) is not None}
        by_input: dict[Any, list[str]] = {}
        for name, linear in linears.items():
            if min(linear.in_features, linear.out_features) >= _FEWEST and is_quantizable([linear], bits):
                by_input.setdefault(self.inputs.get(getattr(parent, name), name), []).append(name)
        for names in by_input.values():
            yield NamedLinears(SimpleNamespace(**linears), tuple(names), of=parent)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NamedLinears(Group):
    """Linears that read the same input; `of` is the module whose children they are, or stand for."""

    of: nn.Module

    @property
    def replaced(self) -> list[nn.Module]:
        """The modules whose forwards are replaced, in the order of `modules`."""
        return [getattr(self.of, name) for name in self.names]


def _linear_of(module: nn.Module) -> Any:
    """Return the linear that a module is or computes, for a quantised copy; None if it computes something else.

    GPT-2's `Conv1D` is a linear whose weight is stored by columns. A subclass of `nn.Linear` with a forward of its own,
    such as Falcon's, is one if it computes the same on an example.
    """
    if isinstance(module, PartLinear) or type(module) is nn.Linear:
        return module
    if not (isinstance(module, (nn.Linear, Conv1D)) and is_plain(module) and type(module.weight) is nn.Parameter):
        return None
    weight = module.weight.t() if isinstance(module, Conv1D) else module.weight
    if not weight.is_floating_point() or weight.is_meta or not _computes_linear(module, weight):
        return None
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, device="meta")
    linear.weight, linear.bias = nn.Parameter(weight.detach(), requires_grad=False), module.bias
    return linear


def _full_linear(module: nn.Module) -> Any:
    """Return the linear, stored by rows, that a module is or computes, for products in full precision; None if none."""
    if is_exact(module):
        return module
    return _linear_of(module) if isinstance(module, nn.Linear) and type(module) is not nn.Linear else None


def _computes_linear(module: Any, weight: Tensor) -> bool:
    """Return whether a module computes the linear of `weight` and its bias; found out once for each class."""
    known: bool | None = _LINEAR_CLASSES.get(type(module))
    if known is None:
        x = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype, device=weight.device).unsqueeze(0)
        try:
            with torch.no_grad():
                found, expected = module(x), nn.functional.linear(x, weight, module.bias)
            known = bool(torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())))
        except Exception:  # whatever a class of another library raises
            known = False
        _LINEAR_CLASSES[type(module)] = known
    return known


_LINEAR_CLASSES: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def on_any_shape(product: Call) -> Callable[[Tensor], Tensor]:
    """Return a linear's forward, from `[.., in]` to `[.., out]`, by its product with rows."""

    def forward(x: Tensor) -> Tensor:
        rows = product(x.reshape(-1, x.shape[-1]))
        return rows.to(x.dtype).view(*x.shape[:-1], rows.shape[1])

    return forward


class _SharedProduct(threading.local):
    """The product of linears that read the same input, computed once when the first of them is called.

    An output is handed out once: a linear that is called again computes the product again. Each thread has its own
    outputs.
    """

    def __init__(self, product: Call) -> None:
        self._product = product
        self._x: Tensor | None = None
        self._left: dict[int, Tensor] = {}  # by first output

    def part(self, x: Tensor, start: int, parts: Sequence[tuple[int, int]]) -> Tensor:
        """Return the outputs from `start` on, of the linears whose first output and number of outputs are `parts`."""
        if x is not self._x or start not in self._left:
            rows = self._product(x.reshape(-1, x.shape[-1])).to(x.dtype)
            self._x = x
            self._left = {first: rows.narrow(1, first, count).view(*x.shape[:-1], count) for first, count in parts}
        mine = self._left.pop(start)
        if not self._left:
            self._x = None
        return mine


def _forwards_of(group: NamedLinears, product: Call) -> Forwards:
    """Return the forwards of linears whose fused product is `product`."""
    if len(group.names) == 1:
        return {group.replaced[0]: on_any_shape(product)}
    shared, parts, start = _SharedProduct(product), list[tuple[int, int]](), 0
    for module in group.modules:
        parts.append((start, module.out_features))
        start += module.out_features

    def forward_from(first: int) -> Callable[[Tensor], Tensor]:
        return lambda x: shared.part(x, first, parts)

    return {module: forward_from(first) for module, (first, _) in zip(group.replaced, parts, strict=True)}


def _expert_parts(module: nn.Module) -> ExpertParts | None:
    """Return a module's stacked experts; None if it has none, or none that are gated in the usual way."""
    usual = getattr(module, "has_gate", False) and not getattr(module, "has_post_expert_norm", False)
    across = getattr(module, "is_transposed", None)
    return ExpertParts(module, module, across) if usual and across is not None else None


def _experts_forward(experts: ExpertProducts) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, chosen = hidden_states.reshape(-1, hidden_states.shape[-1]), top_k_index.reshape(-1, top_k_index.shape[-1])
        out = torch.zeros_like(x)
        experts.add(out, x, top_k_weights.reshape(chosen.shape), chosen)
        return out.view(hidden_states.shape)

    return forward
