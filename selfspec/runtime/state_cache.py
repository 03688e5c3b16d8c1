"""A KV cache of a model with layers whose state cannot be cropped (recurrent, compressed), and passes along it.

A state has no slots to forget. So it stands where the full model has last verified every token. The next pass begins
with the tokens after that point: they are known, and cost width alone. Layers with slots write these slots again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfspec.basics.errors import UnsupportedModelError
from selfspec.runtime.cache import Cache, Move
from selfspec.runtime.hf_cache_layout import copied
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.types.methods import WIDEST_DRAFT


@dataclass(frozen=True, slots=True)
class StateAt:
    """The states of all layers after a row's first `length` tokens, by a draft path (None: by the full model)."""

    length: int
    layers: list[Any]
    path: Any = None


class StateCache(Cache):
    """A KV cache whose rows have, beside slots, the states of layers without slots.

    `fresh`: the states before the first token; None for a layer without state. `sizes` are the arguments of `Cache`.

    `token_ids` `[rows, slots]` are the tokens of all slots. `verified[row]` is the full model's state after committed
    tokens. `latest[row]` is its state after the latest pass, whose tokens may yet be rejected. `drafted[row]` is the
    state of the latest pass along a draft path. A state is forgotten when a slot that it has read is written again.
    """

    def __init__(self, fresh: Sequence[Any], **sizes: Any) -> None:
        super().__init__(**sizes)
        self._fresh = fresh
        self.token_ids = torch.zeros((self.rows, self.slots), dtype=torch.long)
        self.verified = [StateAt(0, list(fresh)) for _ in range(self.rows)]
        self.latest: list[StateAt | None] = [None] * self.rows
        self.drafted: list[StateAt | None] = [None] * self.rows

    def begin(self, row: int, slot: int, tokens: Tensor, path: Any) -> tuple[StateAt, Tensor]:
        """Begin a pass along `path` (None: the full model) over the tokens `[n]` of the slots from `slot` on.

        Returns a copy of the longest state that is known before `slot`, which a draft path may have only from its own
        last pass or the full model, and the tokens `[m + n]` that the pass must read from there on. The pass writes
        their slots, so states that have read these slots are forgotten.
        """
        own = self.drafted[row]
        known = [self.verified[row], self.latest[row], own if path is not None and own and own.path is path else None]
        state = max((s for s in known if s is not None and s.length <= slot), key=_length)
        self._forget(row, state.length)
        self.token_ids[row, slot : slot + len(tokens)] = tokens.to(self.token_ids.device)
        return StateAt(state.length, copied(state.layers), path), self.token_ids[row, state.length : slot + len(tokens)]

    def finish(self, row: int, state: StateAt) -> None:
        """Record the state after a pass of the full model, or along the draft path `state.path`."""
        (self.latest if state.path is None else self.drafted)[row] = state

    def _forget(self, row: int, slot: int) -> None:
        """Forget the states of a row that have read more than its first `slot` tokens."""
        if self.verified[row].length > slot:
            self.verified[row] = StateAt(0, list(self._fresh))
        for states in (self.latest, self.drafted):
            state = states[row]
            if state is not None and state.length > slot:
                states[row] = None

    @property
    def bytes(self) -> int:
        """Size of the keys, values and verified states in bytes."""
        return super().bytes + sum(_bytes(vars(s)) for at in self.verified for s in at.layers if s is not None)

    def clear(self, row: int) -> None:
        """Set a row's length to zero, and drop its tokens and states."""
        super().clear(row)
        self._forget(row, 0)

    def rewind(self, row: int, length: int) -> None:
        """Set a row's length; a state that has read more tokens is forgotten, and computed again by the next pass."""
        super().rewind(row, length)
        self._forget(row, length)

    def commit(self, row: int, path: Sequence[int]) -> None:
        """Commit the accepted tokens as `Cache.commit`; the latest pass's state is kept if it has read no others."""
        super().commit(row, path)
        latest = self.latest[row]
        if latest is not None and latest.length <= self.length[row]:
            self.verified[row], self.latest[row] = latest, None

    def move(self, move: Move) -> None:
        """Copy keys, values and tokens as `Cache.move`; states are not copied."""
        super().move(move)
        row, source, start, slots = move
        self._forget(row, start)
        self.token_ids[row, start : start + len(slots)] = self.token_ids[source, torch.tensor(slots)]

    def copy_from(self, other: Cache) -> None:
        """Copy committed slots, lengths, tokens and states of `other`, a smaller cache of the same model."""
        assert isinstance(other, StateCache)
        super().copy_from(other)
        self.token_ids[:, : other.slots] = other.token_ids
        self.verified, self.latest = list(other.verified), list(other.latest)


def _length(state: StateAt) -> int:
    return state.length


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_bytes, items))


Run = Callable[[Tensor, int, int, list[Any]], ForwardOutput]
"""`run(tokens, slot, row, states)`: a pass over tokens `[1, n]` from `slot` on in one row, which changes the states."""


def run_rows(
    cache: StateCache,
    tokens: Tensor,
    positions: int | Tensor,
    slots: int | Tensor,
    rows: slice,
    *,
    path: Any,
    run: Run,
    advance: Run,
) -> ForwardOutput:
    """Run `tokens` `[B, n]` from slot `slots` on, in the B cache `rows` one after the other; return their outputs.

    Each row's pass begins with the committed tokens that its state has not seen. If these are more than a verification
    pass holds, `advance` runs the full model over them first. Raises `UnsupportedModelError` for slots that are not
    the positions.
    """
    if not isinstance(slots, int) or not isinstance(positions, int) or slots != positions:
        raise UnsupportedModelError("this model has layers with a state: expected a chain of tokens, without a mask")
    n, outputs = tokens.shape[1], list[ForwardOutput]()
    for row, row_tokens in zip(range(cache.rows)[rows], tokens, strict=True):
        committed = min(cache.length[row], slots)
        if committed - cache.verified[row].length > WIDEST_DRAFT:
            _advance(cache, row, committed, lambda ids, *rest: advance(ids.to(tokens.device), *rest))
        state, ids = cache.begin(row, slots, row_tokens, path)
        output = run(ids[None].to(tokens.device), state.length, row, state.layers)
        cache.finish(row, StateAt(slots + n, state.layers, path))
        outputs.append(_last(output, n))
    return _stacked(outputs)


def _advance(cache: StateCache, row: int, length: int, advance: Run) -> None:
    """Move the verified state of a row to its first `length` tokens, all committed."""
    start = cache.verified[row].length
    state, ids = cache.begin(row, start, cache.token_ids[row, start:length], None)
    advance(ids[None], state.length, row, state.layers)
    cache.verified[row] = StateAt(length, state.layers)


def _last(output: ForwardOutput, n: int) -> ForwardOutput:
    """Return the output for the last n tokens; logits may be of the last token alone."""
    hidden, between = ({layer: s[:, -n:] for layer, s in part.items()} for part in (output.hidden, output.between))
    return ForwardOutput(None if output.logits is None else output.logits[:, -n:], hidden, between)


def _stacked(outputs: Sequence[ForwardOutput]) -> ForwardOutput:
    """Return the outputs of several rows as one output of a batch."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    hidden = {layer: torch.cat([output.hidden[layer] for output in outputs]) for layer in first.hidden}
    between = {layer: torch.cat([output.between[layer] for output in outputs]) for layer in first.between}
    logits = [output.logits for output in outputs if output.logits is not None]
    return ForwardOutput(torch.cat(logits) if logits else None, hidden, between)
