"""Rounds on the device, each launched before the host has read the one before it."""

from __future__ import annotations

from collections.abc import Mapping

from selfspec.runtime.base import Runtime
from selfspec.runtime.device_rounds import Flight, RoundPlanner
from selfspec.speculation.drafter import Drafter, Limit
from selfspec.speculation.drafts import Outcome
from selfspec.speculation.sequence import SequenceState
from selfspec.types.limits import WIDEST_DRAFT


class OverlappedRounds:
    """The rounds that an engine runs on the device: of a single sequence, where runtime, drafter and rule allow it.

    A round that was launched is discarded if its sequence has ended, has to share the next round with others, or an
    exception was raised: all that it changed was the device's state, which is then sent anew, and uncommitted slots.
    """

    def __init__(self, runtime: Runtime, drafter: Drafter) -> None:
        self._runtime = runtime
        self._planner = drafter if isinstance(drafter, RoundPlanner) and not drafter.hidden else None
        self._flight: Flight | None = None

    def discard(self) -> None:
        """Discard the round that was launched and not read."""
        self._flight = None

    def step(self, limits: Mapping[SequenceState, Limit], *, ahead: bool) -> Outcome | None:
        """Run one round of the only sequence in `limits`; None: the round has to run on the host.

        The next round is launched before this one is read, unless this one surely ends the sequence. `ahead` False: it
        is not, since a prompt's pass may come between; the time of that pass would count as the round's.
        """
        flight, self._flight = self._flight, None
        if len(limits) != 1 or self._planner is None or self._runtime.device_rounds is None:
            return None
        ((seq, limit),) = limits.items()
        rounds = self._runtime.device_rounds
        if flight is None or flight.seq is not seq:
            flight = self._launch(seq, WIDEST_DRAFT if limit.depth else 0, None)
        if flight is None:
            return None
        following = self._launch(seq, WIDEST_DRAFT, flight) if ahead and seq.remaining > 1 else None
        outcome = rounds.read(flight)
        self._planner.observe(seq, outcome)
        self._flight = following if seq.remaining else None
        return outcome

    def _launch(self, seq: SequenceState, depth: int, before: Flight | None) -> Flight | None:
        """Launch a round that drafts at most `depth` tokens, after a round that was launched and not read."""
        assert self._planner is not None
        assert self._runtime.device_rounds is not None
        plan = self._planner.plan_round(seq, Limit(depth), ahead=before is not None)
        return None if plan is None else self._runtime.device_rounds.launch(seq, plan, before)
