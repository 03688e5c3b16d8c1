"""What training adds to a draft path: bridges add what they say, changed weights are as if the model had them."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from models import CONFIGS, plain, run, tiny
from trained import random_trained

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK
from selfspec.draft_modules.module_files import PartFile, path_part, read_part, trained_of, write_part
from selfspec.drafters import LayerSkipDrafter, make_drafter
from selfspec.models.low_precision import fake, quantize
from selfspec.models.quantized_sublayers import Trained
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.module_files_spec import ModuleFile, sha256_of
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath

MODES = ("full", "skip", "skip", "int4", "full", "skip", "skip", "int8")  # attention, then MLPs: 1 and 2 skipped
PATH = DraftPath.from_modes(MODES)
TOKENS = torch.tensor([[5, 3, 8, 1, 30]])


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(tiny(CONFIGS["llama"]), kernel=fake)


def streams(runtime, path, layers=(1, 3)):
    with runtime.session(16):
        return runtime.forward(TOKENS, 0, path=runtime.compile(path), hidden=layers).hidden


@pytest.mark.parametrize("rank", [None, 8])
def test_a_bridge_adds_what_it_makes_of_the_stream(runtime, rank):
    """From its weights in int8, and its bias."""
    trained = random_trained(runtime, PATH, rank=rank)
    runtime.register_trained(f"bridge {rank}", Trained(trained.bridges))
    got = streams(runtime, replace(PATH, trained=f"bridge {rank}"))
    without = streams(runtime, PATH)
    torch.testing.assert_close(without[1], without[3], rtol=0, atol=0)
    torch.testing.assert_close(got[1], without[1], rtol=0, atol=0)
    bridge = trained.bridges[1, 3]
    x = got[1] if bridge.into is None else got[1] @ quantize(bridge.into, 8).weight(torch.float64).t()
    wanted = got[1] + x @ quantize(bridge.onto, 8).weight(torch.float64).t() + bridge.bias
    torch.testing.assert_close(got[3], wanted)


def test_changed_weights_are_as_if_the_model_had_them(runtime):
    """Those in few bits; what runs in full stays as it is."""
    trained = random_trained(runtime, PATH)
    runtime.register_trained("updates", Trained(updates=trained.updates))
    other = copy.deepcopy(runtime.model)
    with torch.no_grad():
        layer = other.model.layers[3]
        for number, (part, names) in enumerate(
            [("self_attn", "q k v"), ("self_attn", "o"), ("mlp", "gate up"), ("mlp", "down")]
        ):
            update, start = trained.updates[3, number], 0
            for name in names.split():
                weight = layer.get_submodule(f"{part}.{name}_proj").weight
                weight += (update.up @ update.down)[start : start + len(weight)]
                start += len(weight)
    theirs = LeanRuntime(other, kernel=fake)
    with runtime.session(16), theirs.session(16):
        mine = runtime.forward(TOKENS, 0, path=runtime.compile(replace(PATH, trained="updates"))).logits
        wanted = theirs.forward(TOKENS, 0, path=theirs.compile(PATH)).logits
        without = runtime.forward(TOKENS, 0, path=runtime.compile(PATH)).logits
    torch.testing.assert_close(mine, wanted)
    assert not torch.allclose(without, wanted)


def test_the_model_itself_stays_as_it_is(runtime):
    """Drafted with the worst of parts, the text is the model's."""
    runtime.register_trained("bad", random_trained(runtime, PATH, seed=3, size=2.0))
    drafter = LayerSkipDrafter(runtime, replace(PATH, trained="bad"), FixedK(3))
    fresh = LeanRuntime(tiny(CONFIGS["llama"]))
    for prompt in ([5, 3], [8, 1, 30]):
        assert run(runtime, drafter, prompt, 24)[0] == plain(fresh, prompt, 24)


def test_a_path_with_parts_that_nobody_told_of_is_refused(runtime):
    with pytest.raises(SelfspecError, match="its trained weights nothing are not loaded"):
        runtime.compile(replace(PATH, trained="nothing"))


def test_what_is_written_is_read_and_drafts(runtime, tmp_path):
    """From a profile beside the part, whose drafts are those of the weights as they were."""
    trained = random_trained(runtime, PATH, rank=8)
    file = tmp_path / "path.safetensors"
    write_part(file, path_part("bridge", {"rank": 8}, trained, runtime))
    read = trained_of(runtime, read_part(file))
    assert read.bridges.keys() == trained.bridges.keys()
    assert read.updates.keys() == trained.updates.keys()
    spec = LayerSkipSpec.from_path(PATH, ControllerSpec(name="fixed", options={"k": 3}))
    profile = selfspec.Profile(
        model=runtime.skeleton.identity,
        draft=spec.model_copy(update={"trained": "path"}),
        parts={"path": ModuleFile(file=file.name, sha256=sha256_of(file))},
    ).with_folder(tmp_path)
    drafter = make_drafter(runtime, profile)
    runtime.register_trained("as it was", trained)
    path = replace(PATH, trained="as it was")
    mine, wanted = (streams(runtime, of, (3, 4)) for of in (drafter.path, path))
    for layer in (3, 4):
        torch.testing.assert_close(mine[layer], wanted[layer], rtol=0.01, atol=0.01)  # kept in float32
    assert "with the trained part path" in spec.model_copy(update={"trained": "path"}).summary


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({"bridge.1.3.onto": (32, 32)}, "the part has a bridge without its bias"),
        ({"bridge.1.3.onto": (32, 31), "bridge.1.3.bias": (32,)}, "bridge 1.3 does not fit the model"),
        ({"bridge.1.9.onto": (32, 32), "bridge.1.9.bias": (32,)}, "bridge 1.9 does not fit the model"),
        ({"update.0.0.down": (2, 32)}, "the part has an update without its up"),
        ({"update.0.0.down": (2, 32), "update.0.0.up": (32, 2)}, "update 0.0 does not fit the model"),
        ({"update.9.0.down": (2, 32), "update.9.0.up": (64, 2)}, "update 9.0 does not fit the model"),
        ({"weight": (2, 2)}, "holds a tensor weight; expected bridges and updates"),
        ({"bridge.x.1.onto": (2, 2)}, "holds a tensor bridge.x.1.onto"),
    ],
)
def test_parts_that_do_not_fit_are_refused(runtime, tensors, told):
    held = {name: torch.zeros(shape) for name, shape in tensors.items()}
    with pytest.raises(SelfspecError, match=told):
        trained_of(runtime, PartFile("bridge", {}, held, runtime.skeleton.identity))
    with pytest.raises(SelfspecError, match="of kind 'eagle'; expected one of a draft path"):
        trained_of(runtime, PartFile("eagle", {}, held, runtime.skeleton.identity))
