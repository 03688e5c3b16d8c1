"""Drafters of sequences that are decoded together: what they draft is decided for all at once."""

from __future__ import annotations

from collections.abc import Iterator

from selfspec.controllers import BatchDraftScheduler
from selfspec.drafters.adaptive_path import ChosenDrafter
from selfspec.drafters.autoregressive import ChainDrafter
from selfspec.drafters.controlled import PlayedDrafter
from selfspec.drafters.cross_vocabulary import TranslatedDrafter
from selfspec.drafters.guard import Guard
from selfspec.drafters.layer_skip import LayerSkipDrafter
from selfspec.drafters.router import Router
from selfspec.drafters.tree_merge import MergedDrafter
from selfspec.runtime.forward import Runtime
from selfspec.speculation.drafter import Drafter


def decide_together(drafter: Drafter, load: BatchDraftScheduler | None) -> None:
    """Let a drafter, or those that it is made of, draft as the load says; None: each sequence's controller alone.

    Drafters that no controller plays are left as they are, and guards go by the clock with seeds, too.
    """
    for one in _inside(drafter):
        if isinstance(one, Guard):
            one.bound_together(load is not None)
        elif isinstance(one, PlayedDrafter):
            one.load = load


def chain_of(drafter: Drafter) -> ChainDrafter | None:
    """The first that drafts token by token, by what the prices of draft steps are."""
    return next((one for one in _inside(drafter) if isinstance(one, ChainDrafter)), None)


def runtime_of(drafter: Drafter) -> Runtime | None:
    """The runtime that draft steps are run on: the model's own, or a draft model's."""
    return next((one.runtime for one in _inside(drafter) if isinstance(one, LayerSkipDrafter)), None)


def reads_blocks(drafter: Drafter) -> bool:
    """Whether all that it runs of the model can read a cache in blocks: native passes alone."""
    for one in _inside(drafter):
        if isinstance(one, (ChosenDrafter, MergedDrafter, TranslatedDrafter)):
            return False
        if isinstance(one, LayerSkipDrafter) and not one.native:
            return False
    return True


def _inside(drafter: Drafter) -> Iterator[Drafter]:
    """The drafter, and those that it is made of."""
    yield drafter
    if isinstance(drafter, Router):
        for route in drafter.routes:
            yield from _inside(route.drafter)
    elif isinstance(drafter, Guard):
        yield from _inside(drafter.drafter)
