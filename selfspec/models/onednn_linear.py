"""Linears with weights packed in the order that oneDNN reads fastest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError
from selfspec.models.linears import Call, Group, PartLinear

_PACKED_FOR = 16  # rows that oneDNN packs for; the packed order also suits one row and hundreds of rows


class Packed:
    """A weight `[out, in]` packed by oneDNN; a product with 8 rows costs little more than with a single row.

    The weight is float32 or bfloat16 on the CPU. Raises what torch raises if oneDNN cannot pack the weight.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR)
        self.dtype, self.bias, self.out = weight.dtype, bias, len(weight)
        self.product: Call = partial(_packed_product, weight=self.tensor, bias=bias)

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.tensor, self.bias) if t is not None)

    def unpacked(self) -> Tensor:
        """Return the exact original weight `[out, in]`."""
        weight: Tensor = self.tensor.to_dense(self.dtype)
        return weight

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        return Packed(self.unpacked(), copy.deepcopy(self.bias, memo))


def _packed_product(x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return product


class PackedLinear(PartLinear):
    """Replacement of an `nn.Linear` with a packed weight, alone or fused with linears that read the same input.

    `weight` is a property that unpacks at each read. A model with these modules can be called, copied and saved as
    before, but neither trained nor moved.
    """

    fused: Packed
    readable: ClassVar[bool] = True

    def __init__(self, packed: Packed, start: int, linear: nn.Linear) -> None:
        super().__init__(packed, start, linear)
        self.bias = None if packed.bias is None else packed.bias.narrow(0, start, linear.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product `[.., out]` with `x` `[.., in]`, in the weight's dtype even under autocast."""
        return super().forward(x.to(self.packed.dtype))

    @property
    def packed(self) -> Packed:
        """The packed weight of all linears fused with this one."""
        return self.fused

    @property
    def weight(self) -> Tensor:
        """The unpacked weight `[out, in]` of this linear."""
        return self.packed.unpacked().narrow(0, self.start, self.out_features)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight.contiguous()
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        dtype = self.packed.dtype
        moved = fn(torch.zeros(1, dtype=dtype))
        if moved.dtype != dtype or moved.device.type != "cpu":
            kind = str(dtype).removeprefix("torch.")
            raise SelfspecError(f"packed weights stay {kind} on the CPU; load the model again to move or cast it")
        return self


@torch.no_grad()
def pack_(group: Group) -> None:
    """Replace a group's exact linears by `PackedLinear`s, fused in one packed weight if all or none have a bias."""
    modules = group.modules
    if any((module.bias is None) != (modules[0].bias is None) for module in modules):
        for name in group.names:
            pack_(Group(group.parent, (name,)))
        return
    bias = None if modules[0].bias is None else torch.cat([module.bias.detach() for module in modules])
    packed, start = Packed(torch.cat([module.weight.detach() for module in modules]), bias), 0
    for name, module in zip(group.names, modules, strict=True):
        setattr(group.parent, name, PackedLinear(packed, start, module))
        start += module.out_features
