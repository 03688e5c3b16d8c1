"""Rounds on the device: draft steps, verification and acceptance captured as one graph for each draft length.

A round is of one sequence or of several, each in its own cache row. The next one is launched before the host has read
the last one, so that the device never waits for the host. Each row's root, number of cached tokens and end therefore
stay on the device, and a round is read in one transfer.

Off by default, see `ENV_VAR`: no GPU has run it yet.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError, reason, switched
from selfspec.runtime.compiled_path import CompiledPath, LeanPath
from selfspec.runtime.cuda_graphs import ROWS, SHAPES, Graphs, Replay
from selfspec.runtime.device_noise import StreamNumbers, TiedNoise
from selfspec.runtime.device_rules import SAMPLED, Drafts, follow, sample
from selfspec.runtime.device_tokens import Chosen, choose, confidences, goes_on, leading
from selfspec.runtime.workspace import Scratch
from selfspec.speculation.drafter import Drafter, Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.host_sync import Transfer, to_device
from selfspec.speculation.rules import Rule, greedy, match
from selfspec.speculation.sampling import NO_TOKEN, Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.acceptance import PROBABILITY, Confidence
from selfspec.types.controller import StoppingRule
from selfspec.types.draft_work import passes_of

ENV_VAR = "SELFSPEC_DEVICE_ROUND"  # environment variable: 1 runs rounds on the device
LENGTHS = (1, 2, 4, 6, 8, 12)  # draft lengths of captured rounds, besides 0: plain decode steps
_ENDS = 16  # most end-of-sequence tokens
_log = logging.getLogger("selfspec")


class RoundPlan(NamedTuple):
    """The plan of a round: it drafts `length` tokens (0 or one of `LENGTHS`) of each sequence along `path`.

    `stopping` decides for each sequence after which of them its draft ends. `source`: the name of the tokens' source.
    The length is fixed, so tokens beyond the end of the draft are verified too. They are never accepted, even where the
    target chooses the same: drafts, and what the controller learns from them, are then those of rounds on the host,
    which would not have drafted these tokens. `on_read`: called with the number of sequences when the round is read.
    """

    length: int = 0
    path: CompiledPath | None = None
    stopping: Sequence[StoppingRule] = ()
    confidence: Confidence = PROBABILITY
    source: str = ""
    on_read: Callable[[int], object] | None = None


@runtime_checkable
class RoundPlanner(Drafter, Protocol):
    """A drafter that can say what a round drafts before the last round was read."""

    def plan_round(self, seqs: Sequence[SequenceState], limit: Limit, *, ahead: bool) -> RoundPlan | None:
        """Return what the next round drafts, at most `limit.depth` tokens of each sequence; None: it runs on the host.

        `ahead`: whether the round planned last runs and is not observed yet. Otherwise it was observed or discarded, as
        it was if `begin` or `propose` is called, and for one of several sequences if `end` is called.
        """


class _Key(NamedTuple):
    """The key of a captured round: draft length, KV length, cache rows, and how tokens are chosen."""

    length: int
    kv_len: int
    first_row: int
    batch: int
    rule: Rule
    settings: Hashable
    confidence: Confidence
    knots: int

    @property
    def rows(self) -> slice:
        """The cache rows."""
        return slice(self.first_row, self.first_row + self.batch)


class _Result(NamedTuple):
    """A captured round's tensors: `state`, as the next round reads it; `numbers`, all that the host reads.

    `logits` and `p` `[B, 1 + length, V]` are those of the verification pass; p only in sampling.
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
    """A round that was launched and not read; `first_row` is its first cache row, `logits` and `p` as in `_Result`."""

    seqs: Sequence[SequenceState]
    plan: RoundPlan
    first_row: int
    transfer: Transfer
    logits: Tensor
    p: Tensor | None


