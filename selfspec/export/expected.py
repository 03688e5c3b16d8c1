"""The draft length that an engine should use, and the acceptance to expect at that length.

Both are measured by a rehearsal, a test run of the engine's drafts. To rehearse a draft path, drafts along the path are
replayed with a separate KV cache, as the engine's draft model has one, too; any other drafter decodes with a fixed
draft length. Without a rehearsal both are estimated from the profile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK
from selfspec.engine.engine import decode
from selfspec.export.exporter import ExportPlan, with_fixed_length
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

MOST = 12  # longest draft length, in tokens, that is considered
UNKNOWN = 3  # draft length, in tokens, if the acceptance is unknown


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected draft length, acceptance rate and acceptance length.

    `tokens`: the draft length; None if a controller decides when a draft stops. `acceptance`: the share of drafted
    tokens that are accepted; None if unknown. `per_pass`: tokens per target pass; None if unknown. `source`: a text
    that tells where the figures come from.
    """

    tokens: int | None
    acceptance: float | None
    per_pass: float | None
    source: str

    @property
    def summary(self) -> str:
        """The figures and their source in one line of text."""
        drafts = "drafts ended by a controller" if self.tokens is None else f"{self.tokens} tokens a draft"
        if self.acceptance is None or self.per_pass is None:
            return f"{drafts}; the acceptance is unknown ({self.source})"
        return f"{drafts}, of which {self.acceptance:.1%} accepted, {self.per_pass:.2f} tokens a pass ({self.source})"


Texts = Sequence[Sequence[int]]
Counted = Callable[[int], Stats]


def expected_by_rehearsal(
    llm: LLM, profile: Profile, offer: ExportPlan, prompts: Texts, *, new: int, tokens: int | None = None
) -> Expected:
    """Return the draft length and the acceptance measured by a rehearsal, a test run of the engine's drafts.

    The rehearsal uses greedy texts of `new` tokens after each of `prompts` (token ids). `tokens`: the draft length
    (None: the length that yields the most tokens per unit of time). Raises `SelfspecError` if the drafter cannot be
    made.
    """
    most = min(offer.most, MOST) if tokens is None else tokens
    how = "decoded here with the profile's drafter"
    if offer.itself:
        return _expectation(None, _decoded(llm, profile, prompts, new), how, prompts)
    if offer.draft is None and offer.path is None:
        counted, exact = _by_decoding(llm, profile, prompts, new, most)
    elif offer.draft is None:
        how = "replayed here along the path, with a separate KV cache"
        counted = exact = _by_replay(llm, llm.model, offer.path or FULL, prompts, new, most)
    else:
        how = "replayed here by a model with the written weights"
        counted = exact = _by_replay(llm, offer.draft(), FULL, prompts, new, most)
    payoff = _payoff(profile, offer.path)
    best = tokens or _best(counted, payoff, most)
    return _expectation(best, exact(best), how, prompts)


def _expectation(tokens: int | None, stats: Stats, how: str, prompts: Texts) -> Expected:
    texts = f"{len(prompts)} prompts, {stats.tokens} greedy tokens"
    return Expected(tokens, round(stats.acceptance_rate, 4), round(stats.tokens_per_round, 3), f"{how}: {texts}")


def _by_replay(llm: LLM, draft: Any, path: DraftPath, prompts: Texts, new: int, most: int) -> Counted:
    """Return a function from draft length k, up to `most`, to the statistics of decoding with it.

    All statistics are computed from one replay, which drafts with the model `draft` along `path` from every position of
    the target's greedy texts.
    """
    texts = continue_prompts(llm, prompts, DecodingSettings(new))
    like = llm.runtime if draft is llm.model else None
    with Replay(draft, texts, depth=most, candidates=1, own_keys=True, base_runtime=like) as replay:
        traces = replay.trace(path, [FixedK(most)])
    return lambda k: Stats.total(result.stats for result in walk(traces, FixedK(k)))


def _by_decoding(llm: LLM, profile: Profile, prompts: Texts, new: int, most: int) -> tuple[Counted, Counted]:
    """Return two functions from draft length k to the statistics of decoding with the profile's drafter.

    The first function estimates them from one run with draft length `most`; the second function decodes with k.
    """

    def exact(k: int) -> Stats:
        return _decoded(llm, with_fixed_length(profile, k), prompts, new)

    longest = _rounds(llm, with_fixed_length(profile, most), prompts, new)

    def about(k: int) -> Stats:
        accepted = sum(min(num_accepted, k) for _, num_accepted, _ in longest)
        drafted = sum(min(length, k) for length, _, _ in longest)
        return Stats(rounds=len(longest), drafted=drafted, accepted=accepted, tokens=len(longest) + accepted)

    return about, exact


