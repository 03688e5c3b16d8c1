"""A checkpoint that is damaged, or of code, is not resumed; one that does not fit is refused in one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hostile import Code
from torch import nn

from selfspec.basics.errors import SelfspecError
from selfspec.training.state import State

CONFIG = {"kind": "toy"}


def learner(size=4):
    net = nn.Linear(size, size)
    return SimpleNamespace(net=net), torch.optim.AdamW(net.parameters())


def resumed(path):
    state, (net, optimizer) = State(path, CONFIG), learner()
    state.into(net, optimizer)
    state.best_into(net)
    return state


@pytest.fixture
def path(tmp_path):
    """The checkpoint of a training."""
    state = State(tmp_path / "toy.state", CONFIG)
    state.progress.steps = 3
    state.save(*learner(), [0.5, 0.25])
    return state.path


def test_a_checkpoint_is_resumed(path):
    state = resumed(path)
    assert state.resumable
    assert (state.progress.steps, state.progress.best, state.progress.history) == (3, 1.75, [(0.0, 1.75)])


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: saved["progress"].update(steps="many"),
        lambda saved: saved["progress"].update(history=[1]),
        lambda saved: saved.update(progress=None),
        lambda saved: saved.pop("best"),
        lambda saved: saved.clear(),
    ],
)
def test_a_damaged_checkpoint_is_not_resumed(change, path, caplog):
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)
    state = State(path, CONFIG)
    assert not state.resumable
    assert state.progress.steps == 0
    assert "the checkpoint cannot be resumed; fitting starts again" in caplog.text


def test_code_in_a_checkpoint_is_not_run(path, tmp_path, caplog):
    torch.save({"config": CONFIG, "progress": {}, "net": Code(tmp_path / "ran")}, path)
    assert not State(path, CONFIG).resumable
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("entry", ["net", "optimizer", "best"])
@pytest.mark.parametrize("other", [None, {}, {"weight": torch.zeros(1)}])
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line(entry, other, path):
    saved = torch.load(path, weights_only=True)
    torch.save({**saved, entry: other}, path)
    with pytest.raises(SelfspecError, match=r"toy.state: the checkpoint does not fit .*; delete it") as raised:
        resumed(path)
    assert "\n" not in str(raised.value)
