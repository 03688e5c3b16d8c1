"""Linears and embeddings of float32 models on the CPU whose weights are stored in another form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError
from selfspec.models.linears import PartLinear, Product


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
