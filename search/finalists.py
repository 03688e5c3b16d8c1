"""The best few of a search measured for real, and the profile of the one that measures best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import make_controller
from selfspec.drafters import PlainDrafter
from selfspec.llm.llm import LLM
from selfspec.measure.timing import interleave, measure, method
from selfspec.profile.draft import LayerSkipSpec
from selfspec.profile.schema import Measurement, Profile, SearchRecord
from selfspec.text.prompt import Prompt

from .continuations import Decoding
from .objective import Score, predict
from .replay import Replay

FINALISTS = 3
PACKAGES = ("selfspec", "torch", "transformers", "optuna", "scikit-optimize")


def finish(
    llm: LLM,
    base: Profile,
    scores: Sequence[Score],
    prompts: Sequence[Prompt],
    decoding: Decoding,
    held_out: bool,
    replay: Replay | None,
    keep_best: bool,
    on_stage: Callable[[str, int | None], None],
    smaller_heads: Callable[[Sequence[Score]], list[Score]] | None = None,
    laid_out_for_plain: Callable[[], LLM] | None = None,
) -> Profile:
    """Choose among the best few of `scores` by measuring them on `prompts`, and complete the profile `base`.

    The best of many noisy scores is biased, so the measured best wins, and is then measured once more, against plain
    decoding. An interrupted search's best is taken as it is, and so is that of a search for drafts with keys of their
    own, as no decoding here is such; an interrupt here ends the measuring. `smaller_heads`
    scores finalists again with draft vocabularies; the best of those joins them. `laid_out_for_plain` gives the same
    model with its weights laid out in memory as suits plain decoding. Raises `SelfspecError` when nothing was scored.
    """
    search = base.search
    assert search is not None
    ranked = {score.skip: score for score in sorted(scores, key=lambda s: s.tokens_per_second) if not score.pruned}
    finalists = list(ranked.values())[::-1][:FINALISTS]
    if not finalists:
        raise SelfspecError("no skip set could be scored: every one proposed costs more than max_draft_cost allows")
    measured: Measurement | None = None
    best = finalists[0]
    try:
        if not search.interrupted and search.kv == "shared":
            smaller = smaller_heads(finalists) if smaller_heads is not None else []
            finalists += sorted(smaller, key=lambda s: s.tokens_per_second)[-1:]
            on_stage("measuring the best few on held-out prompts" if held_out else "measuring the best few", None)
            best = _best(llm, base, finalists, prompts, decoding)
            drafter = llm.drafts_with(drafting_as(base, best))
            plain_llm = laid_out_for_plain() if laid_out_for_plain is not None else None
            measured = measure(llm, drafter, prompts, decoding.options(), held_out=held_out, plain_llm=plain_llm)
    except KeyboardInterrupt:
        search = search.model_copy(update={"interrupted": True})
    kept = keep_best or (best.speedup if measured is None else measured.speedup) > 1
    found = drafting_as(base, best) if kept else base
    predicted = predict(replay, found) if kept and replay is not None and base.costs is not None else None
    return found.model_copy(
        update={
            "search": search,
            "predicted": predicted,
            "measured": [measured] if kept and measured is not None else [],
            "versions": {name: version(name) for name in PACKAGES},
            "note": _note(best, measured, search, kept=kept),
        }
    )


def drafting_as(base: Profile, score: Score) -> Profile:
    """A profile that drafts as was scored, with every option of its controller written out."""
    draft = LayerSkipSpec.of(
        score.skip,
        make_controller(score.controller).spec(),
        candidates=score.candidates,
        vocabulary=score.vocabulary or None,
    )
    return base.model_copy(update={"draft": draft, "acceptance": score.acceptance})


def _best(llm: LLM, base: Profile, finalists: Sequence[Score], prompts: Sequence[Prompt], decoding: Decoding) -> Score:
    """The one that measures best, all interleaved with plain decoding."""
    methods = {
        str(i): method(llm, llm.drafts_with(drafting_as(base, score)), decoding.options())
        for i, score in enumerate(finalists)
    }
    runs = interleave({"plain": method(llm, PlainDrafter(), decoding.options()), **methods}, prompts, rounds=2)
    return finalists[max(range(len(finalists)), key=lambda i: runs.speedup(str(i), "plain")[0])]


def _note(best: Score, measured: Measurement | None, search: SearchRecord, *, kept: bool) -> str | None:
    attention, mlp = list(best.skip.attention), list(best.skip.mlp)
    found = f"the best set found (attention {attention}, mlp {mlp})"
    if search.kv == "own":
        ended = f"interrupted after {search.trials} trials; " if search.interrupted else ""
        if kept:
            return f"{ended}for a draft model with a cache of its own, whose speed is predicted, not measured"
        return (
            f"{ended}nothing is predicted to beat plain decoding: {found}, as a draft model with a cache of its own, "
            f"comes to {best.speedup:.3g} times its speed, so this profile skips nothing"
        )
    if measured is None:
        return f"interrupted after {search.trials} trials; not measured"
    if measured.speedup > 1:
        return None if measured.interval[0] > 1 else "not certain: the measured speedup's interval includes 1"
    if kept:
        return f"plain decoding was faster: this set ran at {measured.speedup} times its speed where it was measured"
    return (
        f"nothing beat plain decoding: {found} ran at {measured.speedup} times its speed, so this profile skips nothing"
    )