class DeviceRounds:
    """The captured rounds of one cache. `full`: the whole model's path.

    A round reads the tensors `_state` (of each cache row: the root, its slot, and the most tokens that the sequence may
    ever have, and how many random numbers its sampler has used), `_ends`, `_rules` (the stopping rules), and `_noise`
    or `_numbers`. It is over all rows of a block, see `block_of`. A row without a sequence, or whose sequence has
    ended, which the device finds out by itself, is padding: it writes to the spare slot, which nobody reads, and its
    most tokens are 0.
    """

    def __init__(self, graphs: Graphs, full: CompiledPath) -> None:
        assert isinstance(full, LeanPath)
        self._graphs, self._full, self._cache = graphs, full, graphs.passes.cache
        device, rows = graphs.device, self._cache.rows
        self._device = device
        self._state = torch.zeros(rows, 4, dtype=torch.long, device=device)
        self._ends = torch.full((rows, _ENDS), -1, device=device)
        self._steps = torch.arange(1 + LENGTHS[-1], device=device)
        self._rules: dict[int, Tensor] = {}  # of each cache row, by the number of the curve's knots
        self._sent_rules: list[StoppingRule] = []
        self._noise: TiedNoise | None = None
        self._numbers = StreamNumbers(rows, device)
        self._made: WeakKeyDictionary[LeanPath, dict[_Key, _Captured]] = WeakKeyDictionary()
        self._refused: set[Hashable] = set()  # settings of samplers with which no round can be captured

    def longest(self, seqs: Sequence[SequenceState]) -> int:
        """Return the most tokens that a round of these sequences can draft; below 0: it has to run on the host.

        Kernels that read the KV length on the device take a number of tokens at most.
        """
        block = block_of([seq.row for seq in seqs], self._cache.rows)
        return ROWS // (block.stop - block.start) - 1 if self._graphs.passes.reads_lengths else LENGTHS[-1]

    @torch.inference_mode()
    def launch(self, seqs: Sequence[SequenceState], plan: RoundPlan, before: Flight | None) -> Flight | None:
        """Launch a round of `seqs`; None: the round has to run on the host.

        `before`: the round that was launched and not read, whose sequences include these; None: all rounds were read.
        """
        plan = plan if plan.length else RoundPlan()  # plain decode steps do not depend on the drafter
        path, sampler, length = plan.path or self._full, seqs[0].sampler, plan.length
        assert isinstance(path, LeanPath)
        unread = 0 if before is None else 1 + before.plan.length
        ends = [len(seq.tokens) + unread + length for seq in seqs]  # at most: slots before these are written
        settings, knots = self._settings(seqs), {_knots(stopping) for stopping in plan.stopping} or {0}
        if settings is None or len(knots) > 1 or max(ends) > self._graphs.end:
            return None
        block = block_of([seq.row for seq in seqs], self._cache.rows)
        batch, kv_len = block.stop - block.start, self._graphs.kv_len(max(ends))
        key = _Key(length, kv_len, block.start, batch, seqs[0].verification_rule(), settings, plan.confidence, *knots)
        for seq, end in zip(seqs, ends, strict=True):
            if key.rule is match:
                self._noise_sent(seq, end + 1)
            elif key.rule in SAMPLED:
                self._numbers.send(seq.row, seq.sampler, 2 * (unread + length) + 1)
        if before is None:
            self._send_state(seqs)
        else:
            for seq in before.seqs:
                if seq not in seqs:
                    self._state[seq.row, 2].zero_()
        self._send_rules(seqs, plan.stopping, key.knots)
        made = self._made.setdefault(path, {})
        captured = made.get(key)
        if captured is None:
            captured = self._captured(path, key, sampler) if len(made) < SHAPES else None
            if captured is None:
                return None
            made[key] = captured
        result = captured.result
        captured.replay()
        self._state[block].copy_(result.state)
        # The next replay overwrites the results, so that they are copied before it.
        p = None if result.p is None else result.p.clone()
        return Flight(seqs, plan, block.start, Transfer(result.numbers), result.logits.clone(), p)

    def read(self, flight: Flight, seqs: Sequence[SequenceState]) -> list[Outcome]:
        """Wait for a round, commit the keys and values of `seqs`, which are some of its sequences, and emit tokens.

        Raises `SelfspecError` if no token can be chosen for one; nothing has been committed or emitted in that case.
        """
        rows: list[list[int]] = flight.transfer.wait().tolist()
        numbers = [rows[seq.row - flight.first_row] for seq in seqs]
        if not all(possible for _, _, _, possible, *_ in numbers):
            raise SelfspecError(NO_TOKEN)
        return [self._committed(flight, seq, of_seq) for seq, of_seq in zip(seqs, numbers, strict=True)]

    def _committed(self, flight: Flight, seq: SequenceState, numbers: Sequence[int]) -> Outcome:
        """Commit a sequence's part of a round. `numbers` end with the drafted tokens and their confidences' bits."""
        token, drafted, accepted, _, used, *others = numbers
        length, row = flight.plan.length, seq.row - flight.first_row
        draft, path = NO_DRAFT, tuple(range(accepted))
        if drafted:
            bits = others[length:][:drafted]
            draft = Draft.chain(
                others[:drafted],
                confidence=struct.unpack(f"{drafted}d", struct.pack(f"{drafted}q", *bits)),
                work=passes_of([1] * length),
                sources=[flight.plan.source] * drafted,
            )
        self._cache.commit(seq.row, path)
        seq.sampler.skip(used)
        emitted = seq.emit([*others[:accepted], token])
        p = None if flight.p is None else flight.p[row, : 1 + drafted]
        return Outcome(draft, path, emitted, ForwardOutput(flight.logits[row : row + 1, : 1 + drafted]), p)

    def _settings(self, seqs: Sequence[SequenceState]) -> Hashable | None:
        """Return the settings of the sequences' samplers; None if a round with them has to run on the host."""
        settings, rule = seqs[0].sampler.plain_settings, seqs[0].verification_rule()
        fits = all(
            seq.verification_rule() is rule
            and rule in _rules_for(seq.sampler)
            and seq.continuation is None
            and len(seq.ends) <= _ENDS
            and seq.sampler.plain_settings == settings
            for seq in seqs
        )
        fits = fits and (rule is not match or TiedNoise.fits(self._cache.rows, self._vocabulary))
        # Sequences that share a stream would have to use its numbers one after the other.
        fits = fits and (rule not in SAMPLED or len({seq.sampler for seq in seqs}) == len(seqs))
        return settings if fits and settings not in self._refused else None

    @property
    def _vocabulary(self) -> int:
        return self._graphs.passes.skeleton.identity.vocabulary or 0

    def _send_state(self, seqs: Sequence[SequenceState]) -> None:
        """Copy the state of each cache row to the device."""
        state, ends = [[0, 0, 0, 0]] * self._cache.rows, [[-1] * _ENDS] * self._cache.rows
        for seq in seqs:
            known = len(seq.tokens)
            state[seq.row] = [seq.tokens[-1], known - 1, known + seq.remaining, seq.sampler.numbers_used]
            ends[seq.row] = [*seq.ends, *[-1] * (_ENDS - len(seq.ends))]
        self._state.copy_(torch.tensor(state))
        self._ends.copy_(torch.tensor(ends))

    def _send_rules(self, seqs: Sequence[SequenceState], rules: Sequence[StoppingRule], knots: int) -> None:
        """Copy the sequences' stopping rules to the device, unless they are there."""
        if not rules:
            return
        of_rows = [rules[0]] * self._cache.rows
        for seq, rule in zip(seqs, rules, strict=True):
            of_rows[seq.row] = rule
        if of_rows == self._sent_rules:
            return
        table = torch.tensor([_numbers(rule) for rule in of_rows], dtype=torch.float64)
        sent = to_device(table, self._device)
        if knots in self._rules:
            self._rules[knots].copy_(sent)
        else:
            self._rules[knots] = sent
        self._sent_rules = of_rows

    def _noise_sent(self, seq: SequenceState, end: int) -> None:
        """Copy the noise of a sequence's positions before `end` to the device, as far as tokens were not read."""
        if self._noise is None:
            self._noise = TiedNoise(self._cache.rows, self._vocabulary, self._device)
        self._noise.send(seq.row, seq.sampler, len(seq.tokens), end)

    def _captured(self, path: LeanPath, key: _Key, sampler: Sampler) -> _Captured | None:
        """Capture a round. Return None and warn if that fails."""
        sizes, length, rows = self._graphs.passes.skeleton.sizes, key.length, key.rows
        narrow, wide = scratches = tuple(Scratch(sizes, key.batch, n, self._device) for n in (1, 1 + length))
        steps = self._steps[: 1 + length]

        def is_end(tokens: Tensor) -> Tensor:
            return (tokens.unsqueeze(-1) == self._ends[rows].unsqueeze(1)).any(-1)

        def body() -> _Result:
            root, start, longest, used = self._state[rows].unbind(1)
            stopped, numbers = (longest <= start + 1).unsqueeze(1), start.unsqueeze(1) + steps
            slots, positions = numbers.masked_fill(stopped, self._cache.spare), numbers.masked_fill(stopped, 0)
            noise = self._noise.at(positions + 1, rows) if key.rule is match and self._noise is not None else None
            random = self._numbers.at(used, 2 * length + 1, rows) if key.rule in SAMPLED else None
            if self._cache.positions is not None:
                self._cache.set_positions(positions, slots, 1 + length, rows)
            chosen, sure, token = list[Chosen](), list[Tensor](), root
            places = [
                numbers.t().contiguous().unsqueeze(-1) for numbers in (slots, positions)
            ]  # one copy for all steps
            for i in range(length):
                _, scores = self._scores(path, token.unsqueeze(1), places[0][i], places[1][i], key, sampler, narrow)
                chosen.append(choose(scores, *(None if of is None else of[:, i] for of in (noise, random))))
                sure.append(confidences(chosen[-1], key.confidence))
                token = chosen[-1].tokens
            tokens = torch.stack([root, *(one.tokens for one in chosen)], 1)
            logits, scores = self._scores(self._full, tokens, slots, positions, key, sampler, wide)
            if length:
                possible, sureness = torch.stack([one.possible for one in chosen], 1), torch.stack(sure, 1)
                going = goes_on(sureness, self._rules[key.knots][rows], key.knots) & ~is_end(tokens[:, 1:])
                counted = possible & (going.roll(1, 1) | (steps[:-1] == 0))
                drafted = torch.minimum(leading(counted), longest - start - 2).clamp(min=0)
            else:
                drafted = torch.zeros_like(root)
            if random is None:
                target = choose(scores, None if noise is None else noise.flatten(0, 1))
                verdict, p = follow(tokens[:, 1:], steps[:-1] < drafted.unsqueeze(1), target), target.p
            else:
                p = sampler.probs(scores)
                q = [one.p for one in chosen if one.p is not None]
                drafts = Drafts(tokens[:, 1:], drafted, torch.stack(q, 1), random) if q else None
                verdict = sample(p, random) if drafts is None else SAMPLED[key.rule](drafts, p.view(logits.shape))
            accepted, after, able, taken = verdict
            bits = [one.view(torch.long) for one in sure]
            result = torch.stack(
                [after, drafted, accepted, able.long(), taken, *(one.tokens for one in chosen), *bits], 1
            )
            emitted = torch.cat([after.unsqueeze(1), tokens[:, 1:]], 1)  # of which the first and those accepted count
            ended = (is_end(emitted) & (steps <= accepted.unsqueeze(1))).any(1)
            used = used if random is None else used + taken
            state = torch.stack([after, start + accepted + 1, longest.masked_fill(ended, 0), used], 1)
            return _Result(state, result, logits, None if p is None else p.view(logits.shape))

        try:
            return _Captured(*self._graphs.capture(body), scratches)
        except RuntimeError as error:
            if not self._refused:
                _log.warning("CUDA graph capture of rounds failed; rounds run on the host (%s)", reason(error))
            self._refused.add(key.settings)
            return None

    def _scores(
        self,
        path: LeanPath,
        tokens: Tensor,
        slots: Tensor,
        positions: Tensor,
        key: _Key,
        sampler: Sampler,
        scratch: Scratch,
    ) -> tuple[Tensor, Tensor]:
        """Run tokens `[B, n]` along a path; return logits `[B, n, V]` and scores `[B * n, V]`."""
        inputs = self._graphs.causal_inputs(slots, positions, key.kv_len, key.rows, alike=False)
        logits = self._graphs.passes.forward(path, tokens, inputs, logits="all", scratch=scratch).logits
        assert logits is not None
        return logits, sampler.scores(logits.flatten(0, 1), ())


