"""Fitting what belongs to a draft path: bridges in closed form, changes of weights by distillation."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from models import CONFIGS, tiny
from trained import random_trained

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.models.low_precision import fake
from selfspec.models.quantized_sublayers import Trained, Update
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.reading import read_profile
from selfspec.runtime.forward import LeanRuntime
from selfspec.training.bridges import agreement, drafted, fit_bridges
from selfspec.training.fit import SilentTraining, fit
from selfspec.training.options import TrainOptions
from selfspec.training.path_learner import LOSSES, PathLearner
from selfspec.training.path_training import RANK, adapter_rank
from selfspec.training.texts import TrainingText
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath

FEW = {"max_new_tokens": 24, "batch_size": 8, "texts": 20}
MODES = ("full", "skip", "skip", "int4", "full", "skip", "skip", "int8")  # attention, then MLPs: 1 and 2 skipped
PATH = DraftPath.from_modes(MODES)


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(tiny(CONFIGS["llama"]), kernel=fake)


def texts(count, length=24, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        TrainingText(torch.randint(0, 60, (length,), generator=draw), torch.zeros(length, 1, 1), 2)
        for _ in range(count)
    ]


def test_the_draft_reads_the_models_keys_of_what_came_before(runtime):
    """As the first token of every draft does, after a prompt that the whole model has read."""
    (text,) = texts(1, 9)
    compiled = runtime.compile(PATH)
    whole, own = drafted(runtime, compiled, text.tokens, of_draft=[3])
    with runtime.session(16):
        torch.testing.assert_close(runtime.forward(text.tokens[None], 0).logits, whole.logits)
        for at in (0, 4, 8):
            runtime.cache.clear(0)
            if at:
                runtime.forward(text.tokens[None, :at], 0, logits=None)
            step = runtime.forward(text.tokens[None, at : at + 1], at, path=compiled, hidden=[3])
            torch.testing.assert_close(step.logits[0, 0], own.logits[0, at])
            torch.testing.assert_close(step.hidden[3][0, 0], own.hidden[3][0, at])


@pytest.mark.parametrize("rank", [None, 4])
def test_bridges_are_the_maps_of_least_squares(runtime, rank):
    """Each between the draft's own stream, bridges before it and all, and the model's."""
    path = DraftPath.from_modes(("full", "skip", "full", "skip") * 2)
    seen = texts(12)
    found = fit_bridges(runtime, path, seen, seen, rank=rank)
    assert list(found.bridges) == [(1, 2), (3, 4)]
    runtime.register_trained(f"first {rank}", Trained({(1, 2): found.bridges[1, 2]}))
    compiled = runtime.compile(replace(path, trained=f"first {rank}"))
    both = [drafted(runtime, compiled, text.tokens, of_model=[4], of_draft=[3]) for text in seen]
    x = torch.cat([own.hidden[3][0] for _, own in both])
    y = torch.cat([whole.hidden[4][0] for whole, _ in both]) - x
    mean_x, mean_y = x.mean(0), y.mean(0)
    bridge = found.bridges[3, 4]
    map_ = (bridge.onto if rank is None else bridge.onto @ bridge.into).double().t()
    best = torch.linalg.lstsq(x - mean_x, y - mean_y).solution
    if rank is not None:
        _, _, v = torch.linalg.svd((x - mean_x) @ best)
        best = best @ v[:rank].t() @ v[:rank]
        assert bridge.into.shape == (rank, 32)
    torch.testing.assert_close(map_, best, rtol=0.05, atol=0.02)  # the least ridge is not none
    torch.testing.assert_close(bridge.bias.double(), mean_y - mean_x @ map_, rtol=1e-4, atol=1e-4)


def test_what_is_fitted_runs_as_the_runtime_runs_it(runtime):
    """Step by step, each reading what those before it wrote."""
    trained = random_trained(runtime, PATH, rank=4)
    trained = Trained(trained.bridges, {at: update for at, update in trained.updates.items() if at[0] == 3})
    runtime.register_trained("both", trained)
    compiled = runtime.compile(replace(PATH, trained="both"))
    learner = PathLearner(runtime, PATH, trained, rank=2, loss="tv", seed=0)
    (text,) = texts(1, 8)
    keys, stream = learner.net.model(text.tokens[None])
    learner.net.round()
    steps = [learner._logits(out[0]) for out in learner.net(text.tokens[None], keys, 3)]
    for start in range(2, 6):
        with runtime.session(16):
            whole = runtime.forward(text.tokens[None, :start], 0)
            torch.testing.assert_close(
                learner._logits(stream[0, :start]).double(), whole.logits[0], rtol=1e-3, atol=1e-3
            )
            for k in range(3):
                at = start + k
                step = runtime.forward(text.tokens[None, at : at + 1], at, path=compiled)
                torch.testing.assert_close(steps[k][at].double(), step.logits[0, 0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_none_where_distributions_are_equal(loss):
    p, q = (torch.randn(6, 9, generator=torch.Generator().manual_seed(seed)).log_softmax(-1) for seed in (0, 1))
    assert (LOSSES[loss](p, p).sum(-1).abs() < 1e-6).all()
    assert (LOSSES[loss](p, q).sum(-1) > 0).all()
    if loss == "tv":  # what is rejected of a sampled token
        torch.testing.assert_close(1 - LOSSES[loss](p, q).sum(-1), torch.minimum(p.exp(), q.exp()).sum(-1))


@pytest.fixture(scope="module")
def prompts():
    return selfspec.builtin.prompts("calibration")[:10]


@pytest.fixture(scope="module")
def profile(llm):
    """The built-in model's own layers in int4, but for one that is skipped."""
    layers = llm.runtime.layers
    modes = ["int4"] * 2 * layers
    modes[layers - 2] = modes[2 * layers - 2] = "skip"
    spec = LayerSkipSpec.from_path(DraftPath.from_modes(modes), ControllerSpec(name="fixed", options={"k": 3}))
    return selfspec.Profile(model=llm.identity, draft=spec)


