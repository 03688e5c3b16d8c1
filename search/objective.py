"""Objectives that score draft paths: predicted from a replay, or measured by decoding as in the paper."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import Controller, FixedK, make_controller
from selfspec.drafters import PlainDrafter, make_proposer_chain
from selfspec.llm.llm import LLM
from selfspec.measure.timing import method
from selfspec.profile.draft_spec import ProposerSpec
from selfspec.profile.schema import Prediction, Profile
from selfspec.proposers.base import ProposerChain
from selfspec.speculation.drafter import Drafter
from selfspec.text.prompt_template import Prompt
from selfspec.types.acceptance import PROBABILITY, AcceptanceCurve, PayoffModel
from selfspec.types.controller import ControllerSpec
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath, SkipSet, as_path
from selfspec.types.draft_work import DraftCall, Work
from selfspec.types.stats import Stats

from .continuations import DecodingSettings
from .fits import fit_curve
from .oracle import spared, with_lookup_tokens
from .replay import Replay
from .trace import LONGEST_DRAFT, Trace, controllers_in_play, long_enough, walk

SHARES = (0.25, 0.5, 1.0)  # of each text's starts (draft positions), replayed in turn until the path is pruned
RANKING_SHARE = 0.125  # of each text's starts, replayed to rank sub-layers by the gain of skipping one alone
LEARNT = 0.98  # share of the best speed from which a controller that decides by costs is chosen: it adapts to texts
ERRORS = 0.5  # standard errors by which a path must be worse than the best path to be pruned
WITH_CANDIDATES = 3  # controllers that are also tried with several candidates for each position
ALONE = 2  # draft length when sub-layers are skipped one at a time to find the gain of each
DINKELBACH, RATE_KNOWN = 8, 1e-3  # the most iterations, and the change of the rate below which they end


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a draft path with the best controller for it.

    `tokens_per_second` excludes prefill if predicted from a replay, and includes prefill if decoding was timed.
    `speedup`: over plain decoding. `pruned`: whether the replay ended early, because the path was clearly worse than
    the best path. `candidates`: the largest number of candidate tokens for each position, the drafted token included.
    `acceptance`: the acceptance curve that the controller uses (None: it uses none). `proposers`: the sources of lookup
    tokens that a draft step checks. `spared`: the share of a draft step that lookup tokens save for each drafted token.
    """

    path: DraftPath
    tokens_per_second: float
    speedup: float
    acceptance_rate: float
    tokens_per_round: float
    controller: ControllerSpec
    pruned: bool = False
    candidates: int = 1
    acceptance: AcceptanceCurve | None = None
    proposers: tuple[ProposerSpec, ...] = ()
    spared: float = 0.0

    @property
    def skip(self) -> SkipSet:
        """The skip set."""
        return self.path.skip


class Objective(Protocol):
    """Scores draft paths."""

    def score(self, path: DraftPath) -> Score:
        """Return the score of a draft path; higher is better."""


class WallClockObjective:
    """The objective of Draft & Verify (2309.08168, section 3.2): tokens per second of decoding, prefill included.

    `controller` None: the adaptive threshold. `plain_llm`: the model that decodes plainly (None: `llm`). `on_prompt`
    receives the number of plain decodings done: a warm-up, then every prompt.
    """

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Prompt],
        decoding: DecodingSettings,
        controller: ControllerSpec | None,
        *,
        plain_llm: LLM | None = None,
        on_prompt: Callable[[int], None] = lambda done: None,
    ) -> None:
        self._llm, self._prompts, self._decoding = llm, prompts, decoding
        self._controller = controller or ControllerSpec(name="adaptive")
        plainly = plain_llm or llm
        parts = [decode_all(plainly, PlainDrafter(), [prompts[0]], decoding)]  # warm up
        for prompt in prompts:
            on_prompt(len(parts))
            parts.append(decode_all(plainly, PlainDrafter(), [prompt], decoding))
        on_prompt(len(parts))
        self._plain = Stats.total(parts[1:]).tokens_per_second

    def score(self, path: DraftPath | SkipSet) -> Score:
        """Decode every prompt with drafts along `path`, and return the score of `path`."""
        path = as_path(path)
        total = decode_all(self._llm, self._llm.layer_skip(path, self._controller), self._prompts, self._decoding)
        speed = total.tokens_per_second
        return Score(path, speed, speed / self._plain, total.acceptance_rate, total.tokens_per_round, self._controller)


