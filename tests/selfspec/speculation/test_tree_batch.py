from __future__ import annotations

import torch

from selfspec.speculation.drafts import Draft
from selfspec.speculation.tree_batch import PlacedDraft, lay_out

CPU, SPARE = torch.device("cpu"), 99
TREE = Draft((5, 6, 7, 8), (-1, -1, 0, 2), None, (-1,) * 4)
SEEN = [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]  # of the tree, by its root and tokens


def test_a_chain_needs_no_mask():
    laid = lay_out([PlacedDraft(2, 9, 3, Draft.chain([4, 5]))], spare=SPARE, device=CPU)
    assert laid.tokens.tolist() == [[9, 4, 5]]
    assert (laid.positions, laid.slots, laid.mask, laid.rows, laid.batch_rows) == (3, 3, None, slice(2, 3), (0,))


def test_a_tree_stands_in_a_run_of_slots():
    laid = lay_out([PlacedDraft(0, 9, 2, TREE)], spare=SPARE, device=CPU)
    assert laid.tokens.tolist() == [[9, 5, 6, 7, 8]]
    assert laid.positions.tolist() == [[2, 3, 3, 4, 5]]
    assert laid.slots == 2
    assert laid.mask[0].int().tolist() == [[1, 1, 1, *seen] for seen in SEEN]


def test_drafts_of_several_rows_are_padded_to_the_spare_slot():
    """A chain of one in row 1, nothing in row 2, a tree in row 3; and no draft at all in row 4."""
    placed = [PlacedDraft(3, 9, 2, TREE), PlacedDraft(1, 8, 1, Draft.chain([4])), PlacedDraft(4, 7, 0)]
    laid = lay_out(placed, spare=SPARE, device=CPU)
    assert (laid.rows, laid.batch_rows) == (slice(1, 5), (2, 0, 3))
    assert laid.tokens.tolist() == [[8, 4, 0, 0, 0], [0] * 5, [9, 5, 6, 7, 8], [7, 0, 0, 0, 0]]
    assert laid.positions.tolist() == [[1, 2, 0, 0, 0], [0] * 5, [2, 3, 3, 4, 5], [0] * 5]
    assert laid.slots.tolist() == [[1, 2, 99, 99, 99], [99] * 5, [2, 3, 4, 5, 6], [0, 99, 99, 99, 99]]
    mask = laid.mask.int().tolist()
    assert mask[0][:2] == [[1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]]
    assert mask[2] == [[1, 1, 1, *seen] for seen in SEEN]
    assert mask[3][0] == [1, 0, 0, 0, 0, 0, 0]
    padding = [1, 0, 0, 0, 0, 0, 0]  # it sees something, so that no row is without
    assert mask[0][2:] == [padding] * 3
    assert mask[1] == [padding] * 5
