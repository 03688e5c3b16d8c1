"""The draft length that an engine should use, and the acceptance to expect from it.

Both come from a rehearsal of the engine's drafts. A draft path is replayed on its own keys, which an engine's draft
model has too; any other drafter decodes with a fixed draft length. Without a rehearsal both come from the profile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK
from selfspec.engine.loop import decode
from selfspec.export.draft_export import with_fixed_length
from selfspec.export.exporter import ExportPlan
from selfspec.llm.llm import LLM
from selfspec.profile.schema import Measurement, Prediction, Profile
from selfspec.search.continuations import DecodingSettings, continue_prompts
from selfspec.search.replay import Replay
from selfspec.search.trace import walk
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.acceptance import PayoffModel
from selfspec.types.draft_path import FULL, DraftPath
from selfspec.types.stats import Stats

MOST = 12  # longest draft length that is considered
UNKNOWN = 3  # draft length if nothing is known


@dataclass(frozen=True, slots=True)
class Expected:
    """Draft length, acceptance rate and acceptance length, and the source of the figures.

    `tokens`: the draft length; None if a controller decides. `acceptance`: the share of drafted tokens accepted.
    `per_pass`: tokens per target pass. Both are None if unknown.
    """

    tokens: int | None
    acceptance: float | None
    per_pass: float | None
    source: str

    @property
    def summary(self) -> str:
        """The figures as a sentence."""
        drafts = "drafts that a controller ends" if self.tokens is None else f"{self.tokens} tokens a draft"
        if self.acceptance is None or self.per_pass is None:
            return f"{drafts}; what is accepted is not known ({self.source})"
        return f"{drafts}, of which {self.acceptance:.1%} accepted, {self.per_pass:.2f} tokens a pass ({self.source})"


Texts = Sequence[Sequence[int]]
Counted = Callable[[int], Stats]


def expected_by_rehearsal(
    llm: LLM, profile: Profile, offer: ExportPlan, prompts: Texts, *, new: int, tokens: int | None = None
) -> Expected:
    """Return what a rehearsal measures, on greedy texts of `new` tokens after `prompts` (token ids).

    `tokens`: the draft length; by default the one with the most tokens in the time of a plain step. Raises
    `SelfspecError` if the drafter cannot be made.
    """
    most = min(offer.most, MOST) if tokens is None else tokens
    how = "decoded here with the drafter itself"
    if offer.itself:
        return _expectation(None, _decoded(llm, profile, prompts, new), how, prompts)
    if offer.draft is None and offer.path is None:
        counted, exact = _by_decoding(llm, profile, prompts, new, most)
    elif offer.draft is None:
        how = "replayed here along the path, on its own keys"
        counted = exact = _by_replay(llm, llm.model, offer.path or FULL, prompts, new, most)
    else:
        how = "replayed here by a model of the very weights that were written"
        counted = exact = _by_replay(llm, offer.draft(), FULL, prompts, new, most)
    payoff = _payoff(profile, offer.path)
    best = tokens or _best(counted, payoff, most)
    return _expectation(best, exact(best), how, prompts)


def _expectation(tokens: int | None, stats: Stats, how: str, prompts: Texts) -> Expected:
    texts = f"{len(prompts)} prompts, {stats.tokens} greedy tokens"
    return Expected(tokens, round(stats.acceptance_rate, 4), round(stats.tokens_per_round, 3), f"{how}: {texts}")


def _by_replay(llm: LLM, draft: Any, path: DraftPath, prompts: Texts, new: int, most: int) -> Counted:
    """Return a function from draft length k, up to `most`, to its statistics, from one replay of a model along a path.

    The texts are greedy, so the replay needs nothing of the target but their tokens.
    """
    texts = continue_prompts(llm, prompts, DecodingSettings(new))
    like = llm.runtime if draft is llm.model else None
    with Replay(draft, texts, depth=most, candidates=1, own_keys=True, base_runtime=like) as replay:
        traces = replay.trace(path, [FixedK(most)])
    return lambda k: Stats.total(result.stats for result in walk(traces, FixedK(k)))


def _by_decoding(llm: LLM, profile: Profile, prompts: Texts, new: int, most: int) -> tuple[Counted, Counted]:
    """Return two functions from draft length k to statistics: estimated from one run at `most`, and measured at k."""

    def exact(k: int) -> Stats:
        return _decoded(llm, with_fixed_length(profile, k), prompts, new)

    longest = _rounds(llm, with_fixed_length(profile, most), prompts, new)

    def about(k: int) -> Stats:
        accepted = sum(min(num_accepted, k) for _, num_accepted, _ in longest)
        drafted = sum(min(length, k) for length, _, _ in longest)
        return Stats(rounds=len(longest), drafted=drafted, accepted=accepted, tokens=len(longest) + accepted)

    return about, exact


def _rounds(llm: LLM, profile: Profile, prompts: Texts, new: int) -> list[tuple[int, int, int]]:
    """Decode with a profile's drafter; return each round's numbers of tokens drafted, accepted and emitted."""
    drafter = llm.drafter_for(profile)
    seqs = [SequenceState(list(prompt), new, Sampler(), llm.runtime.skeleton.ends) for prompt in prompts]
    rounds = (outcome for seq in seqs for outcome in decode(llm.runtime, drafter, seq))
    return [(len(result.draft), result.accepted, len(result.tokens)) for result in rounds]


def _decoded(llm: LLM, profile: Profile, prompts: Texts, new: int) -> Stats:
    """Decode with a profile's drafter; return the statistics."""
    rounds = _rounds(llm, profile, prompts, new)
    drafted, accepted, tokens = (sum(counts) for counts in zip(*rounds, strict=True))
    return Stats(rounds=len(rounds), drafted=drafted, accepted=accepted, tokens=tokens)


