"""Trained heads for tests: of random weights, for any model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.draft_modules.heads import Head
from selfspec.draft_modules.module_files import PartFile
from selfspec.draft_modules.registry import make_head
from selfspec.runtime.base import Runtime
from selfspec.training.learner import Learner
from selfspec.training.texts import layers_of

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def bfloats(*shape: int) -> Tensor:
    """Random weights."""
    return (0.3 * torch.randn(shape)).bfloat16()


def random_learner(
    runtime: Runtime, words: Sequence[int], kind: str = "eagle", *, seed: int = 0, layers: Sequence[int] | None = None
) -> Learner:
    """Weights that nobody has trained, as bfloat16 holds them."""
    learner = Learner(runtime, kind, words, layers_of(runtime.layers) if layers is None else layers, seed=seed)
    with torch.no_grad():
        for parameter in learner.net.parameters():
            parameter.copy_(parameter + 0.3 * torch.randn_like(parameter)).copy_(parameter.bfloat16())
    learner.net.requires_grad_(False)
    return learner


def random_part(runtime: Runtime, words: Sequence[int], kind: str = "eagle", **how) -> PartFile:
    """A part of such weights; `words`: the tokens that it may draft."""
    return random_learner(runtime, words, kind, **how).part()


def random_head(runtime: Runtime, words: Sequence[int], kind: str = "eagle", *, low: bool = True, **how) -> Head:
    """A head of such weights."""
    return make_head(runtime, random_part(runtime, words, kind, **how), low=low)
