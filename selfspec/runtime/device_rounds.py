"""Rounds on the device: draft steps, verification and acceptance captured as one graph for each draft length.

A round is of one sequence or of several, each in its own cache row. The next one is launched before the host has read
the last one, so that the device never waits for the host. Each row's root, number of cached tokens and end therefore
stay on the device, and a round is read in one transfer.

On by default on GPUs for what a GPU has run with Triton kernels: one sequence, greedily or by the rule `match`. The
rest, and GPUs without these kernels, need `ENV_VAR`.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError, reason, switched
from selfspec.runtime.attention_inputs import PassInputs
from selfspec.runtime.compiled_path import CompiledPath, LeanPath
from selfspec.runtime.cuda_graphs import ROWS, SHAPES, Graphs, Replay
from selfspec.runtime.device_noise import StreamNumbers, TiedNoise
from selfspec.runtime.device_rules import SAMPLED, Drafts, Verdicts, follow, sample
from selfspec.runtime.device_tokens import Chosen, choose, confidences, goes_on, leading, others
from selfspec.runtime.device_trees import TREE_ROWS, DeviceTree, Texts, path_of
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

ENV_VAR = "SELFSPEC_DEVICE_ROUND"  # environment variable: 0 runs rounds on the host, 1 all that can on the device
LENGTHS = (1, 2, 4, 6, 8, 12)  # draft lengths of captured rounds, besides 0: plain decode steps
_ENDS = 16  # most end-of-sequence tokens
_log = logging.getLogger("selfspec")


class RoundPlan(NamedTuple):
    """The plan of a round: it drafts `length` tokens (0 or one of `LENGTHS`) of each sequence along `path`.

    `stopping` decides for each sequence after which of them its draft ends. `source`: the name of the tokens' source.
    With `candidates` above 1, each position has that many. `lookup` tokens of the source `lookup_source` are a second
    branch below the root, looked up on the device; None: no round of the drafter looks any up.
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
    candidates: int = 1
    lookup: int | None = None
    lookup_source: str = ""

    @property
    def nodes(self) -> int:
        """The tokens that the round verifies of each sequence, besides the root."""
        return self.length * self.candidates + (self.lookup or 0)

    @property
    def depth(self) -> int:
        """The most of them that can be accepted."""
        return max(self.length, self.lookup or 0)


PLAIN = RoundPlan()  # a plain decode step


@runtime_checkable
class RoundPlanner(Drafter, Protocol):
    """A drafter that can plan a round on the device before the host has read the last round's result."""

    def plan_round(self, seqs: Sequence[SequenceState], limit: Limit, *, ahead: bool) -> RoundPlan | None:
        """Return the plan of the next round, with at most `limit.depth` drafted tokens for each sequence.

        None: the round runs on the host. `ahead`: whether the round planned last is still running, so that `observe`
        has not been called for it. Otherwise it was observed or discarded. A call of `begin` or `propose` also means
        that it was, and a call of `end` that it was for this sequence.
        """


