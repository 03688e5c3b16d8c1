"""One table of drafters for every conformance suite: each kind that a profile can name, and toys that are wider.

A suite runs all of `table` on a small model of its own, and what else only it has. `REPRESENTATIVES` stand for all
where a protocol is the loop's alone, and each drafter would run the same lines of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

from heads import random_head
from models import small
from stores import babble, stored
from toys import Adding, Doubled, EndsAt, HiddenHead, Lockstep, RandomTree, Staged
from trained import learnt

from selfspec.controllers import AdaptiveThreshold, FixedK, RateOptimal, StaticThreshold
from selfspec.drafters import (
    ClaspDrafter,
    CrossVocabularyDrafter,
    Drafter,
    Guard,
    InputDrafter,
    JacobiDrafter,
    LayerSkipDrafter,
    LookaheadDrafter,
    LookupDrafter,
    MergedDrafter,
    ModelDrafter,
    PlainDrafter,
    RecycleDrafter,
    Route,
    Router,
    SwiftDrafter,
)
from selfspec.drafters.head_drafter import HeadBelow, HeadDrafter
from selfspec.models.low_precision import fake
from selfspec.proposers.base import ProposerChain
from selfspec.proposers.lookup import Lookup
from selfspec.proposers.store import StoreProposer
from selfspec.runtime.base import Runtime
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.acceptance import Confidence, PayoffModel
from selfspec.types.draft_path import DraftPath, SkipSet

Make = Callable[[Runtime], Drafter]
BY_GAP = Confidence(bias=0.2, probability=0.4, gap=0.8)


def table(vocabulary: int, layers: int = 3) -> dict[str, Make]:
    """Return makers of drafters for models of `small(vocabulary, layers)`, by name; `KINDS` says which kinds they are.

    Paths skip and quantise sub-layers of the first two or three layers. `layers` is 2 or 3.
    """
    skip = SkipSet((1,), (0, 2) if layers > 2 else (0,))
    low = DraftPath(
        SkipSet((1,), (0,)), int8=SkipSet((0, 2), (1, 2)) if layers > 2 else SkipSet((0,), (1,)), head="int8"
    )
    to_train = DraftPath(SkipSet((1,), (1,)), int8=SkipSet((0,), (0,)), head="int8")
    words = tuple(range(vocabulary - 1))
    few_words = words[1:] if vocabulary < 5 else words[::2]
    proposals = ProposerChain([Lookup(), Adding(vocabulary, 0.3)], (1.0, 1.1, 1.15, 1.2))
    by_rate = partial(RateOptimal, floor=0.1, payoff=PayoffModel(0.2))
    store = partial(_store, vocabulary)

    def skipping(runtime: Runtime, path: DraftPath | SkipSet, controller, **options) -> LayerSkipDrafter:
        return LayerSkipDrafter(runtime, path, controller, **options)

    def below(kind: str, **options) -> Make:
        return lambda runtime: LayerSkipDrafter(
            runtime, low, FixedK(5), below=HeadBelow(random_head(runtime, words, kind), (1.0,) * 5, 0.01), **options
        )

    def head(kind: str, k: int, **options) -> Make:
        return lambda runtime: HeadDrafter(random_head(runtime, words, kind), FixedK(k), **options)

    def other_model(k: int, **options) -> Make:
        return lambda runtime: CrossVocabularyDrafter(
            runtime, _other(2 * vocabulary, 1, 9), Doubled(vocabulary), FixedK(k), **options
        )

    return {
        "plain": lambda runtime: PlainDrafter(),
        "random tree": lambda runtime: RandomTree(vocabulary, (3, 2, 1)),
        "hidden head": HiddenHead,
        "lockstep": Lockstep,
        "staged": lambda runtime: Staged(
            LeanRuntime(_model(vocabulary, 2, 3), rows=runtime.rows), RandomTree(vocabulary, (2, 1)), depth=3
        ),
        "draft model": lambda runtime: ModelDrafter(
            runtime, _other(vocabulary, 1, 3), StaticThreshold(0.2, 4), candidates=2
        ),
        "draft model in int8, lookup": lambda runtime: ModelDrafter(
            runtime,
            _other(vocabulary, 1, 3),
            FixedK(3),
            path=DraftPath.from_modes(["int8"] * 2, head="int8"),
            proposer_chain=proposals,
        ),
        "draft model of other tokens": other_model(2, candidates=2),
        "draft model of other tokens, lookup": other_model(4, proposer_chain=proposals),
        "same model": lambda runtime: ModelDrafter(runtime, runtime.with_new_cache(rows=runtime.rows), FixedK(3)),
        "skip, fixed": lambda runtime: skipping(runtime, skip, FixedK(3)),
        "skip, static": lambda runtime: skipping(runtime, skip, StaticThreshold(0.3, 5)),
        "skip, ended by a token": lambda runtime: skipping(runtime, skip, EndsAt(4, token=1), candidates=2),
        "skip, candidates": lambda runtime: skipping(runtime, skip, StaticThreshold(0.3, 4), candidates=3),
        "skip, draft vocabulary": lambda runtime: skipping(runtime, DraftPath(skip, few_words), FixedK(3)),
        "skip, adaptive": lambda runtime: skipping(runtime, skip, AdaptiveThreshold(k_max=6)),
        "skip, rate": lambda runtime: skipping(runtime, skip, by_rate(), candidates=4),
        "int8": lambda runtime: skipping(runtime, low, AdaptiveThreshold(k_max=6), confidence=BY_GAP),
        "int8, candidates": lambda runtime: skipping(runtime, low, by_rate(), candidates=4, confidence=BY_GAP),
        "trained path": lambda runtime: skipping(
            runtime, learnt(runtime, to_train), StaticThreshold(0.2, 5), candidates=2
        ),
        "guarded": lambda runtime: Guard(skipping(runtime, skip, FixedK(3), candidates=2), payoff=PayoffModel(0.1)),
        "lookup below": lambda runtime: skipping(runtime, skip, AdaptiveThreshold(k_max=6), proposer_chain=proposals),
        "lookup below, candidates": lambda runtime: skipping(
            runtime, low, StaticThreshold(0.3, 4), candidates=3, confidence=BY_GAP, proposer_chain=proposals
        ),
        "store below": lambda runtime: skipping(
            runtime, low, StaticThreshold(0.3, 4), candidates=3, proposer_chain=ProposerChain([store()], (1.0,) * 4)
        ),
        "lookup": lambda runtime: LookupDrafter([Lookup()], StaticThreshold(0.1, 5)),
        "lookup, ended by a token": lambda runtime: LookupDrafter([Lookup()], EndsAt(5, token=1)),
        "store": lambda runtime: LookupDrafter([Lookup(), store()], StaticThreshold(0.1, 5)),
        "recycle, ended by a token": lambda runtime: RecycleDrafter(EndsAt(5, token=1), candidates=3),
        "recycle": lambda runtime: RecycleDrafter(StaticThreshold(0.1, 5), candidates=3),
        "input": lambda runtime: InputDrafter(StaticThreshold(0.1, 5)),
        "jacobi": lambda runtime: JacobiDrafter("jacobi", start="padding"),
        "jacobi in blocks": lambda runtime: JacobiDrafter("gauss-seidel", block=4),
        "jacobi, hybrid": lambda runtime: JacobiDrafter("hybrid", block=3, parallel=7, start="prompt"),
        "lookahead": lambda runtime: LookaheadDrafter(window=3, ngram=3, guesses=2),
        "swift": lambda runtime: SwiftDrafter(runtime, StaticThreshold(0.1, 4), window=6, every=1, candidates=2),
        "clasp": lambda runtime: ClaspDrafter(runtime, FixedK(3), skip=layers - 1, every=1),
        "merged": lambda runtime: MergedDrafter(
            [
                LookupDrafter([Lookup()], StaticThreshold(0.1, 5)),
                skipping(runtime, low, by_rate(), candidates=3),
                HeadDrafter(random_head(runtime, words), FixedK(2), candidates=2),
            ]
        ),
        "merged, of two paths and trees": lambda runtime: MergedDrafter(
            [
                skipping(runtime, skip, FixedK(3)),
                MergedDrafter([RandomTree(vocabulary, (2, 1)), RecycleDrafter(StaticThreshold(0.1, 5), candidates=3)]),
                skipping(runtime, low, StaticThreshold(0.3, 4), candidates=2),
            ]
        ),
        "routes": lambda runtime: Router(
            [
                Route(skipping(runtime, skip, FixedK(3)), PayoffModel(0.2)),
                Route(LookupDrafter([Lookup()], StaticThreshold(0.1, 5)), PayoffModel(0.0)),
            ]
        ),
        "eagle": head("eagle", 4),
        "eagle, candidates": lambda runtime: HeadDrafter(
            random_head(runtime, words), StaticThreshold(0.05, 4), candidates=3, proposer_chain=proposals
        ),
        "eagle below": below("eagle", proposer_chain=proposals),
        "mtp below": below("mtp"),
        "medusa": head("medusa", 4, candidates=2),
        "hydra": head("hydra", 3),
        "mlp": head("mlp", 6),
        "mtp": head("mtp", 4),
        "chimera": head("chimera", 4),
    }


KINDS = {  # of drafts in a profile, each with the drafters of the table that are of it
    "plain": ("plain",),
    "layer-skip": ("skip, fixed", "skip, adaptive", "skip, rate", "int8", "trained path", "lookup below"),
    "lookup": ("lookup", "store"),
    "recycle": ("recycle",),
    "input": ("input",),
    "jacobi": ("jacobi", "jacobi in blocks", "jacobi, hybrid"),
    "lookahead": ("lookahead",),
    "swift": ("swift",),
    "clasp": ("clasp",),
    "head": ("eagle", "medusa", "hydra", "mlp", "mtp", "chimera"),
    "merged": ("merged", "merged, of two paths and trees"),
    "model": ("draft model", "draft model in int8, lookup", "draft model of other tokens"),
}
REPRESENTATIVES = (
    "plain",
    "random tree",
    "hidden head",
    "lockstep",
    "staged",
    "draft model of other tokens, lookup",
    "skip, adaptive",
    "int8, candidates",
    "guarded",
    "lookup below, candidates",
    "recycle",
    "jacobi, hybrid",
    "swift",
    "merged",
    "eagle below",
    "medusa",
)


@lru_cache
def _model(vocabulary: int, layers: int, seed: int):
    return small(vocabulary, layers, seed=seed)


def _other(vocabulary: int, layers: int, seed: int) -> Runtime:
    return LeanRuntime(_model(vocabulary, layers, seed), kernel=fake)


@lru_cache
def _store(vocabulary: int) -> StoreProposer:
    return stored(babble(vocabulary), vocabulary)
