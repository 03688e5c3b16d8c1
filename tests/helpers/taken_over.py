"""A batch in which a text takes a row that held draft trees, and the prefix of the text in another row."""

from __future__ import annotations

import random

from models import plain

from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter
from selfspec.engine.engine import Engine
from selfspec.runtime.base import Runtime
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_path import SkipSet


def decoded(alone: Runtime, seed: int, *, vocabulary: int) -> tuple[list[SequenceState], list[list[int]]]:
    """Three texts of which the last takes over the second's row and the first's prefix, and what each is alone."""
    runtime = alone.with_new_cache(rows=2)
    long = random.Random(seed).choices(range(3, vocabulary), k=24)
    texts = [(long, 40), ([*long[2::-1], 4], 14), (long, 16)]
    skip = SkipSet((), (alone.layers - 1,))
    drafter = LayerSkipDrafter(runtime, skip, FixedK(4), candidates=3 if runtime.trees else 1)
    seqs = [SequenceState(list(prompt), room, Sampler()) for prompt, room in texts]
    with Engine(runtime, drafter, reuse=True) as engine:
        engine.join(seqs[0])
        engine.join(seqs[1])
        while seqs[1] in engine.running:
            engine.step()
        engine.join(seqs[2])
        while engine.running:
            engine.step()
    return seqs, [[*prompt, *plain(alone, list(prompt), room)] for prompt, room in texts]