class _Key(NamedTuple):
    """The key of a captured round: the draft's shape, KV length, cache rows, and how tokens are chosen."""

    length: int
    candidates: int
    lookup: int | None
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

    `logits` and `p` `[B, 1 + m, V]` are those of the verification pass over m tokens; p only in sampling.
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

    `everything`: also rounds that no GPU has run with Triton kernels, those of several sequences and of the rules
    `token` and `block`.

    A round reads the tensors `_state` (of each cache row: the root, its slot, and the most tokens that the sequence may
    ever have, and how many random numbers its sampler has used), `_ends`, `_rules` (the stopping rules), and `_noise`
    or `_numbers`. It is over all rows of a block, see `block_of`. A row without a sequence, or whose sequence has
    ended, which the device finds out by itself, is padding: it writes to the spare slot, which nobody reads, and its
    most tokens are 0.
    """

    def __init__(self, graphs: Graphs, full: CompiledPath, *, everything: bool) -> None:
        assert isinstance(full, LeanPath)
        self._graphs, self._full, self._cache = graphs, full, graphs.passes.cache
        device, rows = graphs.device, self._cache.rows
        self._device = device
        self._everything = everything
        self._state = torch.zeros(rows, 4, dtype=torch.long, device=device)
        self._ends = torch.full((rows, _ENDS), -1, device=device)
        self._steps = torch.arange(TREE_ROWS, device=device)
        self._texts: Texts | None = None
        self._trees: dict[tuple[int, int, int], DeviceTree] = {}
        self._rules: dict[int, Tensor] = {}  # of each cache row, by the number of the curve's knots
        self._sent_rules: list[StoppingRule] = []
        self._noise: TiedNoise | None = None
        self._numbers = StreamNumbers(rows, device)
        self._made: WeakKeyDictionary[LeanPath, dict[_Key, _Captured]] = WeakKeyDictionary()
        self._refused: set[Hashable] = set()  # settings of samplers with which no round can be captured

    def widest(self, seqs: Sequence[SequenceState]) -> int:
        """Return the most tokens that a round can verify of each sequence; below 0: it has to run on the host.

        Kernels that read the KV length on the device take a number of tokens at most.
        """
        if not self._everything and (len(seqs) > 1 or seqs[0].verification_rule() in SAMPLED):
            return -1
        block = block_of([seq.row for seq in seqs], self._cache.rows)
        most = ROWS // (block.stop - block.start) if self._graphs.passes.reads_lengths else TREE_ROWS
        return min(most, TREE_ROWS) - 1

    @torch.inference_mode()
    def launch(self, seqs: Sequence[SequenceState], plan: RoundPlan, before: Flight | None) -> Flight | None:
        """Launch a round of `seqs`; None: the round has to run on the host.

        `before`: the round that was launched and not read, whose sequences include these; None: all rounds were read.
        """
        if not plan.length:  # plain decode steps do not depend on the drafter
            plan = RoundPlan(lookup=None if plan.lookup is None else 0)
        path, sampler, tree = plan.path or self._full, seqs[0].sampler, self._tree(plan)
        assert isinstance(path, LeanPath)
        unread = 0 if before is None else 1 + before.plan.depth
        known = [len(seq.tokens) + unread for seq in seqs]  # at most
        settings, knots = self._settings(seqs), {_knots(stopping) for stopping in plan.stopping} or {0}
        end = max(known) + plan.nodes  # slots before it are written
        if settings is None or len(knots) > 1 or end > self._graphs.end or not self._follows(plan, seqs, before):
            return None
        block = block_of([seq.row for seq in seqs], self._cache.rows)
        batch, kv_len, shape = block.stop - block.start, self._graphs.kv_len(end), (plan.length, plan.candidates)
        rule = seqs[0].verification_rule()
        key = _Key(*shape, plan.lookup, kv_len, block.start, batch, rule, settings, plan.confidence, *knots)
        for seq, tokens in zip(seqs, known, strict=True):
            if rule is match:
                self._noise_sent(seq, tokens + plan.depth + 1)
            elif rule in SAMPLED:
                self._numbers.send(seq.row, seq.sampler, 2 * (unread + plan.length) + 1)
        if before is None:
            self._send_state(seqs, texts=plan.lookup is not None)
        else:
            for seq in before.seqs:
                if seq not in seqs:
                    self._state[seq.row, 2].zero_()
        self._send_rules(seqs, plan.stopping, key.knots)
        made = self._made.setdefault(path, {})
        captured = made.get(key)
        if captured is None:
            captured = self._captured(path, key, sampler, tree) if len(made) < SHAPES else None
            if captured is None:
                return None
            made[key] = captured
        result = captured.result
        captured.replay()
        self._state[block].copy_(result.state)
        # The next replay overwrites the results, so that they are copied before it.
        p = None if result.p is None else result.p.clone()
        return Flight(seqs, plan, block.start, Transfer(result.numbers), result.logits.clone(), p)

    def _tree(self, plan: RoundPlan) -> DeviceTree | None:
        """Return the shape of a plan's tree; None for chains."""
        if plan.nodes == plan.length:
            return None
        shape = plan.length, plan.candidates, plan.lookup or 0
        if shape not in self._trees:
            self._trees[shape] = DeviceTree(*shape, self._device)
        return self._trees[shape]

    @staticmethod
    def _follows(plan: RoundPlan, seqs: Sequence[SequenceState], before: Flight | None) -> bool:
        """Return whether a plan's tree can be verified, and its text is on the device after the round `before`."""
        drawn = seqs[0].verification_rule() in SAMPLED
        if drawn and (plan.candidates > 1 or plan.lookup is not None):
            return False
        return plan.lookup is None or before is None or before.plan.lookup is not None

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
        """Commit a sequence's part of a round. `numbers` end with the verified tokens and the confidences' bits."""
        token, drafted, accepted, _, used, *rest = numbers
        plan, row, tree = flight.plan, seq.row - flight.first_row, self._tree(flight.plan)
        found, last, rest = (0, accepted, rest) if tree is None else (rest[0], rest[1], rest[2:])
        draft, path, right, rows = NO_DRAFT, tuple(range(accepted)), rest[:accepted], list(range(1 + drafted))
        bits = rest[plan.nodes :][:drafted]
        sure = struct.unpack(f"{drafted}d", struct.pack(f"{drafted}q", *bits))
        work = passes_of([1] * plan.length)
        if tree is not None and (drafted or found):
            names = plan.source, plan.lookup_source
            draft, order = tree.draft(rest[: plan.nodes], drafted, found, confidence=sure, work=work, sources=names)
            right = [rest[node] for node in tree.path_to(last - 1)]
            path, rows = path_of(draft, right), [0, *order]
        elif drafted:
            draft = Draft.chain(rest[:drafted], confidence=sure, work=work, sources=[plan.source] * drafted)
        self._cache.commit(seq.row, range(accepted))  # the device has moved what it accepted of a tree
        seq.sampler.skip(used)
        emitted = seq.emit([*right, token])
        logits = _rows_of(flight.logits[row], rows)
        p = None if flight.p is None else _rows_of(flight.p[row], rows)
        return Outcome(draft, path, emitted, ForwardOutput(logits.unsqueeze(0)), p)

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

    def _send_state(self, seqs: Sequence[SequenceState], *, texts: bool) -> None:
        """Copy the state of each cache row to the device, and if `texts`, the sequences' tokens."""
        state, ends = [[0, 0, 0, 0]] * self._cache.rows, [[-1] * _ENDS] * self._cache.rows
        for seq in seqs:
            known = len(seq.tokens)
            state[seq.row] = [seq.tokens[-1], known - 1, known + seq.remaining, seq.sampler.numbers_used]
            ends[seq.row] = [*seq.ends, *[-1] * (_ENDS - len(seq.ends))]
        self._state.copy_(torch.tensor(state))
        self._ends.copy_(torch.tensor(ends))
        if texts:
            self._texts = self._texts or Texts(self._cache.rows, self._cache.slots, self._device)
            for seq in seqs:
                self._texts.send(seq.row, seq.tokens)

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

    def _captured(self, path: LeanPath, key: _Key, sampler: Sampler, tree: DeviceTree | None) -> _Captured | None:
        """Capture a round. Return None and warn if that fails."""
        width, sizes = 1 + (key.length if tree is None else len(tree.parents)), self._graphs.passes.skeleton.sizes
        scratches = Scratch(sizes, key.batch, 1, self._device), Scratch(sizes, key.batch, width, self._device)
        try:
            return _Captured(
                *self._graphs.capture(partial(self._round, path, key, sampler, tree, scratches)), scratches
            )
        except RuntimeError as error:
            if not self._refused:
                _log.warning("CUDA graph capture of rounds failed; rounds run on the host (%s)", reason(error))
            self._refused.add(key.settings)
            return None

    def _round(
        self, path: LeanPath, key: _Key, sampler: Sampler, tree: DeviceTree | None, scratches: tuple[Scratch, Scratch]
    ) -> _Result:
        """Run a round; can be captured. `scratches`: the workspaces of draft steps and of verification."""
        rows, steps = key.rows, self._steps[: scratches[1].n]
        root, start, longest, used = self._state[rows].unbind(1)
        stopped, numbers = (longest <= start + 1).unsqueeze(1), start.unsqueeze(1) + steps
        slots = numbers.masked_fill(stopped, self._cache.spare)
        depths = numbers if tree is None else start.unsqueeze(1) + tree.depths
        positions = depths.masked_fill(stopped, 0)
        noise = self._noise.at(positions + 1, rows) if key.rule is match and self._noise is not None else None
        random = self._numbers.at(used, 2 * key.length + 1, rows) if key.rule in SAMPLED else None
        if self._cache.positions is not None:
            self._cache.set_positions(positions, slots, len(steps), rows)
        chosen = self._draft(path, root, (slots, positions), (noise, random), key, sampler, scratches[0])
        sure = [confidences(one, key.confidence) for one in chosen]
        tokens = torch.stack([root, *(one.tokens for one in chosen), *_candidates(chosen, key.candidates)], 1)
        most = longest - start - 2 if chosen else start  # tokens that may be accepted of a draft
        drafted = self._drafted(chosen, tokens, sure, most, key) if chosen else torch.zeros_like(root)
        found = torch.zeros_like(root) if tree is not None and not key.lookup else None
        if key.lookup:
            branch, found = self._found(slots[:, 0], most, key)
            tokens = torch.cat([tokens, branch], 1)
        if tree is None:
            inputs = self._graphs.causal_inputs(slots, positions, key.kv_len, rows, alike=False)
        else:
            inputs = self._graphs.tree_inputs(slots, positions, tree.mask, key.kv_len, rows)
        logits, scores = self._scores(self._full, tokens, inputs, sampler, scratches[1])
        verified, right, extra = tokens[:, 1:], tokens[:, 1:], list[Tensor]()
        p: Tensor | None
        if random is not None:
            p = sampler.probs(scores).view(logits.shape)
            verdict = _judged(chosen, drafted, verified, p, random, key.rule)
        else:
            target = choose(scores, None if noise is None else noise.flatten(0, 1))
            p = None if target.p is None else target.p.view(logits.shape)
            if tree is None or found is None:
                verdict = follow(verified, steps[:-1] < drafted.unsqueeze(1), target)
            else:
                last, verdict = tree.follow(verified, tree.counts(drafted, found), target)
                accepted_rows = 1 + tree.paths.index_select(0, last)
                self._cache.rearrange(rows, slots[:, 1 : 1 + tree.depth], slots.gather(1, accepted_rows))
                right, extra = tokens.gather(1, accepted_rows), [found, last]
        accepted, after, able, taken = verdict
        bits = [one.view(torch.long) for one in sure]
        columns = [after, drafted, accepted, able.long(), taken, *extra, *verified.unbind(1), *bits]
        ended = self._emitted(after, right, accepted, slots[:, 0], key)
        used = used if random is None else used + taken
        state = torch.stack([after, start + accepted + 1, longest.masked_fill(ended, 0), used], 1)
        return _Result(state, torch.stack(columns, 1), logits, p)

    def _emitted(self, after: Tensor, right: Tensor, accepted: Tensor, place: Tensor, key: _Key) -> Tensor:
        """Append what a round emits to the texts, if they are looked up in; return whether it ends its sequence `[B]`.

        That is the first `accepted` `[B]` of `right` `[B, n]`, then `after` `[B]`. `place` `[B]`: the roots' slots.
        """
        emitted = torch.cat([after.unsqueeze(1), right], 1)
        order, count = self._steps[: emitted.shape[1]], accepted.unsqueeze(1)
        if key.lookup is not None and self._texts is not None:
            self._texts.append(torch.where(order == count, after.unsqueeze(1), emitted.roll(-1, 1)), place, key.rows)
        return (self._is_end(emitted, key.rows) & (order <= count)).any(1)

    def _draft(
        self,
        path: LeanPath,
        root: Tensor,
        places: tuple[Tensor, Tensor],
        chances: tuple[Tensor | None, Tensor | None],
        key: _Key,
        sampler: Sampler,
        scratch: Scratch,
    ) -> list[Chosen]:
        """Run the draft steps; return what each chose. `places`: slots and positions; `chances`: noise and numbers."""
        slots, positions = (numbers.t().contiguous().unsqueeze(-1) for numbers in places)  # one copy for all steps
        chosen, token = list[Chosen](), root
        for i in range(key.length):
            inputs = self._graphs.causal_inputs(slots[i], positions[i], key.kv_len, key.rows, alike=False)
            _, scores = self._scores(path, token.unsqueeze(1), inputs, sampler, scratch)
            chosen.append(choose(scores, *(None if of is None else of[:, i] for of in chances)))
            token = chosen[-1].tokens
        return chosen

    def _drafted(
        self, chosen: Sequence[Chosen], tokens: Tensor, sure: Sequence[Tensor], most: Tensor, key: _Key
    ) -> Tensor:
        """Return how many of the computed tokens, which are behind the roots, each drafts `[B]`, at most `most`."""
        possible, sureness = torch.stack([one.possible for one in chosen], 1), torch.stack(list(sure), 1)
        computed, rule = tokens[:, 1 : 1 + key.length], self._rules[key.knots][key.rows]
        going = goes_on(sureness, rule, key.knots) & ~self._is_end(computed, key.rows)
        counted = possible & (going.roll(1, 1) | (self._steps[: key.length] == 0))
        return torch.minimum(leading(counted), most).clamp(min=0)

    def _is_end(self, tokens: Tensor, rows: slice) -> Tensor:
        """Return which of tokens `[B, n]` end their sequences."""
        return (tokens.unsqueeze(-1) == self._ends[rows].unsqueeze(1)).any(-1)

    def _found(self, place: Tensor, most: Tensor, key: _Key) -> tuple[Tensor, Tensor]:
        """Return lookup tokens `[B, n]`, and how many of them count `[B]`, at most `most`.

        `place` `[B]`: the roots' slots. No token behind an end-of-sequence token counts.
        """
        assert self._texts is not None
        tokens, found = self._texts.look_up(place, key.lookup or 0, key.rows)
        goes_on = ~self._is_end(tokens, key.rows).roll(1, 1) | (self._steps[: tokens.shape[1]] == 0)
        return tokens, torch.minimum(leading(goes_on & found.unsqueeze(1)), most).clamp(min=0)

    def _scores(
        self, path: LeanPath, tokens: Tensor, inputs: PassInputs, sampler: Sampler, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        """Run tokens `[B, n]` along a path; return logits `[B, n, V]` and scores `[B * n, V]`."""
        logits = self._graphs.passes.forward(path, tokens, inputs, logits="all", scratch=scratch).logits
        assert logits is not None
        return logits, sampler.scores(logits.flatten(0, 1), ())


def _candidates(chosen: Sequence[Chosen], count: int) -> list[Tensor]:
    """Return the further `count` - 1 candidates `[B]` of each drafted token, position by position."""
    return [token for one in chosen for token in others(one, count)]


def _judged(
    chosen: Sequence[Chosen], drafted: Tensor, tokens: Tensor, p: Tensor, numbers: Tensor, rule: Rule
) -> Verdicts:
    """Verify chains `[B, n]`, of which `drafted` `[B]` tokens count, by a rule that draws `numbers`.

    `p` `[B, 1 + n, V]` are the target's probabilities.
    """
    q = [one.p for one in chosen if one.p is not None]
    if not q:
        return sample(p[:, 0], numbers)
    return SAMPLED[rule](Drafts(tokens, drafted, torch.stack(q, 1), numbers), p)


def _rows_of(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Return rows of `values` `[n, ..]`: a view if they are the first ones."""
    if list(rows) == list(range(len(rows))):
        return values[: len(rows)]
    return values.index_select(0, to_device(torch.tensor(rows), values.device))


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
    """Return the captured rounds of a cache whose passes are captured; None if they are not, or `ENV_VAR` is off.

    Without Triton kernels, whose verification has the bits of single steps at any width, and on devices that only
    replay what was recorded, in tests, `ENV_VAR` has to be on.
    """
    if graphs is None:
        return None
    on = switched(ENV_VAR)
    exact = graphs.device.type == "cuda" and graphs.passes.reads_lengths
    return DeviceRounds(graphs, full, everything=on is True) if (exact if on is None else on) else None