def _rounds(llm: LLM, profile: Profile, prompts: Texts, new: int) -> list[tuple[int, int, int]]:
    """Decode greedily with a profile's drafter; return (tokens drafted, accepted, emitted) of each round."""
    drafter = llm.drafter_for(profile)
    seqs = [SequenceState(list(prompt), new, Sampler(), llm.runtime.skeleton.ends) for prompt in prompts]
    rounds = (outcome for seq in seqs for outcome in decode(llm.runtime, drafter, seq))
    return [(len(result.draft), result.accepted, len(result.tokens)) for result in rounds]


def _decoded(llm: LLM, profile: Profile, prompts: Texts, new: int) -> Stats:
    """Decode greedily with a profile's drafter; return the sum of the statistics over all prompts."""
    rounds = _rounds(llm, profile, prompts, new)
    drafted, accepted, tokens = (sum(counts) for counts in zip(*rounds, strict=True))
    return Stats(rounds=len(rounds), drafted=drafted, accepted=accepted, tokens=tokens)


def _best(counted: Counted, payoff: PayoffModel, most: int) -> int:
    """Return the draft length, up to `most`, that yields the most tokens per unit of time by the costs in `payoff`."""
    return max(
        range(1, most + 1), key=lambda k: counted(k).tokens_per_round / (k * payoff.draft + payoff.rounds[k + 1])
    )


def _payoff(profile: Profile, path: DraftPath | None) -> PayoffModel:
    """Return the costs and acceptance curve of drafting along `path` without lookup tokens.

    Without a path, or without costs in the profile, they are those of the profile's drafts.
    """
    layers, costs = profile.model.layers, profile.costs
    if path is None or costs is None:
        return profile.path_only.payoff
    return PayoffModel.from_costs(costs, path, layers, profile.path_only.payoff.curve)


def expected_from_profile(profile: Profile, offer: ExportPlan, *, tokens: int | None = None) -> Expected:
    """Return the draft length and the acceptance by the profile's measurement, else by its search's prediction.

    `tokens`: the draft length (None: the length that yields the most tokens per unit of time).
    """
    known: list[Measurement | Prediction] = [*profile.measured, *([profile.predicted] if profile.predicted else [])]
    most = min(offer.most, MOST) if tokens is None else tokens
    source = "from the profile's measurement" if profile.measured else "from the prediction of the profile's search"
    if not known:
        nothing = "the profile holds no measurement or prediction, and nothing was rehearsed"
        return Expected(None if offer.itself else tokens or min(UNKNOWN, most), None, None, nothing)
    if offer.itself:
        return Expected(None, known[0].acceptance_rate, known[0].tokens_per_round, source)
    accepted, rate = known[0].tokens_per_round - 1, known[0].acceptance_rate
    chance, payoff = _chance(accepted, accepted / rate) if rate else 0.0, profile.path_only.payoff
    expected = {k: _chain(chance, k) for k in range(1, most + 1)}
    best = tokens or max(expected, key=lambda k: (1 + expected[k]) / (k * payoff.draft + payoff.rounds[k + 1]))
    aid_note = ", which includes lookup tokens and candidates" if _aided(profile) else ""
    shared = (
        ", on the model's KV cache" if offer.path and (profile.search is None or profile.search.kv == "shared") else ""
    )
    return Expected(best, round(expected[best] / best, 4), round(1 + expected[best], 3), f"{source}{aid_note}{shared}")


def _aided(profile: Profile) -> bool:
    spec = profile.draft
    return bool(getattr(spec, "proposers", None)) or getattr(spec, "candidates", 1) > 1


def _chain(chance: float, k: int) -> float:
    """Return the expected number of accepted tokens in a draft of `k` tokens.

    `chance`: the probability that a token is accepted if all tokens before it in the draft are accepted.
    """
    return sum(chance**i for i in range(1, k + 1))


def _chance(accepted: float, drafted: float) -> float:
    """Return the probability that a token is accepted if all tokens before it are, found by bisection.

    `accepted` and `drafted`: the mean numbers of tokens accepted and drafted per round.
    """
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
        raise SelfspecError(f"--tokens {tokens}: this head drafts {most} tokens at most")
