"""Batch drafting policy: apply one scheduler to all drafters of a batch of sequences, and inspect the drafters."""

from __future__ import annotations

from collections.abc import Iterator

from selfspec.controllers import BatchDraftScheduler
from selfspec.drafters.adaptive_path import AdaptivePathDrafter
from selfspec.drafters.autoregressive import ChainDrafter
from selfspec.drafters.controlled import ControlledDrafter
from selfspec.drafters.draft_model import CrossVocabularyDrafter
from selfspec.drafters.guard import Guard
from selfspec.drafters.layer_skip import LayerSkipDrafter
from selfspec.drafters.router import Router
from selfspec.drafters.tree_merge import MergedDrafter
from selfspec.runtime.base import Runtime
from selfspec.speculation.drafter import Drafter


def bound_together(drafter: Drafter, together: bool = True) -> None:
    """Let the guards inside a drafter bound a batch as a whole, by the clock alone, or each sequence by itself."""
    for inner in _inside(drafter):
        if isinstance(inner, Guard):
            inner.bound_together(together)


def decide_together(drafter: Drafter, load: BatchDraftScheduler | None) -> None:
    """Let the scheduler `load` decide on the drafts of a drafter and of the drafters inside it.

    None: each sequence's controller decides. Drafters without a controller are unchanged. With a `load`, guards use
    measured times for all sequences of the batch, seeded sequences included.
    """
    bound_together(drafter, load is not None)
    for inner in _inside(drafter):
        if isinstance(inner, ControlledDrafter):
            inner.load = load


def teach(drafter: Drafter, on: bool) -> None:
    """Set whether proposers inside a drafter learn from its texts, as those of earlier answers do."""
    for inner in _inside(drafter):
        if isinstance(inner, ControlledDrafter):
            inner.teaches = on
        elif isinstance(inner, MergedDrafter):
            for member in inner.drafters:
                teach(member, on)


def chain_of(drafter: Drafter) -> ChainDrafter | None:
    """Return the first autoregressive drafter, whose draft passes the batch's cost model covers; None: not found."""
    return next((inner for inner in _inside(drafter) if isinstance(inner, ChainDrafter)), None)


def runtime_of(drafter: Drafter) -> Runtime | None:
    """Return the runtime that the first layer-skip drafter runs: the target's, or a `ModelDrafter`'s draft model.

    None if there is no such drafter.
    """
    return next((inner.runtime for inner in _inside(drafter) if isinstance(inner, LayerSkipDrafter)), None)


def reads_blocks(drafter: Drafter) -> bool:
    """Return whether every model pass of the drafter can read a paged cache, which only native passes can."""
    for inner in _inside(drafter):
        if isinstance(inner, (AdaptivePathDrafter, MergedDrafter, CrossVocabularyDrafter)):
            return False
        if isinstance(inner, LayerSkipDrafter) and not inner.native:
            return False
    return True


def int8_cache_runtimes(drafter: Drafter) -> list[Runtime]:
    """Return the runtimes along which the drafter runs native quantised passes, each once.

    If the cache of such a runtime is static, these passes read int8 copies of its keys and values.
    """
    members = [
        member
        for inner in _inside(drafter)
        for member in (inner.drafters if isinstance(inner, MergedDrafter) else (inner,))
    ]
    runtimes = [
        member.runtime
        for member in members
        if isinstance(member, LayerSkipDrafter) and member.native and member.path.low_precision
    ]
    return list({id(runtime): runtime for runtime in runtimes}.values())


def _inside(drafter: Drafter) -> Iterator[Drafter]:
    """Yield the drafter and the drafters inside routers and guards."""
    yield drafter
    if isinstance(drafter, Router):
        for route in drafter.routes:
            yield from _inside(route.drafter)
    elif isinstance(drafter, Guard):
        yield from _inside(drafter.drafter)
