"""Linears and embeddings of float32 models on the CPU whose weights are stored in another form or order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.basics.errors import SelfspecError
from selfspec.models.linears import Call, Group, PartLinear, Product


class StoredWeight(Protocol):
    """A float32 model's weight `[out, in]` that is stored in another form; as `GGUFWeight` and `HalfWeight`."""

    @property
    def values(self) -> Tensor:
        """The stored values."""

    @property
    def fixed(self) -> str:
        """The error for moving or casting the weight."""

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""

    @property
    def bytes(self) -> int:
        """Size in bytes."""

    def rows(self, outputs: Tensor | slice) -> StoredWeight:
        """Return the rows `outputs` of the weight; for a slice, a view."""

    def weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight in `dtype`."""


class StoredProduct(Product, Protocol):
    """A fused product with a stored weight and a bias `[out]`."""

    @property
    def blocks(self) -> StoredWeight:
        """The stored weight."""

    @property
    def bias(self) -> Tensor | None:
        """The bias; None if there is none."""


class StoredLinear(PartLinear):
    """Replacement of a linear by a stored weight, alone or fused with linears that read the same input.

    `weight` is a property that converts to float32 at each read. A model with these modules can be called, copied and
    saved like a float32 model, but neither trained nor moved.
    """

    fused: StoredProduct
    readable: ClassVar[bool] = True

    def __init__(self, fused: StoredProduct, start: int, linear: Any) -> None:
        super().__init__(fused, start, linear)
        self.bias = None if fused.bias is None else fused.bias.narrow(0, start, self.out_features)

    @property
    def blocks(self) -> StoredWeight:
        """The stored weight of all linears fused with this one."""
        return self.fused.blocks

    @property
    def weight(self) -> Tensor:
        """The float32 weight `[out, in]` of this linear."""
        return self.blocks.rows(slice(self.start, self.start + self.out_features)).weight()

    def forward(self, x: Tensor) -> Tensor:
        """Return the product `[.., out]` with `x` `[.., in]`; gradients pass through it to its inputs."""
        if torch.is_grad_enabled() and x.requires_grad:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.linear(x, self.weight.to(x.dtype), bias)
        return self._rows(x.reshape(-1, self.in_features)).reshape(*x.shape[:-1], self.out_features)

    def _rows(self, x: Tensor) -> Tensor:
        """Return the product `[N, out]` with the rows `x` `[N, in]`."""
        return super().forward(x)

    def _bias_at(self, outputs: Tensor) -> Tensor | None:
        return None if self.bias is None else self.bias.index_select(0, outputs)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredLinear:
        _stays(fn, self.blocks)
        return self


class StoredEmbedding(nn.Module):
    """Replacement of an embedding whose weight stays as it is stored; the head may share it.

    `scale` multiplies what it returns, as in an embedding of Gemma 3; None: 1.
    """

    dtype: ClassVar[torch.dtype] = torch.float32

    def __init__(self, blocks: StoredWeight, scale: Tensor | None = None) -> None:
        super().__init__()
        self.blocks, self._scale = blocks, scale
        self.num_embeddings, self.embedding_dim = blocks.shape

    @property
    def weight(self) -> Tensor:
        """The dequantised weight `[tokens, D]`."""
        return self.blocks.weight()

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings `[.., n, D]` of token ids `[.., n]`."""
        rows = self.blocks.rows(ids.flatten()).weight().view(*ids.shape, self.embedding_dim)
        return rows if self._scale is None else rows.mul_(self._scale)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredEmbedding:
        _stays(fn, self.blocks)
        return self


def save_tied_once(model: Any) -> None:
    """Let state dictionaries hold one tensor for a head and an embedding that share a stored weight."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    shared = isinstance(head, StoredLinear) and isinstance(embedding, StoredEmbedding)
    if shared and head.blocks.values.data_ptr() == embedding.blocks.values.data_ptr():
        names = {module: name for name, module in model.named_modules()}
        model.register_state_dict_post_hook(partial(_tie, names[head], names[embedding]))


def _tie(head: str, embedding: str, _module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    state[f"{prefix}{head}.weight"] = state[f"{prefix}{embedding}.weight"]


def _stays(fn: Callable[[Tensor], Tensor], weight: StoredWeight) -> None:
    """Raise `SelfspecError` if `fn` moves or casts weights."""
    moved = fn(torch.zeros(1))
    if moved.dtype != torch.float32 or moved.device.type != "cpu":
        raise SelfspecError(weight.fixed)


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
        """Return the product `[.., out]` with `x` `[.., in]`, in the weight's dtype even under autocast.

        Where `x` needs a gradient, it passes through, and autocast applies.
        """
        x = x.to(self.packed.dtype)
        if torch.is_grad_enabled() and x.requires_grad:
            return F.linear(x, self.weight, self.bias)
        return super().forward(x)

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