def decode_all(llm: LLM, drafter: Drafter, prompts: Sequence[Prompt], decoding: DecodingSettings) -> Stats:
    """Decode every prompt with `drafter` and return the total statistics."""
    run = method(llm, drafter, decoding.timed())
    return Stats.total(map(run, prompts))


@dataclass(frozen=True, slots=True)
class _Plan:
    """A controller and the number of candidates to draft with; the fields are those of `Score`."""

    controller: Controller
    candidates: int = 1
    spared: float = 0.0


@dataclass(frozen=True, slots=True)
class _Value:
    """The statistics and the predicted seconds of every text under one plan."""

    plan: _Plan
    stats: tuple[Stats, ...]
    seconds: tuple[float, ...]

    @property
    def speed(self) -> float:
        """Tokens per second over all texts."""
        return sum(s.tokens for s in self.stats) / sum(self.seconds)


@dataclass(frozen=True, slots=True)
class _Incumbent:
    """The best path so far, and its value on all starts, which are the text positions where drafts begin.

    `traces`: the path's traces on a part of the starts, by that part's share, for each of `SHARES`.
    """

    path: DraftPath
    traces: dict[float, list[Trace]]
    value: _Value


class ReplayObjective:
    """The objective that predicts tokens per second from a replay, with the best of `controllers` for each path.

    A controller that decides by costs counts as the best from the share `LEARNT` of the highest speed on.

    `controllers` None: those of `controllers_in_play`, up to the longest draft that can pay off. The best few
    controllers are also tried with several candidates for each position. Controllers that need a payoff model get the
    payoff model fitted to the trace. A path is replayed on a share of the starts (positions that drafts begin at), then
    on larger shares. It is pruned when it is worse than the best path so far, text by text, by more than `ERRORS`
    standard errors of the mean difference. `candidates`: the largest number of candidate tokens for each position
    (None: as many as the replay supports). `proposers`: the sources of lookup tokens that draft steps check.
    """

    def __init__(
        self,
        replay: Replay,
        costs: CostModel,
        controllers: Sequence[Controller] | None = None,
        *,
        candidates: int | None = None,
        proposers: Sequence[ProposerSpec] = (),
    ) -> None:
        self._replay, self._costs = replay, costs
        self._proposers, self._ahead = tuple(proposers), make_proposer_chain(proposers, costs.wider, replay.vocabulary)
        self._candidates = replay.candidates if candidates is None else candidates
        self._controllers = controllers
        self._best: _Incumbent | None = None

    def score(self, path: DraftPath | SkipSet) -> Score:
        """Replay a path on growing shares of the starts, until it is pruned or complete, and return its score."""
        path = as_path(path)
        controllers, best = self._in_play(self._draft(path)), self._best
        drafted: list[Trace] = []
        parts: dict[float, list[Trace]] = {}
        for share in SHARES:
            drafted = self._replay.trace(path, controllers, share=share, known=drafted)
            parts[share] = traces = self._with_lookup_tokens(path, drafted)
            if share < 1 and best is not None:
                value = self._value(path, traces, controllers)
                incumbent_value = self._evaluate(best.value.plan, best.traces[share], self._prices(best.path))
                if _clearly_worse(value, incumbent_value):
                    return self._as_score(
                        path, value, best.value.speed * value.speed / incumbent_value.speed, pruned=True
                    )
        value = self._value(path, traces, controllers)
        if best is None or value.speed > best.value.speed:
            self._best = _Incumbent(path, parts, value)
        return self._as_score(path, value, value.speed, pruned=False)

    def _with_lookup_tokens(self, path: DraftPath, traces: Sequence[Trace]) -> list[Trace]:
        """Return the traces along a path with the lookup tokens of the objective's proposers added."""
        prices = (1.0, *self._costs.along(path).wider)
        return with_lookup_tokens(self._replay, traces, ProposerChain(self._ahead.proposers, prices))

    def _in_play(self, draft: float) -> Sequence[Controller]:
        """Return the controllers to try if a draft step takes `draft` seconds."""
        if self._controllers is not None:
            return self._controllers
        most = min(LONGEST_DRAFT, self._replay.depth)
        return controllers_in_play(long_enough(self._costs, draft, most))

    def head_share_reaches(self, share: float, path: DraftPath) -> bool:
        """Return whether the head over the whole vocabulary takes at least `share` of a draft step."""
        step_seconds = self._draft(path)
        return step_seconds - self._costs.draft(path, self._replay.layers, vocabulary=0.0) >= share * step_seconds

    def score_with(self, path: DraftPath, heads: Sequence[tuple[int, ...]]) -> Score | None:
        """Score a path on all starts with the best of the draft vocabularies `heads` (token ids).

        The vocabulary is chosen on the first of `SHARES` of the starts. Returns None if the whole vocabulary is at
        least as fast on that share.
        """
        best: tuple[float, DraftPath, list[Trace]] | None = None
        for tokens in (None, *heads):
            tried = replace(path, vocabulary=tokens)
            controllers = self._in_play(self._draft(tried))
            traces = self._replay.trace(tried, controllers, share=SHARES[0])
            speed = self._value(tried, self._with_lookup_tokens(tried, traces), controllers).speed
            if best is None or speed > best[0]:
                best = speed, tried, traces
        assert best is not None
        _, tried, traces = best
        if tried.vocabulary is None:
            return None
        controllers = self._in_play(self._draft(tried))
        value = self._value(
            tried, self._with_lookup_tokens(tried, self._replay.trace(tried, controllers, known=traces)), controllers
        )
        return self._as_score(tried, value, value.speed, pruned=False)

    def gain(self, path: DraftPath | SkipSet, *, share: float = RANKING_SHARE) -> float:
        """Return the speedup over plain decoding of always drafting `ALONE` tokens, on a `share` of the starts.

        The draft length is fixed, because the best controller would hardly draft along poor paths, and the speedups of
        poor paths would be equal.
        """
        controller = FixedK(min(ALONE, self._replay.depth))
        traces = self._replay.trace(path, [controller], share=share)
        return self._evaluate(_Plan(controller), traces, self._prices(as_path(path))).speed * self._costs.plain

    def _draft(self, path: DraftPath) -> float:
        return self._costs.draft(path, self._replay.layers, vocabulary=path.share(self._replay.vocabulary))

    def _prices(self, path: DraftPath) -> dict[DraftCall, float]:
        """Return the seconds of one call of each kind of draft work along a path."""
        return self._costs.along(path).call_costs(self._draft(path))

    def _value(self, path: DraftPath, traces: Sequence[Trace], controllers: Sequence[Controller]) -> _Value:
        prices = self._prices(path)
        without = spared(traces, self._costs.along(path))

        def best(plans: Iterable[_Plan], count: int = 1) -> list[_Value]:
            values = [self._evaluate(plan, traces, prices) for plan in plans]
            return sorted(values, key=lambda value: value.speed, reverse=True)[:count]

        plan_values: list[_Value] = []
        asking = [c for c in controllers if c.asks_payoff]
        if others := [c for c in controllers if not c.asks_payoff]:
            plan_values = best(map(_Plan, others), WITH_CANDIDATES)
            counts = range(2, self._candidates + 1)
            plan_values += best(_Plan(value.plan.controller, n) for value in plan_values for n in counts)
        if asking:
            curve = fit_curve(traces, self._candidates)
            words = path.share(self._replay.vocabulary)
            payoff = PayoffModel.from_costs(
                self._costs, path, self._replay.layers, curve, vocabulary=words, spared=without
            )
            plan_values += [self._at_its_rate(controller, payoff, traces, prices) for controller in asking]
        chosen = max(plan_values, key=lambda value: value.speed * (1 if value.plan.controller.asks_payoff else LEARNT))
        return replace(chosen, plan=replace(chosen.plan, spared=without))

    def _at_its_rate(
        self, controller: Controller, payoff: PayoffModel, traces: Sequence[Trace], prices: Mapping[DraftCall, float]
    ) -> _Value:
        """Return the value of a rate-optimal controller at the token rate that it attains itself (Dinkelbach 1967)."""
        best: _Value | None = None
        rate = 1.0
        for _ in range(DINKELBACH):
            plan = _Plan(controller.with_payoff(payoff, rate=rate), self._candidates)
            value = self._evaluate(plan, traces, prices)
            best = value if best is None or value.speed > best.speed else best
            before, rate = rate, max(1.0, value.speed * self._costs.plain)
            if abs(rate - before) < RATE_KNOWN:
                break
        assert best is not None
        return best

    def _evaluate(self, plan: _Plan, traces: Sequence[Trace], prices: Mapping[DraftCall, float]) -> _Value:
        walks = walk(traces, plan.controller, candidates=plan.candidates, seeded=self._replay.seeded)
        seconds = tuple(self._costs.seconds(w.rounds, prices) for w in walks)
        return _Value(plan, tuple(w.stats for w in walks), seconds)

    def _as_score(self, path: DraftPath, value: _Value, speed: float, *, pruned: bool) -> Score:
        total = Stats.total(value.stats)
        controller = value.plan.controller
        payoff = controller.learnt()
        return Score(
            path,
            speed,
            speed * self._costs.baseline,
            total.acceptance_rate,
            total.tokens_per_round,
            controller.spec(),
            pruned,
            candidates=value.plan.candidates,
            acceptance=None if payoff is None else payoff.curve,
            proposers=self._proposers,
            spared=round(value.plan.spared, 4),
        )


