"""What trains parts sees each family as the runtime does."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from families import FAMILY_CONFIGS, NAMES
from models import tiny
from trained import random_trained

from selfspec.models.low_precision import fake
from selfspec.models.quantized_sublayers import Trained
from selfspec.runtime.forward import LeanRuntime
from selfspec.training.bridges import fit_bridges
from selfspec.training.distill import DistillLearner
from selfspec.training.layerskip import LayerSkipLearner
from selfspec.training.learner import NETS, Learner
from selfspec.training.path_learner import PathLearner
from selfspec.training.texts import TrainingText, layers_of
from selfspec.types.draft_path import DraftPath

PATH = DraftPath.from_modes(
    ("full", "skip", "int8", "full", "skip", "full")
)  # attention, then MLPs: 1 is skipped whole
N = 16  # more than a window holds
every_configuration = pytest.mark.parametrize("name", FAMILY_CONFIGS)
every_family = pytest.mark.parametrize("name", NAMES)


@functools.cache
def runtime_of(name):
    return LeanRuntime(tiny(FAMILY_CONFIGS[name]), kernel=fake)


def tokens_for(n=N, seed=0):
    return torch.randint(0, 60, (n,), generator=torch.Generator().manual_seed(seed))


def near(ours, theirs):
    scale = theirs.abs().max()
    torch.testing.assert_close(ours.double() / scale, theirs / scale, atol=1e-3, rtol=0)


@every_configuration
def test_a_path_is_fitted_as_the_runtime_runs_it(name):
    """Step by step, each reading what those before it wrote, past windows."""
    runtime = runtime_of(name)
    trained = random_trained(runtime, PATH, rank=4)
    trained = Trained(trained.bridges, {at: update for at, update in trained.updates.items() if at in ((2, 0), (2, 1))})
    runtime.register_trained("both", trained)
    compiled = runtime.compile(replace(PATH, trained="both"))
    learner = PathLearner(runtime, PATH, trained, rank=2, loss="tv", seed=0)
    tokens = tokens_for()
    keys, stream = learner.net.model(tokens[None])
    learner.net.round()
    steps = [learner._logits(out[0]) for out in learner.net(tokens[None], keys, 2)]
    for start in (3, N - 2):
        with runtime.session(N):
            whole = runtime.forward(tokens[None, :start], 0)
            near(learner._logits(stream[0, :start]), whole.logits[0])
            for k in range(2):
                step = runtime.forward(tokens[None, start + k : start + k + 1], start + k, path=compiled)
                near(steps[k][start + k], step.logits[0, 0])


@every_family
def test_heads_learn_from_what_the_model_says(name):
    """Whatever the kind; a step of training makes the loss less."""
    runtime, layers = runtime_of(name), layers_of(3)
    tokens = tokens_for()
    with runtime.session(N):
        step = runtime.forward(tokens[None], 0, hidden=layers)
    streams = torch.stack([step.hidden[layer][0] for layer in layers], 1).clone()
    texts = [TrainingText(tokens, streams, 2)]
    for kind in NETS:
        learner = Learner(runtime, kind, range(61), layers, seed=0)
        near(learner._last(streams[:, -1]), step.logits[0].clone())
        optimizer = torch.optim.Adam(learner.net.parameters(), lr=1e-4)
        before = learner.loss([TrainingText(tokens, streams[: N - learner.depth], 2)])
        before.backward()
        optimizer.step()
        assert float(learner.loss([TrainingText(tokens, streams[: N - learner.depth], 2)])) < float(before)
        assert len(learner.acceptance(texts)) == learner.places


@every_family
def test_bridges_come_near_what_they_stand_for(name):
    runtime = runtime_of(name)
    texts = [TrainingText(tokens_for(24, seed), torch.zeros(24, 1, 1), 2) for seed in range(8)]
    found = fit_bridges(runtime, PATH, texts, texts)
    assert list(found.bridges) == [(1, 2)]
    assert all(t.isfinite().all() for t in (found.bridges[1, 2].onto, found.bridges[1, 2].bias))


@every_family
def test_students_learn(name):
    runtime = LeanRuntime(tiny(FAMILY_CONFIGS[name], dtype=torch.float32))
    windows = [TrainingText(tokens_for(), torch.zeros(N, 1, 1), 2)]
    for learner in (
        DistillLearner(runtime, student=None, layers=2, loss="tv", seed=0),
        LayerSkipLearner(runtime, layers=2, loss="tv", seed=0),
    ):
        loss = learner.loss(windows)
        loss.backward()
        assert loss.isfinite()
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in learner.net.parameters())
