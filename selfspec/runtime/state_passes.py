"""Passes of models with recurrent layers, whose state cannot be cropped to fewer tokens.

The rows of a batch run one after the other; each starts from the latest state that the cache has for its path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from selfspec.basics.errors import UnsupportedModelError
from selfspec.runtime.state_cache import StateAt, StateCache
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.types.methods import WIDEST_DRAFT

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
