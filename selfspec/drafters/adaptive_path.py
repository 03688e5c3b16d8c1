"""Drafters that choose each sequence's skip set during decoding: SWIFT and CLaSp."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError, UnsupportedModelError
from selfspec.controllers import Controller
from selfspec.drafters.autoregressive import Chain
from selfspec.drafters.layer_skip import LayerSkipDrafter
from selfspec.proposers.base import ProposerChain
from selfspec.runtime.base import Runtime
from selfspec.runtime.compiled_path import CompiledPath
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.acceptance import PROBABILITY, Confidence
from selfspec.types.draft_path import SkipSet, as_path
from selfspec.types.methods import WIDEST_DRAFT

LONGEST = 8  # longest draft length considered when a skip set's speed is estimated


def every_second(layers: int) -> SkipSet:
    """Return SWIFT's initial skip set: every second layer, without the last layer."""
    second = tuple(range(1, layers - 1, 2))
    return SkipSet(second, second)


class AdaptivePathDrafter(LayerSkipDrafter):
    """Base of drafters that choose each sequence's skip set during decoding; until then it is `start`.

    A choice depends only on the text and the target's hidden states, and is made before any token of the draft is
    drawn. So drafted tokens follow the distribution q that is recorded for verification. Raises as `LayerSkipDrafter`
    does, and `UnsupportedModelError` for a model that takes no attention mask per token.
    """

    on_device = False

    def __init__(
        self,
        runtime: Runtime,
        controller: Controller,
        *,
        candidates: int = 1,
        confidence: Confidence = PROBABILITY,
        proposer_chain: ProposerChain | None = None,
    ) -> None:
        if not runtime.trees:
            raise UnsupportedModelError(
                f"{type(runtime.model).__name__} takes no attention mask per token, with which paths are compared "
                "during decoding; expected a draft path from a profile, or another drafter"
            )
        self.start = every_second(runtime.layers)
        super().__init__(
            runtime, self.start, controller, candidates=candidates, confidence=confidence, proposer_chain=proposer_chain
        )
        self._first = self._compiled
        self._compiled_paths: dict[SequenceState, CompiledPath] = {}

    @abstractmethod
    def _choose(self, seq: SequenceState) -> SkipSet | None:
        """Return the skip set for the sequence's next drafts; None: keep the current skip set."""

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """Return a draft along the path of each sequence; sequences with the same path draft in lockstep."""
        for seq in seqs:
            if (skip_set := self._choose(seq)) is not None:
                self._compiled_paths[seq] = self.runtime.compile(as_path(skip_set))
        return super().propose(seqs, limits)

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence and its path."""
        super().end(seq)
        self._compiled_paths.pop(seq, None)

    def _pass(self, chains: Sequence[Chain]) -> None:
        together: dict[CompiledPath, list[Chain]] = {}
        for chain in chains:
            together.setdefault(self._compiled_paths.get(chain.seq, self._first), []).append(chain)
        for compiled, group in together.items():
            self._compiled = compiled
            super()._pass(group)


@dataclass(slots=True)
class _Study:
    """State of a sequence's search for a skip set.

    `best`: the best skip set so far; `idle`: consecutive trials without a better set; `wait`: rounds to the next trial.
    """

    best: SkipSet
    random: random.Random
    idle: int = 0
    wait: int = 0


class SwiftDrafter(AdaptivePathDrafter):
    """Layer-skip drafter that searches for a better skip set during decoding (SWIFT, Xia et al. 2410.06916).

    Every `every` rounds a trial compares the best skip set so far with a neighbour, which differs in one or two
    sub-layers. Each of these two sets runs the text's last `window` tokens in one pass, in which a token attends to the
    full model's keys and values of the tokens before it, and to itself. The set with the higher estimated tokens per
    second is kept; the estimate uses the share of tokens whose argmax matches the text, and the cost of the set. The
    first and last layer are never skipped. After `patience` consecutive trials without a better set the search ends. An
    unseeded sequence begins with the best set of the previous unseeded sequence.

    Differences from the paper: the kept set has the highest estimated tokens per second, instead of the most matches
    at a fixed size; both sets are compared on the same text; there is no global state, and sampling is exact. Raises
    `SelfspecError` for a `window` that no verification pass holds, and as `LayerSkipDrafter` does.
    """

    def __init__(
        self,
        runtime: Runtime,
        controller: Controller,
        *,
        window: int = 32,
        every: int = 8,
        patience: int = 40,
        candidates: int = 1,
        confidence: Confidence = PROBABILITY,
        proposer_chain: ProposerChain | None = None,
    ) -> None:
        if not 1 <= window <= WIDEST_DRAFT:
            raise SelfspecError(f"window {window}: expected 1 to {WIDEST_DRAFT} tokens")
        super().__init__(
            runtime, controller, candidates=candidates, confidence=confidence, proposer_chain=proposer_chain
        )
        self.window, self.every, self.patience = window, every, patience
        self._known = self.start
        self._studies: dict[SequenceState, _Study] = {}
        inner = range(1, runtime.layers - 1)
        self._parts = [(part, layer) for part in ("attention", "mlp") for layer in inner]
        self._shares = _shares(runtime)

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Start a search for the sequence."""
        super().begin(seq, prefill)
        seeded = seq.sampler.seeded
        self._studies[seq] = _Study(self.start if seeded else self._known, random.Random(0))
        if not seeded and self._known != self.start:
            self._compiled_paths[seq] = self.runtime.compile(as_path(self._known))

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence; the best set of an unseeded sequence is kept for the next unseeded sequence."""
        super().end(seq)
        study = self._studies.pop(seq, None)
        if study is not None and not seq.sampler.seeded:
            self._known = study.best

    def _choose(self, seq: SequenceState) -> SkipSet | None:
        study = self._studies.get(seq)
        if study is None:
            return None
        study.wait -= 1
        if study.wait >= 0 or study.idle >= self.patience or not self._parts or len(seq.tokens) <= 2:
            return None
        study.wait = self.every - 1
        other = self._neighbour(study)
        best, mine = (self._promise(seq, skip) for skip in (study.best, other))
        study.idle = 0 if mine > best else study.idle + 1
        if mine <= best:
            return None
        study.best = other
        return other

    def _neighbour(self, study: _Study) -> SkipSet:
        """Return the best set with one random sub-layer added, removed or exchanged."""
        chosen = {("attention", i) for i in study.best.attention} | {("mlp", i) for i in study.best.mlp}
        rest = [part for part in self._parts if part not in chosen]
        inside = [part for part in self._parts if part in chosen]
        kinds = [kind for kind, can in (("more", rest), ("less", inside), ("swap", rest and inside)) if can]
        kind = study.random.choice(kinds)
        if kind != "less":
            chosen.add(study.random.choice(rest))
        if kind != "more":
            chosen.remove(study.random.choice(inside))
        return SkipSet(
            tuple(sorted(i for part, i in chosen if part == "attention")),
            tuple(sorted(i for part, i in chosen if part == "mlp")),
        )

    def _promise(self, seq: SequenceState, skip: SkipSet) -> float:
        """Estimate the tokens that drafting with a skip set emits in a plain step's time, from `_matches`."""
        right, tried = self._matches(seq, skip)
        share, (attention, mlp) = (right + 1) / (tried + 2), self._shares
        cost = 1 - (attention * len(skip.attention) + mlp * len(skip.mlp)) / self.runtime.layers
        tokens, best = 1.0, 0.0
        for length in range(1, LONGEST + 1):
            tokens += share**length
            best = max(best, tokens / (1 + length * cost))
        return best

    def _matches(self, seq: SequenceState, skip: SkipSet) -> tuple[int, int]:
        """Return how many of the text's last tokens the path's argmax predicts, and how many were compared."""
        last = len(seq.tokens) - 1
        width = min(self.window, last)
        first, device = last - width, self.runtime.device
        places = torch.arange(first, last, device=device).unsqueeze(0)
        slots = torch.arange(last, last + width, device=device).unsqueeze(0)
        mask = torch.zeros((1, width, last + width), dtype=torch.bool, device=device)
        mask[0, :, :last] = torch.arange(last, device=device) < places[0].unsqueeze(1)
        mask[0, :, last:] = torch.eye(width, dtype=torch.bool, device=device)
        step = self.runtime.forward(
            torch.tensor([seq.tokens[first:last]], device=device),
            places,
            path=self.runtime.compile(as_path(skip)),
            slots=slots,
            mask=mask,
            rows=slice(seq.row, seq.row + 1),
        )
        assert step.logits is not None
        next_tokens = torch.tensor(seq.tokens[first + 1 :], device=device)
        return int((step.logits[0].argmax(-1) == next_tokens).sum()), width


