"""What a generation cost and what speculation gave: counts and seconds. Knows nothing of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from selfspec.types.draft_work import NO_WORK, DraftCall, Work

Finish = Literal["end", "stop", "guide", "length", "time"]
"""Why a text ended: the model's end of sequence, a stop string, a guide that is complete, the token limit, `max_time`.
"""


@dataclass(frozen=True, slots=True)
class Round:
    """One round: tokens drafted one after the other, how many drafted ones were emitted, all emitted, and seconds.

    The seconds are those since the round before; the first round's hold the prompt's pass. `nodes`: drafted
    tokens that were verified, all candidates of each place counted.

    What was drafted, as `drafts.Draft` has it: `proposed` tokens, each below its `parents` (-1: the last token emitted
    before), the `confidence` in the first of them; and `path`, those that were accepted. `probabilities`: the model's
    own of each emitted token, where asked for. `events.token_events` makes of it where each token came from. `work`:
    what making the draft took; `sources`: what came up with each drafted token, by name, none where it is not told.
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
class Stats:
    """Counts of one generation, filled by the loop round by round.

    `drafted` counts tokens drafted one after the other, `nodes` the drafted tokens that were verified, all candidates
    of each place counted, `accepted` the drafted tokens that were emitted, `tokens` all that was emitted. `seconds` is
    wall time, prefill included; `drafting`: those of proposing, where a benchmark timed it. `work`: how often each part
    of drafting was called; `sources`: of the accepted tokens, how many each source came up with, as far as it is told.
    `prompt`: tokens that came before, of which `kept` were not read again, as a conversation's cache held their keys.
    `finish`: why the text ended, of one generation; None while it goes on, and where it was broken off. `log`: round by
    round, of one generation.
    """

    rounds: int = 0
    drafted: int = 0
    nodes: int = 0
    accepted: int = 0
    tokens: int = 0
    seconds: float = 0.0
    log: list[Round] = field(default_factory=list, repr=False)
    work: Counter[DraftCall] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    prompt: int = 0
    kept: int = 0
    finish: Finish | None = None
    drafting: float = 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens per draft step; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens per full pass; 1 for plain decoding."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """The share of all emitted tokens that each source came up with; the others are the model's own."""
        return {source: tokens / self.tokens for source, tokens in self.sources.most_common()}

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of wall time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, other: Stats) -> None:
        """Add the counts and seconds of another generation to these; not its log, and not why it ended."""
        for name in ("rounds", "drafted", "nodes", "accepted", "tokens", "seconds", "drafting", "prompt", "kept"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.work.update(other.work)
        self.sources.update(other.sources)

    @classmethod
    def total(cls, parts: Iterable[Stats]) -> Stats:
        """Several generations added up."""
        total = cls()
        for part in parts:
            total.add(part)
        return total

    def as_dict(self) -> dict[str, Any]:
        """Everything, rates included, ready for JSON."""
        names = ("rounds", "drafted", "nodes", "accepted", "acceptance_rate", "tokens_per_round")
        figures = {name: getattr(self, name) for name in (*names, "seconds", "tokens_per_second")}
        work = {str(part): calls for part, calls in self.work.items()}
        sources = dict(self.sources.most_common())
        return {**figures, "work": work, "sources": sources, "finish": self.finish}


def acceptance_by_position(rounds: Sequence[Round]) -> list[float]:
    """For the first, second, ... token of a draft: the share that was emitted, of the drafts that had one."""
    deepest = max((done.drafted for done in rounds), default=0)
    shares = []
    for place in range(1, deepest + 1):
        drafted = [done for done in rounds if done.drafted >= place]
        shares.append(sum(done.accepted >= place for done in drafted) / len(drafted))
    return shares
