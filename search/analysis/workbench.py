"""`Workbench`: the texts of one model, a replay of these texts and the cost model, for the notebooks' figures."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK
from selfspec.drafters import PlainDrafter
from selfspec.llm.llm import LLM
from selfspec.llm.prompt_encoding import encode, takes_messages
from selfspec.measure.timing import interleave, method
from selfspec.profile.schema import Profile
from selfspec.text.prompt_files import Prompts
from selfspec.text.prompt_template import Prompt
from selfspec.types.acceptance import PayoffModel
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath, HeadMode, SkipSet

from ..context import SearchContext
from ..continuations import DecodingSettings, choose
from ..finalists import profile_from_score
from ..fits import fit_curve
from ..ledger import Ledger
from ..objective import ReplayObjective, Score
from ..oracle import Bound, oracle_bound
from ..prepare import prepare_replay
from ..replay import Opened, Replay
from ..space import Space
from ..space_filter import Choices
from ..strategies import Problem
from ..trace import LONGEST_DRAFT, Trace, controllers_in_play, deepest


class Workbench(Opened):
    """Context manager that prepares a search, then scores and measures any skip set or draft path.

    `prompts`: calibration text, the result of `read_prompts`, or None for the built-in prompts; `count` of them are
    continued by `max_new_tokens` at `temperature`, and as many other prompts are kept in `held_out` for measuring.
    `rest`: the mode in which the head and the sub-layers that are not skipped draft. `costs` None: costs are measured.
    The attribute `problem` holds the gains of skipping single sub-layers. Raises the errors of `find_profile`.
    """

    costs: CostModel
    replay: Replay
    problem: Problem

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[str] | Prompts | None = None,
        *,
        count: int = 8,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
        costs: CostModel | None = None,
        rest: HeadMode = "full",
    ) -> None:
        self.llm = llm
        self.seed, self.rest = seed, rest
        self.decoding = DecodingSettings(max_new_tokens, temperature)
        self.decoding.check()
        chosen = choose(prompts, source="prompts", count=count, seed=seed, takes_messages=takes_messages(llm))
        self.prompts, self.held_out = (
            tuple(llm.check(encode(llm, prompt, chat=chosen.chat), max_new_tokens) for prompt in part)
            for part in (chosen.search, chosen.measure)
        )
        if not self.prompts:
            raise SelfspecError("prompts: none; expected at least one prompt")
        self.space = Space(llm.runtime.layers, modes=(rest, "skip"), head=(rest,))
        self.controllers = controllers_in_play(LONGEST_DRAFT)
        settings = {"model": llm.identity.model_dump(mode="json"), "keep": [], "granularity": "sublayer"}
        self.ledger = Ledger(settings=settings)
        self.ledger.keep_choices(Choices(modes=[*self.space.modes], head=[*self.space.head]))
        if costs is not None:
            self.ledger.keep_costs(costs)
        super().__init__()

    def _open(self) -> None:
        search = SearchContext(self.llm, self.space, self.decoding, self.prompts, self.seed, self.ledger)
        prepared = prepare_replay(search, self._resources)
        self.problem, self.costs, self.replay = prepared.problem, prepared.costs, prepared.replay

    @property
    def temperature(self) -> float:
        """The temperature of the texts and drafts."""
        return self.decoding.temperature

    def objective(self) -> ReplayObjective:
        """Return a new replay objective, which has no best path yet to compare with, so that it prunes no path."""
        return ReplayObjective(self.replay, self.costs, self.controllers)

    def path(self, path: DraftPath | SkipSet) -> DraftPath:
        """Return the draft path of a skip set, with all other sub-layers in mode `rest`; a draft path is unchanged."""
        return self.space.nearest(path) if isinstance(path, SkipSet) else path

    def score(self, path: DraftPath | SkipSet) -> Score:
        """Return the score of a skip set or a path with the best of `controllers`, on all of the texts."""
        return self.objective().score(self.path(path))

    def profile(self, score: Score) -> Profile:
        """Return a profile with the path, the controller and the candidates of `score`."""
        return profile_from_score(Profile(model=self.llm.identity, costs=self.costs), score, self.replay.confidence)

    def measure(
        self, profiles: Sequence[Profile], prompts: Sequence[Prompt], *, rounds: int
    ) -> list[tuple[float, float, float]]:
        """Return each profile's median speedup over plain decoding, and the ends of its 95% bootstrap interval.

        The runs of all profiles and of plain decoding are interleaved.
        """
        options = self.decoding.timed()
        methods = {str(i): method(self.llm, self.llm.drafter_for(p), options) for i, p in enumerate(profiles)}
        methods = {"plain": method(self.llm, PlainDrafter(), options), **methods}
        runs = interleave(methods, prompts, rounds=rounds)
        speedups = (runs.speedup(str(i), "plain") for i in range(len(profiles)))
        return [(speedup, low, high) for speedup, (low, high) in speedups]

    def traces(self, path: DraftPath | SkipSet) -> list[Trace]:
        """Return the traces of drafts along a path, as long as the longest draft of `controllers`."""
        return self.replay.trace(self.path(path), [FixedK(deepest(self.controllers))])

    def draft_cost(self, path: DraftPath | SkipSet) -> float:
        """Return the cost of a draft step as a share of a plain step."""
        return self.costs.draft_share(self.path(path), self.space.layers)

    def payoff(self, path: DraftPath | SkipSet) -> PayoffModel:
        """Return the payoff model of drafts along a path, for a rate-optimal controller."""
        curve = fit_curve(self.traces(path), self.replay.candidates)
        return PayoffModel.from_costs(self.costs, self.path(path), self.space.layers, curve)

    def bound(self, path: DraftPath | SkipSet) -> Bound:
        """Return the speedup of drafts along a path if every draft ended at the best position (`oracle_bound`)."""
        draft = self.costs.draft(self.path(path), self.space.layers)
        return oracle_bound(self.traces(path), self.costs, draft, candidates=self.replay.candidates)
