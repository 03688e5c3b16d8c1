"""What training adds to draft paths, for tests: bridges and updates of random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from selfspec.models.quantized_sublayers import Bridge, Trained, Update
from selfspec.runtime.base import Runtime
from selfspec.types.draft_path import DraftPath


def random_trained(runtime: Runtime, path: DraftPath, *, rank: int | None = None, seed: int = 0, size: float = 0.1):
    """A bridge over every run of layers that a path skips, whole or of a rank, and an update of everything else."""
    generator = torch.Generator().manual_seed(seed)
    hidden, dtype = runtime.skeleton.sizes.hidden, runtime.dtype

    def draw(*shape: int) -> torch.Tensor:
        return (size * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    def bridge() -> Bridge:
        into = None if rank is None else draw(rank, hidden)
        return Bridge(into, draw(hidden, hidden if rank is None else rank), draw(hidden))

    updates = {}
    for layer in range(runtime.layers):
        number = 0
        while (sizes := runtime.skeleton.quantizer.group_sizes(layer, number)) is not None:
            updates[layer, number] = Update(draw(2, sizes[1]), draw(sizes[0], 2))
            number += 1
    return Trained({run: bridge() for run in path.runs(runtime.layers)}, updates)


def learnt(runtime: Runtime, path: DraftPath, **how: Any) -> DraftPath:
    """The path with random parts, which the runtime is told of."""
    name = f"random {how}"
    runtime.register_trained(name, random_trained(runtime, path, **how))
    return replace(path, trained=name)