def block_of(rows: Sequence[int], of: int) -> slice:
    """Return the block of cache rows that a round of sequences in `rows` is captured for, of a cache of `of` rows.

    The smallest that begins at a multiple of its size, a power of two, so that few blocks are captured; the last one
    ends with the cache.
    """
    size = 1
    while min(rows) // size != max(rows) // size:
        size *= 2
    first = min(rows) // size * size
    return slice(first, min(first + size, of))


def _rules_for(sampler: Sampler) -> Collection[Rule]:
    """Return the rules that rounds on the device know for a sampler."""
    return (greedy,) if sampler.greedy else (match,) if sampler.tied else SAMPLED


def _knots(rule: StoppingRule) -> int:
    return 0 if rule.curve is None else len(rule.curve.knots)


def _numbers(rule: StoppingRule) -> list[float]:
    """Return a stopping rule as `goes_on` reads it."""
    curve = rule.curve
    return [*rule.least, *(() if curve is None else (*rule.prices, *curve.knots, *curve.accepted, *curve.following))]


def device_rounds(graphs: Graphs | None, full: CompiledPath) -> DeviceRounds | None:
    """Return the captured rounds of a cache whose passes are captured; None if they are not, or `ENV_VAR` is not on."""
    return DeviceRounds(graphs, full) if graphs is not None and switched(ENV_VAR) else None
