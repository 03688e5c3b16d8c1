"""Decoded sequences in `transformers`' batch format: one token per column, ended sequences padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteriaList

from selfspec.speculation.drafts import Outcome
from selfspec.speculation.sequence import SequenceState


class Columns:
    """The output of several sequences in columns: the next token of each sequence at a time.

    Rounds advance sequences by different numbers of tokens. A column is settled once every sequence that has not ended
    has its token. It then goes to the `criteria` and the `streamer`, which see the same input as in `transformers`.
    Tokens after the one at which a criterion ended a sequence are dropped. `ids` `[B, n]`: the padded prompts; `pad`:
    the token after the end of a sequence. With `scores` or `logits` these are kept for each column.
    """

    def __init__(
        self,
        ids: Tensor,
        seqs: Sequence[SequenceState],
        *,
        pad: int,
        criteria: StoppingCriteriaList,
        streamer: Any,
        scores: bool,
        logits: bool,
    ) -> None:
        self._prompt = ids.shape[1]
        max_new_tokens = max(seq.remaining for seq in seqs)
        self._ids = torch.cat([ids, ids.new_full((len(ids), max_new_tokens), pad)], dim=1)
        self._width = self._prompt
        self._seqs = list(seqs)
        self._starts = [len(seq.tokens) for seq in seqs]
        self._pad, self._criteria, self._streamer = pad, criteria, streamer
        self._done = [False] * len(self._seqs)
        self._raw: list[list[Tensor]] | None = [[] for _ in seqs] if scores or logits else None
        self._logits: list[Tensor] | None = [] if logits else None
        self._scores: list[Tensor] | None = [] if scores else None

    @property
    def open(self) -> bool:
        """Whether any sequence has not ended."""
        return not all(self._done)

    def take(self, outcomes: Sequence[tuple[SequenceState, Outcome]]) -> None:
        """Store the logits of a round; its tokens are in the sequences already."""
        if self._raw is None:
            return
        for seq, outcome in outcomes:
            logits = outcome.step.logits
            assert logits is not None
            rows = [0, *(node + 1 for node in outcome.path)][: len(outcome.tokens)]
            wide = torch.promote_types(logits.dtype, torch.float32)
            self._raw[self._seqs.index(seq)] += logits[0, rows].to(wide, copy=True)

    def settle(self) -> list[SequenceState]:
        """Settle all complete columns; return the sequences that ended in them."""
        ended: list[SequenceState] = []
        while self.open and all(done or self._has_next(row) for row, done in enumerate(self._done)):
            ended += self._settle_one()
        return ended

    def _has_next(self, row: int) -> bool:
        return len(self._seqs[row].tokens) > self._starts[row] + self._width - self._prompt

    def _settle_one(self) -> list[SequenceState]:
        place = self._width - self._prompt
        column = self._ids.new_tensor(
            [
                self._pad if done else seq.tokens[start + place]
                for seq, start, done in zip(self._seqs, self._starts, self._done, strict=True)
            ]
        )
        self._keep(place)
        self._ids[:, self._width] = column
        self._width += 1
        if self._streamer is not None:
            self._streamer.put(column.cpu())
        stops = self._stops()
        ended = []
        for row, seq in enumerate(self._seqs):
            if not self._done[row] and (stops[row] or not (seq.remaining or self._has_next(row))):
                self._done[row] = True
                ended.append(seq)
        return ended

    def _stops(self) -> list[bool]:
        if not len(self._criteria):
            return [False] * len(self._seqs)
        scores = None if self._scores is None else tuple(self._scores)
        stopped: list[bool] = self._criteria(self._ids[:, : self._width], scores).tolist()
        return stopped

    def _keep(self, place: int) -> None:
        """Store the logits and scores of a column; zeros for ended sequences."""
        if self._raw is None:
            return
        rows = [None if done else raw[place] for raw, done in zip(self._raw, self._done, strict=True)]
        blank = torch.zeros_like(next(row for row in rows if row is not None))
        if self._logits is not None:
            self._logits.append(torch.stack([blank if row is None else row for row in rows]))
        if self._scores is not None:
            scored = [blank if row is None else self._score(number, row, place) for number, row in enumerate(rows)]
            self._scores.append(torch.stack(scored))

    def _score(self, number: int, logits: Tensor, place: int) -> Tensor:
        seq = self._seqs[number]
        before = seq.tokens[: self._starts[number] + place]
        scores: Tensor = seq.sampler.scores(logits.unsqueeze(0), [before])[0]
        return scores

    def result(self, *, as_object: bool) -> Tensor | GenerateDecoderOnlyOutput:
        """Return the prompts with the settled columns `[B, n + m]`, alone or in generate's output object."""
        if self._streamer is not None:
            self._streamer.end()
        ids: Tensor = self._ids[:, : self._width]
        if not as_object:
            return ids
        output: GenerateDecoderOnlyOutput = GenerateDecoderOnlyOutput(
            sequences=ids,
            scores=None if self._scores is None else tuple(self._scores),
            logits=None if self._logits is None else tuple(self._logits),
        )
        return output