def _best(counted: Counted, payoff: PayoffModel, most: int) -> int:
    """Return the draft length with the most tokens in the time of a plain step."""
    return max(
        range(1, most + 1), key=lambda k: counted(k).tokens_per_round / (k * payoff.draft + payoff.rounds[k + 1])
    )


def _payoff(profile: Profile, path: DraftPath | None) -> PayoffModel:
    """Return the costs of drafting along a path, without lookup tokens, which would spare draft steps."""
    layers, costs = profile.model.layers, profile.costs
    if path is None or costs is None:
        return profile.path_only.payoff
    return PayoffModel.from_costs(costs, path, layers, profile.path_only.payoff.curve)


def expected_from_profile(profile: Profile, offer: ExportPlan, *, tokens: int | None = None) -> Expected:
    """Estimate from the profile's measurement, else its search's prediction; `source` says that it is an estimate."""
    known: list[Measurement | Prediction] = [*profile.measured, *([profile.predicted] if profile.predicted else [])]
    most = min(offer.most, MOST) if tokens is None else tokens
    source = "from what the profile was measured to accept" if profile.measured else "from what its search predicted"
    if not known:
        nothing = "the profile says nothing of it, nothing was replayed"
        return Expected(None if offer.itself else tokens or min(UNKNOWN, most), None, None, nothing)
    if offer.itself:
        return Expected(None, known[0].acceptance_rate, known[0].tokens_per_round, source)
    accepted, rate = known[0].tokens_per_round - 1, known[0].acceptance_rate
    chance, payoff = _chance(accepted, accepted / rate) if rate else 0.0, profile.path_only.payoff
    expected = {k: _chain(chance, k) for k in range(1, most + 1)}
    best = tokens or max(expected, key=lambda k: (1 + expected[k]) / (k * payoff.draft + payoff.rounds[k + 1]))
    aid_note = ", lookup tokens and candidates counted in" if _aided(profile) else ""
    shared = (
        ", on the model's own keys" if offer.path and (profile.search is None or profile.search.kv == "shared") else ""
    )
    return Expected(best, round(expected[best] / best, 4), round(1 + expected[best], 3), f"{source}{aid_note}{shared}")


def _aided(profile: Profile) -> bool:
    spec = profile.draft
    return bool(getattr(spec, "proposers", None)) or getattr(spec, "candidates", 1) > 1


def _chain(chance: float, k: int) -> float:
    """Return the expected tokens accepted of k; `chance`: acceptance probability after an accepted prefix."""
    return sum(chance**i for i in range(1, k + 1))


def _chance(accepted: float, drafted: float) -> float:
    """Return the acceptance probability of a token, by bisection, from mean tokens accepted and drafted per round."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        length = int(drafted)
        expected = _chain(middle, length) + (drafted - length) * middle ** (length + 1)
        low, high = (middle, high) if expected < accepted else (low, middle)
    return (low + high) / 2


def check_tokens(tokens: int | None, most: int) -> None:
    """Raise `SelfspecError` if the requested draft length exceeds the drafter's longest draft."""
    if tokens is not None and tokens > most:
        raise SelfspecError(f"--tokens {tokens}: this head drafts {most} in a row at most")
