"""Statistics of a generation: counts and seconds. Does not import torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from selfspec.types.draft_work import NO_WORK, DraftCall, Work

Finish = Literal["end", "stop", "guide", "length", "time"]
"""Why a text ended: end of sequence, a stop string, a completed guide, the token limit, or `max_time`."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round: draft length, accepted tokens, emitted tokens, and seconds.

    `seconds`: the time since the previous round's end; in the first round, the prefill is included. `nodes`: drafted
    tokens that were verified, all candidates of each position counted.

    The draft, with fields as in `drafts.Draft`: `proposed` tokens with their `parents` (-1: the last token emitted
    before), the `confidence` in the first nodes, and `path`, the accepted nodes. `probabilities`: the target's
    probability of each emitted token, if requested. `events.token_events` derives each token's origin. `work`: the
    calls that made the draft; `sources`: the name of each drafted token's source, empty where unknown.
    """

    drafted: int
    accepted: int
    tokens: int
    seconds: float
    nodes: int = 0
    proposed: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    path: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()
    work: Work = NO_WORK
    sources: tuple[str, ...] = ()


@dataclass(slots=True)
class Counts:
    """Counts of decoding: `rounds`, emitted `tokens`, and tokens `drafted`, of which `accepted` were emitted."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Stats(Counts):
    """Counts of one generation, updated by the decode loop in each round.

    `drafted` counts tokens drafted one after the other, `nodes` the drafted tokens that were verified, all candidates
    of each position counted, `accepted` the drafted tokens that were emitted, `tokens` all emitted tokens. `seconds` is
    wall time, prefill included; `drafting`: the seconds of drafting, if a benchmark measured them. `work`: the number
    of calls of each kind in drafting; `sources`: accepted tokens by source, as far as known. `prompt`: prompt tokens,
    of which `num_cached` were not prefilled because their keys and values were cached already. `finish`: why the
    generation ended; None while it goes on, and if it was interrupted. `log`: the rounds of one generation.
    """

    nodes: int = 0
    seconds: float = 0.0
    log: list[Round] = field(default_factory=list, repr=False)
    work: Counter[DraftCall] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    prompt: int = 0
    num_cached: int = 0
    finish: Finish | None = None
    drafting: float = 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens divided by `drafted`, the tokens drafted one after the other; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Acceptance length: emitted tokens per target pass; 1 for plain decoding."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """The share of all emitted tokens by source; tokens without a source came from the target."""
        return {source: tokens / self.tokens for source, tokens in self.sources.most_common()}

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of wall time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, other: Stats) -> None:
        """Add the counts and seconds of another generation; its log and finish are not added."""
        for name in ("rounds", "drafted", "nodes", "accepted", "tokens", "seconds", "drafting", "prompt", "num_cached"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.work.update(other.work)
        self.sources.update(other.sources)

    @classmethod
    def total(cls, parts: Iterable[Stats]) -> Stats:
        """Return the summed statistics of several generations, without their logs and finish."""
        total = cls()
        for part in parts:
            total.add(part)
        return total

    def as_dict(self) -> dict[str, Any]:
        """Return the main counts and rates, the work, the sources and `finish`, ready for JSON."""
        names = ("rounds", "drafted", "nodes", "accepted", "acceptance_rate", "tokens_per_round")
        figures = {name: getattr(self, name) for name in (*names, "seconds", "tokens_per_second")}
        work = {str(part): calls for part, calls in self.work.items()}
        sources = dict(self.sources.most_common())
        return {**figures, "work": work, "sources": sources, "finish": self.finish}


def acceptance_by_position(rounds: Sequence[Round]) -> list[float]:
    """Return the acceptance rate of draft positions 1, 2, ..: the share accepted of all drafts at least that long.

    An accepted token counts only if it was emitted.
    """
    deepest = max((done.drafted for done in rounds), default=0)
    shares = []
    for place in range(1, deepest + 1):
        drafted = [done for done in rounds if done.drafted >= place]
        shares.append(sum(done.accepted >= place for done in drafted) / len(drafted))
    return shares