@pytest.fixture(scope="module")
def bridged(llm, profile, prompts, tmp_path_factory):
    out = tmp_path_factory.mktemp("bridged")
    return fit(llm, part="bridge", out=out, prompts=prompts, profile=profile, options=TrainOptions(**FEW))


def test_bridges_bring_the_path_nearer_to_the_model(bridged):
    before, after = bridged.record["right"]
    assert after > before
    assert bridged.record["shared"][1] > bridged.record["shared"][0]
    assert bridged.record["history"][-1][1] == 1 + after
    assert json.loads(bridged.part.with_suffix(".json").read_text())["right"] == [before, after]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_falls(runtime, loss):
    learner = PathLearner(runtime, PATH, random_trained(runtime, PATH), rank=2, loss=loss, seed=0)
    optimizer = torch.optim.Adam(learner.net.parameters(), lr=0.01)
    seen = []
    for _ in range(20):
        seen.append(learner.loss(texts(4)))
        optimizer.zero_grad()
        seen[-1].backward()
        optimizer.step()
    assert seen[-1] < 0.9 * seen[0]


@pytest.mark.long("training")
def test_adapters_bring_it_nearer_still(llm, bridged, prompts, tmp_path):
    """Upon the bridges that the profile has, which stay; and what comes out is the model's own text."""
    options = TrainOptions(steps=6, rank=8, **FEW)
    fitted = fit(
        llm,
        part="adapter",
        out=tmp_path,
        prompts=prompts,
        profile=read_profile(bridged.profiles[0]),
        options=options,
    )
    assert fitted.record["right"][0] == pytest.approx(bridged.record["right"][1], abs=1e-6)
    assert fitted.record["shared"][1] > fitted.record["shared"][0]
    plain = llm.generate("def read_text(path: Path) -> str:\n", max_new_tokens=24).tokens
    for path in (*bridged.profiles, *fitted.profiles):
        drafts = llm.drafter_for(read_profile(path))
        assert llm.generate("def read_text(path: Path) -> str:\n", max_new_tokens=24, drafter=drafts).tokens == plain


class _Cut(SilentTraining):
    def __init__(self):
        self.seen, self.stages = 0, []

    def stage(self, name, total):
        self.stages.append(name)

    def step(self, done, said):
        self.seen += self.stages[-1] == "fitting"
        if self.seen == 2:
            raise KeyboardInterrupt


@pytest.mark.long("training that was cut short")
def test_an_interrupted_adapter_goes_on(llm, profile, prompts, tmp_path):
    given = {"part": "adapter", "out": tmp_path, "prompts": prompts, "profile": profile}
    options = TrainOptions(steps=4, **FEW)
    cut = fit(llm, **given, options=options, callbacks=_Cut())
    assert cut.interrupted
    assert read_profile(cut.profiles[0]).draft.trained == "adapter"
    whole = fit(llm, **given, options=options)
    assert (whole.interrupted, whole.progress.steps) == (False, 4)


@pytest.mark.parametrize("part", ["bridge", "adapter"])
def test_without_a_draft_path_they_are_refused(llm, tmp_path, part):
    with pytest.raises(SelfspecError, match=f"'{part}' belongs to a draft path; expected a profile that has one"):
        fit(llm, part=part, out=tmp_path, profile=None)


def test_paths_that_leave_nothing_to_them_are_refused(llm, tmp_path):
    def of(mode):
        spec = LayerSkipSpec.from_path(DraftPath.from_modes([mode, *["full"] * (2 * llm.runtime.layers - 1)]))
        return selfspec.Profile(model=llm.identity, draft=spec)

    with pytest.raises(SelfspecError, match="skips no whole layer"):
        fit(llm, part="bridge", out=tmp_path, profile=of("int8"))
    with pytest.raises(SelfspecError, match="has no quantised sub-layers"):
        fit(llm, part="adapter", out=tmp_path, profile=of("skip"), options=TrainOptions(**FEW))


def test_a_rank_above_the_streams_width_is_refused(runtime):
    with pytest.raises(SelfspecError, match="rank 33: expected at most 32"):
        fit_bridges(runtime, PATH, texts(2), texts(2), rank=33)


def test_agreement_with_itself_is_whole(runtime):
    assert agreement(runtime, DraftPath.from_modes(["full"] * 8), texts(2)) == pytest.approx((1.0, 1.0))


def test_an_adapter_goes_on_with_its_rank():
    begun = Trained(updates={(0, 0): Update(torch.zeros(4, 8), torch.zeros(8, 4))})
    assert [adapter_rank(begun, rank) for rank in (None, 4)] == [4, 4]
    assert [adapter_rank(Trained(), rank) for rank in (None, 7)] == [RANK, 7]
    with pytest.raises(SelfspecError, match="rank 16: the path's adapter has rank 4; expected the same, or none"):
        adapter_rank(begun, 16)