def predict(replay: Replay, profile: Profile, *, trained: str | None = None) -> Prediction:
    """Predict the result of decoding the replay's texts with a profile, prefill included as in a measurement.

    If the replay's drafts have a separate KV cache (`own_keys`), the draft model also prefills the prompts; this takes
    the target's prefill time, times a draft step over a plain decoding step. `trained`: the name of the path's trained
    module in the replay's runtime (None: none). Raises `SelfspecError` for a profile without costs.
    """
    costs = profile.costs
    if costs is None:
        raise SelfspecError("a prediction needs a profile with costs")
    costs = costs.along(profile.path)
    described = profile.layer_skip
    controller = make_controller(described.controller, profile.payoff)
    replay.confidence = described.confidence or PROBABILITY
    traces = replay.trace(replace(profile.path, trained=trained), [controller])
    traces = with_lookup_tokens(
        replay, traces, make_proposer_chain(profile.local_proposers(described), costs.wider, replay.vocabulary)
    )
    walks = walk(traces, controller, candidates=described.candidates, seeded=replay.seeded)
    total = Stats.total(done.stats for done in walks)
    rounds = sum((done.rounds for done in walks), Counter[tuple[Work, int]]())
    prefill = costs.prefill * sum(text.prompt_length for text in replay.texts)
    draft = costs.draft(profile.path, replay.layers, vocabulary=profile.draft_share)
    seconds = prefill + costs.seconds(rounds, costs.call_costs(draft))
    if replay.own_keys:
        seconds += prefill * draft / costs.plain
    return Prediction(
        speedup=round((prefill + total.tokens * costs.baseline) / seconds, 3),
        tokens_per_second=round(total.tokens / seconds, 1),
        acceptance_rate=round(total.acceptance_rate, 3),
        tokens_per_round=round(total.tokens_per_round, 3),
        draft_cost=round(draft / costs.plain, 3),
    )


def _clearly_worse(mine: _Value, theirs: _Value) -> bool:
    differences = [
        a.tokens / s - b.tokens / t
        for a, s, b, t in zip(mine.stats, mine.seconds, theirs.stats, theirs.seconds, strict=True)
    ]
    if len(differences) < 3:
        return False
    mean = statistics.mean(differences)
    return mean < -ERRORS * statistics.stdev(differences) / math.sqrt(len(differences)) and mine.speed < theirs.speed
