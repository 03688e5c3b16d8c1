"""The sizes of a model, such as layers and heads, which determine the shapes of a pass's tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes and dtype of a model. `eps` is the eps of its norms; `intermediate` is the number of MLP units."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    dtype: torch.dtype
