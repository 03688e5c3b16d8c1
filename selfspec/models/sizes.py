"""The sizes of a model that a pass depends on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model sizes and dtype that determine a pass's tensors. `eps` is that of the model's norms."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    dtype: torch.dtype
