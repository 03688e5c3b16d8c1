"""The memory that a drafter takes in addition to the target model."""

from __future__ import annotations

from selfspec.drafters import CrossVocabularyDrafter, Guard, LayerSkipDrafter, MergedDrafter, ModelDrafter, Router
from selfspec.drafters.head_drafter import HeadDrafter
from selfspec.models.layout import weight_bytes
from selfspec.runtime.base import Runtime
from selfspec.speculation.drafter import Drafter


def extra_drafter_bytes(drafter: Drafter, runtime: Runtime) -> int:
    """Return the bytes that a drafter takes: quantised weights, draft heads, and a draft model with its KV cache.

    `runtime`: the target's runtime. Of a `Router`, the drafter that takes the most memory counts.
    """
    match drafter:
        case Guard():
            return extra_drafter_bytes(drafter.drafter, runtime)
        case Router():
            return max(extra_drafter_bytes(route.drafter, runtime) for route in drafter.routes)
        case MergedDrafter():
            return sum(extra_drafter_bytes(member, runtime) for member in drafter.drafters)
        case ModelDrafter() | CrossVocabularyDrafter():
            own = drafter.runtime
            return weight_bytes(own.model) + own.cache.bytes + own.extra_bytes(drafter.path)
        case LayerSkipDrafter():
            head = 0 if drafter.below is None else drafter.below.texts.head.bytes
            return runtime.extra_bytes(drafter.path) + head
        case HeadDrafter():
            return drafter.texts.head.bytes
    return 0
