"""Draft paths in few bits: random ones, and models whose weights are what those bits stand for."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import nn

from selfspec.basics.errors import SelfspecError
from selfspec.models.kernels import KERNELS
from selfspec.models.low_precision import Bits, Kernel, quantize
from selfspec.models.skeleton import read_skeleton
from selfspec.runtime.compiled_path import BITS
from selfspec.types.draft_path import MODES, DraftPath


def random_path(seed: int, layers: int, *, words: int = 0) -> DraftPath:
    """Any mode for each sub-layer and the head; of `words` tokens, some, all named half of the times."""
    chance = random.Random(seed)
    some = None if not words or chance.random() < 0.5 else tuple(chance.sample(range(words), max(2, words // 2)))
    head = chance.choice(MODES[:-1])
    return DraftPath.from_modes([chance.choice(MODES) for _ in range(2 * layers)], head=head, vocabulary=some)  # type: ignore[arg-type]


def stands_for(linear: Any, bits: Bits) -> nn.Linear:
    """A linear with the weight that a linear's, rounded, stands for."""
    made = copy.deepcopy(linear)
    made.weight = nn.Parameter(quantize(linear.weight.detach(), bits).weight(linear.weight.dtype))
    return made


def as_rounded(model: Any, path: DraftPath, in_full: tuple[str, ...] = ()) -> Any:
    """A copy of a model whose weights are those of a path, rounded in the place of a kernel."""
    model = copy.deepcopy(model)
    parts = read_skeleton(model).quantizer.parts
    layers = len(parts.layers)
    modes = path.modes(layers)
    chosen = [
        (f"{part} {i}", parts.layers[i].groups_of(part), modes[i + layers * (part == "mlp")])
        for i in range(layers)
        for part in ("attention", "mlp")
    ]  # type: ignore[arg-type]
    for name, groups, mode in [*chosen, ("head", (parts.head,), path.head)]:
        if mode in BITS and name not in in_full:
            for group in groups:
                for attribute, linear in zip(group.names, group.modules, strict=True):
                    setattr(group.parent, attribute, stands_for(linear, BITS[mode]))
    for i, layer in enumerate(parts.layers):
        if layer.experts is not None and modes[i + layers] in BITS:
            for pair in layer.experts.each():
                for weight, _ in pair:
                    weight.copy_(quantize(weight, BITS[modes[i + layers]]).weight(weight.dtype))
    return model


def kernels() -> list[tuple[Bits, str, Kernel]]:
    """Those that are to be had here."""
    found: list[tuple[Bits, str, Kernel]] = []
    for bits, named in KERNELS.items():
        for name, kernel in named.items():
            try:
                for rows in (1, 3):
                    kernel(quantize(torch.randn(64, 64), bits), torch.float32)(torch.randn(rows, 64))
            except (RuntimeError, AttributeError, NotImplementedError, SelfspecError):
                continue
            found.append((bits, name, kernel))
    return found
