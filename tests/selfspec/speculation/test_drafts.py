from __future__ import annotations

import pytest
import torch

from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput

TREE = Draft((5, 6, 7, 8), (-1, -1, 0, 2), None, (-1,) * 4, (0.9, 0.8, 0.7, 0.6))


def test_a_tree_knows_its_shape():
    assert not TREE.is_chain
    assert TREE.depths == (1, 1, 2, 3)
    assert TREE.depth == 3
    assert TREE.children == ((0, 1), (2,), (), (3,), ())
    assert TREE.path_to(3) == (0, 2, 3)
    assert list(TREE.prefixes([1])) == [[1], [1, 5], [1, 6], [1, 5, 7], [1, 5, 7, 8]]


def test_a_chain_knows_its_shape():
    chain = Draft.chain([4, 5], q=torch.ones(2, 9))
    assert chain.is_chain
    assert chain.q_row == (0, 1)
    assert (NO_DRAFT.depth, len(NO_DRAFT), NO_DRAFT.is_chain) == (0, 0, True)


def test_the_backbone_is_the_chain_of_first_children():
    backbone = TREE.backbone()
    assert backbone.tokens == (5, 7, 8)
    assert backbone.is_chain
    assert backbone.confidence == (0.9, 0.7, 0.6)


def test_accepted_tokens_are_those_that_were_emitted():
    chain = Draft.chain([4, 5, 6])
    assert Outcome(chain, (0, 1, 2), (4, 5, 6, 7), ForwardOutput(None)).accepted == 3
    assert Outcome(chain, (0, 1, 2), (4, 5), ForwardOutput(None)).accepted == 2  # a stop string in between


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": (1,), "parents": (), "q_row": ()},
        {"tokens": (1,), "parents": (0,), "q_row": (-1,)},
        {"tokens": (1,), "parents": (-2,), "q_row": (-1,)},
        {"tokens": (1,), "parents": (-1,), "q_row": (0,)},
        {"tokens": (1,), "parents": (-1,), "q_row": (1,), "q": torch.ones(1, 3)},
    ],
    ids=str,
)
def test_a_wrong_draft_is_refused(wrong):
    with pytest.raises(ValueError, match="a draft"):
        Draft(**wrong)


def test_leaves_hang_beside_a_chain_whose_tokens_stay_first():
    draft = Draft.chain([5, 6], q=torch.eye(2, 9), confidence=[0.5, 0.25]).with_candidates([[7, 8], [4]])
    assert draft.tokens == (5, 6, 7, 8, 4)
    assert draft.children == ((0, 2, 3), (1, 4), (), (), (), ())
    assert draft.q_row == (0, 1, 0, 0, 1)
    assert draft.depth == 2
    assert draft.backbone() == Draft.chain([5, 6], q=draft.q, confidence=[0.5, 0.25])
