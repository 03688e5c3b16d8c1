"""EAGLE heads for tests: of random weights, for any model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfspec.parts.eagle import EagleHead, EagleShape, part_of
from selfspec.parts.files import PartFile
from selfspec.runtime.forward import Runtime
from selfspec.training.eagle import EagleNet


def random_net(runtime: Runtime, *, seed: int = 0) -> EagleNet:
    """Weights that nobody has trained, of the model's width."""
    s = runtime.skeleton.sizes
    torch.manual_seed(seed)
    net = EagleNet(EagleShape(s.hidden, 2 * s.hidden, s.heads, s.kv_heads, s.head_dim, s.eps))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(parameter + 0.3 * torch.randn_like(parameter)).copy_(parameter.bfloat16())
    return net.requires_grad_(False)


def random_part(runtime: Runtime, words: Sequence[int], *, seed: int = 0) -> PartFile:
    """A part of such weights; `words`: the tokens that it may draft."""
    net = random_net(runtime, seed=seed)
    return part_of(net.shape, net.tensors(), torch.tensor(list(words)), runtime)


def random_head(runtime: Runtime, words: Sequence[int], *, seed: int = 0, low: bool = True) -> EagleHead:
    """A head of such weights."""
    return EagleHead(runtime, random_part(runtime, words, seed=seed), low=low)
