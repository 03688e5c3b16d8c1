"""Rounds on the device: draft steps, verification and acceptance captured as one graph for each draft length.

The next round is launched before the host has read the last one, so that the device never waits for the host. The root
and the number of cached tokens therefore stay on the device, and a round is read in one transfer.

Off by default, see `ENV_VAR`: no GPU has run it yet.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError, reason
from selfspec.basics.switches import switched
from selfspec.runtime.compiled_path import CompiledPath, LeanPath
from selfspec.runtime.cuda_graphs import SHAPES, Graphs, Replay
from selfspec.runtime.device_tokens import Chosen, choose, confidences, goes_on, leading
from selfspec.runtime.workspace import Scratch
from selfspec.speculation.drafter import Drafter, Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.host_sync import Transfer, to_device
from selfspec.speculation.rules import greedy, match
from selfspec.speculation.sampling import NO_TOKEN, Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.confidence import PROBABILITY, Confidence
from selfspec.types.draft_work import passes_of
from selfspec.types.stopping import StoppingRule

ENV_VAR = "SELFSPEC_DEVICE_ROUND"  # environment variable: 1 runs rounds on the device
LENGTHS = (1, 2, 4, 6, 8, 12)  # draft lengths of captured rounds, besides 0: plain decode steps
_ENDS = 16  # most end-of-sequence tokens
_NOISE = 64  # positions whose noise is on the device: more than two rounds can read
_log = logging.getLogger("selfspec")


class RoundPlan(NamedTuple):
    """The plan of a round: it drafts `length` tokens (0 or one of `LENGTHS`) along `path`.

    `stopping` decides after which of them the draft ends. `source`: the name of the tokens' source. The length is
    fixed, so tokens beyond the end of the draft are verified too. They are never accepted, even where the target
    chooses the same: drafts, and what the controller learns from them, are then those of rounds on the host, which
    would not have drafted these tokens.
    """

    length: int = 0
    path: CompiledPath | None = None
    stopping: StoppingRule = StoppingRule((math.inf,) * LENGTHS[-1])
    confidence: Confidence = PROBABILITY
    source: str = ""


@runtime_checkable
class RoundPlanner(Drafter, Protocol):
    """A drafter that can say what a round drafts before the last round was read."""

    def plan_round(self, seq: SequenceState, limit: Limit, *, ahead: bool) -> RoundPlan | None:
        """Return what the next round of `seq` drafts, at most `limit.depth` tokens; None: it has to run on the host.

        `ahead`: whether the round planned last runs and is not observed yet. Otherwise it was observed or discarded, as
        it was if `begin`, `propose` or `end` is called.
        """


class _Key(NamedTuple):
    """The key of a captured round: draft length, KV length, cache row, and how tokens are chosen."""

    length: int
    kv_len: int
    row: int
    tied: bool
    settings: Hashable
    confidence: Confidence
    knots: int


class _Result(NamedTuple):
    """A captured round's tensors: `state`, the next root and its slot; `numbers`, all that the host reads.

    `logits` `[1, 1 + length, V]` and `p` `[1 + length, V]` are those of the verification pass; p only with tied noise.
    """

    state: Tensor
    numbers: Tensor
    logits: Tensor
    p: Tensor | None


class _Captured(NamedTuple):
    """A captured round: its result, the function that replays it, and the workspaces that it computes in."""

    result: _Result
    replay: Replay
    scratches: tuple[Scratch, ...]


@dataclass(frozen=True, slots=True)
class Flight:
    """A round that was launched and not read; `logits` and `p` are as in `_Result`."""

    seq: SequenceState
    plan: RoundPlan
    transfer: Transfer
    logits: Tensor
    p: Tensor | None


class DeviceRounds:
    """The captured rounds of one cache, for one sequence at a time. `full`: the whole model's path.

    A round reads the tensors `_state` (the root, its slot, and the most tokens that the sequence may ever have),
    `_ends`, `_rules` (the stopping rule) and `_noise`, whose row of a position is the position modulo `_NOISE`.
    """

    def __init__(self, graphs: Graphs, full: CompiledPath) -> None:
        assert isinstance(full, LeanPath)
        self._graphs, self._full, self._cache = graphs, full, graphs.passes.cache
        device = self._device = graphs.device
        self._state = torch.zeros(3, dtype=torch.long, device=device)
        self._ends = torch.full((_ENDS,), -1, device=device)
        self._steps = torch.arange(1 + LENGTHS[-1], device=device)
        self._rules: dict[int, Tensor] = {}  # by the number of the curve's knots
        self._sent_rule: StoppingRule | None = None
        self._noise: Tensor | None = None
        self._sent_noise: tuple[Sampler, range] | None = None  # the positions whose noise was sent
        self._made: WeakKeyDictionary[LeanPath, dict[_Key, _Captured]] = WeakKeyDictionary()
        self._refused: set[Hashable] = set()  # settings of samplers with which no round can be captured

    @torch.inference_mode()
    def launch(self, seq: SequenceState, plan: RoundPlan, before: Flight | None) -> Flight | None:
        """Launch a round of `seq`; None: the round has to run on the host.

        `before`: the round of `seq` that was launched and not read; None: all rounds were read.
        """
        plan = plan if plan.length else RoundPlan()  # plain decode steps do not depend on the drafter
        path, sampler, curve = plan.path or self._full, seq.sampler, plan.stopping.curve
        assert isinstance(path, LeanPath)
        known = len(seq.tokens) - 1  # the slot of the root, if the round before was read
        start = known if before is None else known + 1 + before.plan.length  # at most
        end, settings = start + 1 + plan.length, sampler.plain_settings
        fits = seq.verification_rule() is (match if sampler.tied else greedy) and seq.continuation is None
        if not fits or len(seq.ends) > _ENDS or settings in {None, *self._refused} or end > self._graphs.end:
            return None
        knots = 0 if curve is None else len(curve.knots)
        key = _Key(plan.length, self._graphs.kv_len(end), seq.row, sampler.tied, settings, plan.confidence, knots)
        if sampler.tied:
            self._send_noise(sampler, known + 1, end + 1)
        if before is None:
            ends = [*seq.ends, *[-1] * (_ENDS - len(seq.ends))]
            self._state.copy_(torch.tensor([seq.tokens[-1], start, len(seq.tokens) + seq.remaining]))
            self._ends.copy_(torch.tensor(ends))
        self._send_rule(plan.stopping, knots)
        made = self._made.setdefault(path, {})
        captured = made.get(key)
        if captured is None:
            captured = self._captured(path, key, sampler) if len(made) < SHAPES else None
            if captured is None:
                return None
            made[key] = captured
        result = captured.result
        captured.replay()
        self._state[:2].copy_(result.state)
        # The next replay overwrites the results, so that they are copied before it.
        p = None if result.p is None else result.p.clone()
        return Flight(seq, plan, Transfer(result.numbers), result.logits.clone(), p)

    def read(self, flight: Flight) -> Outcome:
        """Wait for a round, commit its keys and values, and emit its tokens.

        Raises `SelfspecError` if no token can be chosen; nothing has been committed or emitted in that case.
        """
        seq, plan = flight.seq, flight.plan
        numbers: list[int] = flight.transfer.wait().tolist()
        token, drafted, accepted, possible, *tokens = numbers[: 4 + plan.length]
        if not possible:
            raise SelfspecError(NO_TOKEN)
        draft, path = NO_DRAFT, tuple(range(accepted))
        if drafted:
            bits = numbers[4 + plan.length :][:drafted]
            draft = Draft.chain(
                tokens[:drafted],
                confidence=struct.unpack(f"{drafted}d", struct.pack(f"{drafted}q", *bits)),
                work=passes_of([1] * plan.length),
                sources=[plan.source] * drafted,
            )
        self._cache.commit(seq.row, path)
        emitted = seq.emit([*tokens[:accepted], token])
        rows = slice(1 + drafted)
        p = None if flight.p is None else flight.p[rows]
        return Outcome(draft, path, emitted, ForwardOutput(flight.logits[:, rows]), p)

    def _send_rule(self, rule: StoppingRule, knots: int) -> None:
        """Copy a stopping rule to the device, unless it is there."""
        if rule == self._sent_rule:
            return
        numbers, curve = list(rule.least), rule.curve
        if curve is not None:
            numbers += [*rule.prices, *curve.knots, *curve.accepted, *curve.following]
        sent = to_device(torch.tensor(numbers, dtype=torch.float64), self._device)
        if knots in self._rules:
            self._rules[knots].copy_(sent)
        else:
            self._rules[knots] = sent
        self._sent_rule = rule

    def _send_noise(self, sampler: Sampler, first: int, end: int) -> None:
        """Copy the noise tied to positions from `first` up to, not including, `end` to the device, unless it is there.

        The host draws it while the device runs the round before.
        """
        vocabulary = self._graphs.passes.skeleton.identity.vocabulary or 0
        if self._noise is None:
            self._noise = torch.ones(_NOISE, vocabulary, dtype=torch.float64, device=self._device)
        sent, like = range(first, first), torch.empty(1).expand(vocabulary)
        if self._sent_noise is not None and self._sent_noise[0] is sampler:
            there = self._sent_noise[1]
            sent = there if max(there.start, there.stop - _NOISE) <= first <= there.stop else sent
        for position in range(sent.stop, end):
            self._noise[position % _NOISE].copy_(to_device(sampler.noise_of(position, like), self._device))
        self._sent_noise = sampler, range(sent.start, max(sent.stop, end))

    def _captured(self, path: LeanPath, key: _Key, sampler: Sampler) -> _Captured | None:
        """Capture a round. Return None and warn if that fails."""
        sizes, length = self._graphs.passes.skeleton.sizes, key.length
        narrow, wide = scratches = tuple(Scratch(sizes, 1, n, self._device) for n in (1, 1 + length))
        steps, rule = self._steps[: 1 + length], self._rules[key.knots]

        def body() -> _Result:
            root, start, longest = self._state.view(3, 1).unbind()
            slots = start + steps
            noise = None
            if key.tied and self._noise is not None:
                noise = self._noise.index_select(0, (slots + 1) % _NOISE)
            if self._cache.positions is not None:
                self._cache.set_positions(slots[None], slots[None], 1 + length, slice(key.row, key.row + 1))
            chosen, sure, token = list[Chosen](), list[Tensor](), root
            for i in range(length):
                _, scores = self._scores(path, token, slots[i : i + 1], key, sampler, narrow)
                chosen.append(choose(scores, None if noise is None else noise[i : i + 1]))
                sure.append(confidences(chosen[-1], key.confidence))
                token = chosen[-1].tokens
            tokens = torch.cat([root, *(one.tokens for one in chosen)])
            logits, scores = self._scores(self._full, tokens, slots, key, sampler, wide)
            target = choose(scores, noise)
            drafted = accepted = torch.zeros_like(root)
            if length:
                possible = torch.cat([one.possible for one in chosen])
                going = goes_on(torch.cat(sure), rule, key.knots)
                going &= (tokens[1:, None] != self._ends).all(-1)
                counted = possible & (going.roll(1) | (steps[:-1] == 0))
                drafted = torch.minimum(leading(counted), longest - start - 2).clamp(min=0)
                accepted = leading((tokens[1:] == target.tokens[:-1]) & (steps[:-1] < drafted))
            after = target.tokens.gather(0, accepted)
            able = target.possible.long().gather(0, accepted)
            bits = [one.view(torch.long) for one in sure]
            numbers = torch.cat([after, drafted, accepted, able, tokens[1:], *bits])
            return _Result(torch.cat([after, start + accepted + 1]), numbers, logits, target.p)

        try:
            return _Captured(*self._graphs.capture(body), scratches)
        except RuntimeError as error:
            if not self._refused:
                _log.warning("CUDA graph capture of rounds failed; rounds run on the host (%s)", reason(error))
            self._refused.add(key.settings)
            return None

    def _scores(
        self, path: LeanPath, tokens: Tensor, slots: Tensor, key: _Key, sampler: Sampler, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        """Run consecutive tokens `[n]` at `slots` `[n]` along a path; return logits `[1, n, V]` and scores `[n, V]`."""
        inputs = self._graphs.causal_inputs(slots[None], key.kv_len, slice(key.row, key.row + 1))
        logits = self._graphs.passes.forward(path, tokens[None], inputs, logits="all", scratch=scratch).logits
        assert logits is not None
        return logits, sampler.scores(logits[0], ())


def device_rounds(graphs: Graphs | None, full: CompiledPath) -> DeviceRounds | None:
    """Return the captured rounds of a cache whose passes are captured; None if they are not, or `ENV_VAR` is not on."""
    return DeviceRounds(graphs, full) if graphs is not None and switched(ENV_VAR) else None
