"""Rounds on the device, each launched before the host has read the one before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from selfspec.runtime.base import Runtime
from selfspec.runtime.device_rounds import LENGTHS, Flight, RoundPlanner
from selfspec.speculation.drafter import Drafter, Limit
from selfspec.speculation.drafts import Outcome
from selfspec.speculation.sequence import SequenceState


class OverlappedRounds:
    """The rounds that an engine runs on the device, where runtime, drafter and the sequences' rules allow it.

    A round that was launched is discarded if another sequence joins, or an exception was raised: all that it changed
    was the device's state, which is then sent anew, and uncommitted slots. For a sequence that ended or left, its part
    of the round is discarded.
    """

    def __init__(self, runtime: Runtime, drafter: Drafter) -> None:
        self._runtime = runtime
        self._planner = drafter if isinstance(drafter, RoundPlanner) and not drafter.hidden else None
        self._flight: Flight | None = None

    def discard(self) -> None:
        """Discard the round that was launched and not read."""
        self._flight = None

    def step(self, limits: Mapping[SequenceState, Limit], *, ahead: bool) -> list[Outcome] | None:
        """Run one round of the sequences in `limits`; None: the round has to run on the host.

        The next round is launched before this one is read, with the sequences that this one does not surely end.
        `ahead` False: it is not, since a prompt's pass may come between; the time of that pass would count as the
        round's.
        """
        flight, self._flight = self._flight, None
        rounds, seqs = self._runtime.device_rounds, list(limits)
        if self._planner is None or rounds is None:
            return None
        if flight is None or not set(seqs) <= set(flight.seqs):
            flight = self._launch(seqs, None, drafts=any(limit.depth for limit in limits.values()))
        if flight is None:
            return None
        going = [seq for seq in seqs if seq.remaining > 1]
        following = self._launch(going, flight) if ahead and going else None
        outcomes = rounds.read(flight, seqs)
        if flight.plan.on_read is not None:
            flight.plan.on_read(len(flight.seqs))
        for seq, outcome in zip(seqs, outcomes, strict=True):
            self._planner.observe(seq, outcome)
        self._flight = following if any(seq.remaining for seq in seqs) else None
        return outcomes

    def _launch(self, seqs: Sequence[SequenceState], before: Flight | None, *, drafts: bool = True) -> Flight | None:
        """Launch a round after one that was launched and not read. `drafts`: whether any sequence may draft."""
        rounds = self._runtime.device_rounds
        assert self._planner is not None
        assert rounds is not None
        widest = rounds.widest(seqs)
        if widest < 0:
            return None
        limit = Limit(min(widest, LENGTHS[-1]) if drafts else 0, widest)
        plan = self._planner.plan_round(seqs, limit, ahead=before is not None)
        return None if plan is None else rounds.launch(seqs, plan, before)
