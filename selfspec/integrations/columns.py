"""Decoded sequences as the tensor `[B, n + m]` that `generate` of `transformers` returns.

B sequences, n tokens of padded prompts, m new tokens of the longest sequence; ended sequences are padded on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteriaList

from selfspec.speculation.drafts import Outcome
from selfspec.speculation.sequence import SequenceState


class Columns:
    """The output batch of several sequences, built column by column; a column holds the next token of each sequence.

    Rounds advance sequences by different numbers of tokens. A column is settled once every sequence that has not ended
    has decoded its token for that column. The stopping `criteria` and the `streamer` (None: no streamer) then receive
    the column, with the same input as in `transformers`. When a criterion ends a sequence, tokens that the sequence has
    already decoded for later columns are dropped. `ids` `[B, n]`: the padded prompts. `pad`: the token that fills the
    columns after the end of a sequence. `scores` and `logits`: whether to store processed scores and raw logits.
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
        """Store the logits of a round, if requested; the sequences already hold the round's tokens."""
        if self._raw is None:
            return
        for seq, outcome in outcomes:
            logits = outcome.step.logits
            assert logits is not None
            rows = [0, *(node + 1 for node in outcome.path)][: len(outcome.tokens)]
            wide = torch.promote_types(logits.dtype, torch.float32)
            self._raw[self._seqs.index(seq)] += logits[0, rows].to(wide, copy=True)

    def settle(self) -> list[SequenceState]:
        """Settle all complete columns; return the sequences that ended in these columns."""
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
        """Store the logits and scores of new column `place` (from 0), if requested; zeros for ended sequences."""
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
        """Return the prompts followed by the settled columns, `[B, n + m]`.

        With `as_object` the result is generate's output object, with the stored scores and logits.
        """
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
