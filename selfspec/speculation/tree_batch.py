"""The layout of several sequences' drafts in one batch, with tree attention masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.speculation.drafts import NO_DRAFT, Draft


class PlacedDraft(NamedTuple):
    """A draft below the token `root`, which has sequence position and cache slot `start` in cache row `row`."""

    row: int
    root: int
    start: int
    draft: Draft = NO_DRAFT


class TreeBatch(NamedTuple):
    """Tokens `[B, n]` of one pass, with positions, slots, mask `[B, n, S]` and cache rows as `forward` takes them.

    A draft's root comes first, then its tokens in order. `batch_rows[i]`: the batch row of the i-th draft.
    """

    tokens: Tensor
    positions: int | Tensor
    slots: int | Tensor
    mask: Tensor | None
    rows: slice
    batch_rows: tuple[int, ...]


def lay_out(placed: Sequence[PlacedDraft], *, spare: int, device: torch.device) -> TreeBatch:
    """Return the batch of these drafts; token i of a draft has slot `start + 1 + i` and the position of its depth.

    Each token attends to all slots before its root, its root, its ancestors and itself. Shorter drafts, and cache rows
    in between without a draft, are padded. Padding is written to the slot `spare`, to which no token attends.
    """
    if len(placed) == 1:
        return _alone(placed[0], device)
    first = min(entry.row for entry in placed)
    shape = (max(entry.row for entry in placed) + 1 - first, 1 + max(len(entry.draft) for entry in placed))
    tokens = torch.zeros(shape, dtype=torch.long)
    positions, slots = tokens.clone(), torch.full(shape, spare)
    mask = torch.zeros((*shape, max(entry.start + 1 + len(entry.draft) for entry in placed)), dtype=torch.bool)
    mask[:, :, 0] = True  # so that padding attends to some slot
    for entry in placed:
        b, n, start = entry.row - first, 1 + len(entry.draft), entry.start
        tokens[b, :n] = torch.tensor([entry.root, *entry.draft.tokens])
        positions[b, :n] = torch.tensor([start, *(start + depth for depth in entry.draft.depths)])
        slots[b, :n] = torch.arange(start, start + n)
        mask[b, :n, : start + 1] = True
        mask[b, :n, start + 1 : start + n] = tree_mask(entry.draft)
    rows = slice(first, first + shape[0])
    batch_rows = tuple(entry.row - first for entry in placed)
    return TreeBatch(tokens.to(device), positions.to(device), slots.to(device), mask.to(device), rows, batch_rows)


def _alone(entry: PlacedDraft, device: torch.device) -> TreeBatch:
    """Return the batch of a single draft; its slots are consecutive, and a draft without branches needs no mask."""
    row, root, start, draft = entry
    tokens = torch.tensor([[root, *draft.tokens]], device=device)
    rows = slice(row, row + 1)
    if draft.is_chain:
        return TreeBatch(tokens, start, start, None, rows, (0,))
    positions = torch.tensor([[start, *(start + depth for depth in draft.depths)]], device=device)
    mask = torch.ones((1, 1 + len(draft), start + 1 + len(draft)), dtype=torch.bool)
    mask[0, :, start + 1 :] = tree_mask(draft)
    return TreeBatch(tokens, positions, start, mask.to(device), rows, (0,))


def tree_mask(draft: Draft) -> Tensor:
    """Return the tree attention mask `[1 + m, m]` of the root and each token: its ancestors and itself."""
    rows = [[False] * len(draft)]
    for node, parent in enumerate(draft.parents):
        visible = list(rows[parent + 1])
        visible[node] = True
        rows.append(visible)
    return torch.tensor(rows, dtype=torch.bool).view(1 + len(draft), len(draft))