def _shares(runtime: Runtime) -> tuple[float, float]:
    """Return the shares of all attention and of all MLP sub-layers in the weights that a plain step reads."""
    s = runtime.skeleton.sizes
    attention = runtime.layers * s.hidden * s.head_dim * (2 * s.heads + 2 * s.kv_heads)
    mlp = runtime.layers * 3 * s.hidden * s.intermediate
    total = attention + mlp + s.hidden * (runtime.skeleton.identity.vocabulary or 1)
    return attention / total, mlp / total


class ClaspDrafter(AdaptivePathDrafter):
    """Layer-skip drafter that chooses the skipped layers again every `every` rounds (CLaSp, Chen et al. 2505.24196).

    A dynamic programme over the layers runs at the position of the last verified token. Layer by layer, for each number
    of layers skipped so far, it keeps the skip set whose hidden state has the highest cosine similarity to the full
    model's hidden state. All of these sets run as the `skip` + 1 rows of one pass. `skip`: the number of skipped
    layers; None: half of the layers. Raises `SelfspecError` for a `skip` that the model or a verification pass cannot
    hold, and as `LayerSkipDrafter` does.
    """

    def __init__(
        self,
        runtime: Runtime,
        controller: Controller,
        *,
        skip: int | None = None,
        every: int = 16,
        candidates: int = 1,
        confidence: Confidence = PROBABILITY,
        proposer_chain: ProposerChain | None = None,
    ) -> None:
        layers = runtime.layers
        skip = max(1, layers // 2) if skip is None else skip
        if not 1 <= skip <= min(layers, WIDEST_DRAFT - 1):
            raise SelfspecError(
                f"skip {skip}: expected 1 to {min(layers, WIDEST_DRAFT - 1)} of the model's {layers} layers"
            )
        super().__init__(
            runtime, controller, candidates=candidates, confidence=confidence, proposer_chain=proposer_chain
        )
        self.skip, self.every = skip, every
        self.hidden = tuple(range(layers + 1))
        self._hidden_states: dict[SequenceState, tuple[int, list[Tensor]]] = {}  # and the text's length
        self._rounds: dict[SequenceState, int] = {}

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Store the full model's hidden states at the last verified token, if the next round chooses a skip set."""
        super().observe(seq, outcome)
        self._rounds[seq] = rounds = self._rounds.get(seq, -1) + 1
        if rounds % self.every == 0 and seq.remaining:
            row = [0, *(node + 1 for node in outcome.path)][: len(outcome.tokens)][-1]
            states = [outcome.step.hidden[layer][0, row].clone() for layer in self.hidden]
            self._hidden_states[seq] = len(seq.tokens), states

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence."""
        super().end(seq)
        self._hidden_states.pop(seq, None)
        self._rounds.pop(seq, None)

    def _choose(self, seq: SequenceState) -> SkipSet | None:
        length, streams = self._hidden_states.pop(seq, (0, ()))
        if length != len(seq.tokens):
            if streams:  # of an earlier round, as none was asked for since: choose after the next one
                self._rounds[seq] = -1
            return None
        layers = self._programme(seq, streams)
        return SkipSet(layers, layers)

    def _programme(self, seq: SequenceState, streams: Sequence[Tensor]) -> tuple[int, ...]:
        """Return the layers to skip, by dynamic programming.

        `streams`: the full model's hidden states `[D]` that enter each layer, and those that leave the last layer.
        """
        last, width = len(seq.tokens) - 1, self.skip + 1
        place, device = last - 1, self.runtime.device
        slots = torch.arange(last, last + width, device=device).unsqueeze(0)
        mask = torch.zeros((1, width, last + width), dtype=torch.bool, device=device)
        mask[0, :, :place] = True
        mask[0, :, last:] = torch.eye(width, dtype=torch.bool, device=device)
        rows = slice(seq.row, seq.row + 1)
        places = torch.full_like(slots, place)
        states = streams[0].expand(width, -1)  # row i: i layers skipped
        reached = torch.arange(width) == 0
        taken: list[list[bool]] = []
        for layer in range(self.runtime.layers):
            ran = states.unsqueeze(0)
            added = self.runtime.branch(layer, "attention", ran, places, slots=slots, mask=mask, rows=rows)
            ran = ran + added.to(ran.device)
            ran = (ran + self.runtime.branch(layer, "mlp", ran, places).to(ran.device))[0]
            less = states.roll(1, 0)
            goal = streams[layer + 1].to(ran.device)
            with_it, without = (_cosine_similarity(hidden, goal) for hidden in (ran, less))
            before = reached.roll(1)
            before[0] = False
            skip = before & (~reached | (without > with_it))
            taken.append(skip.tolist())
            states = torch.where(skip.to(ran.device).unsqueeze(1), less, ran)
            reached = reached | before
        left, skipped = self.skip, list[int]()
        for layer in reversed(range(self.runtime.layers)):
            if taken[layer][left]:
                skipped.append(layer)
                left -= 1
        return tuple(reversed(skipped))


def _cosine_similarity(streams: Tensor, goal: Tensor) -> Tensor:
    """Return the cosine similarity of each hidden state `[n, D]` to the goal `[D]`, on the CPU."""
    return torch.cosine_similarity(streams.float(), goal.float().unsqueeze(0), dim=-1).cpu()
