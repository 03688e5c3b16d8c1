"""Files of int4 weights: what is written is read, a wrong file is refused in one line, a profile uses its file."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import CONFIGS, plain, run, tiny

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.int4_files import int4_part, int4_tensors, open_int4, pack, unpack
from selfspec.draft_modules.int4_quantization import int4_settings, write_int4
from selfspec.draft_modules.module_files import PartFile, read_part, write_part
from selfspec.drafters import make_drafter
from selfspec.models.path_modules import Trained, Update
from selfspec.models.quantizers import quantize_int4
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.module_files_spec import ModuleFile, sha256_of
from selfspec.profile.reading import read_profile, write_profile
from selfspec.profile.schema import bring_int4
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath

PATH = DraftPath.from_modes(["int4"] * 8)


@pytest.fixture(scope="module")
def runtime():
    config = copy.deepcopy(CONFIGS["llama"])
    config.intermediate_size = 64
    return LeanRuntime(tiny(config, dtype=torch.float32))


@pytest.fixture
def file(runtime, tmp_path):
    texts = [[5, 3, 8, 1, 30]]
    write_int4(runtime, tmp_path / "w.safetensors", texts, int4_settings("gptq", 32, texts, seed=3))
    return tmp_path / "w.safetensors"


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 99))
def test_two_values_in_a_byte(out, pairs, seed):
    values = torch.randint(16, (out, 2 * pairs), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    assert pack(values).shape == (out, pairs)
    assert torch.equal(unpack(pack(values)), values)


def test_what_is_written_is_read(runtime, tmp_path):
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    made = quantize_int4(weight, "nearest", group=32)
    write_part(tmp_path / "w.safetensors", int4_part({}, int4_tensors(2, {0: made}), runtime))
    found = open_int4(runtime, tmp_path / "w.safetensors")
    read = found.get(2, 0)
    assert all(torch.equal(getattr(read, name), getattr(made, name)) for name in ("values", "scale", "zero"))
    assert found.bytes(2, 0) == made.bytes == 64 * 16 + 64 * 4
    assert found.get(2, 1) is found.bytes(2, 1) is None
    (tmp_path / "w.safetensors").unlink()
    with pytest.raises(SelfspecError, match=r"w\.safetensors: no such file"):
        found.get(2, 0)


def test_the_file_tells_what_it_was_made_of(runtime, file):
    part = read_part(file)
    digest = part.settings["texts"].pop("sha256")
    assert len(digest) == 64
    assert part.settings == {"method": "gptq", "group": 32, "seed": 3, "texts": {"count": 1, "tokens": 5}}
    assert part.model == runtime.skeleton.identity


def wrong(part, **tensors):
    return replace(part, tensors={**part.tensors, **tensors})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda p: replace(p, kind="bridge"), "of kind 'bridge'; expected 'int4'"),
        (
            lambda p: replace(p, model=p.model.model_copy(update={"layers": 5})),
            "of another model: layers 5 in the profile, 4 in the model; make one with: selfspec quantize",
        ),
        (
            lambda p: replace(p, model=p.model.model_copy(update={"fingerprint": "0" * 16})),
            "of other weights .*; make one with: selfspec quantize",
        ),
        (lambda p: wrong(p, other=torch.ones(1)), "tensor 'other' is not one of int4 weights"),
        (lambda p: wrong(p, **{"int4.0.0.zero": torch.ones(64, 1)}), "tensor 'int4.0.0.zero' is not one of int4"),
        (lambda p: wrong(p, **{"int4.0.0.zero": torch.ones(64, 2).bfloat16()}), "int4 weights 0.0 do not fit"),
        (lambda p: wrong(p, **{"int4.9.0.zero": torch.ones(64, 1).bfloat16()}), "int4 weights 9.0 do not fit"),
        (
            lambda p: replace(p, tensors={n: t for n, t in p.tensors.items() if n != "int4.1.2.values"}),
            "int4 weights 1.2 do not fit",
        ),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(runtime, file, change, told):
    write_part(file, change(read_part(file)))
    with pytest.raises(SelfspecError, match=told) as error:
        open_int4(runtime, file)
    assert "\n" not in str(error.value)


def test_scales_that_are_not_finite_are_refused(runtime, file):
    part = read_part(file)
    write_part(file, wrong(part, **{"int4.0.0.scale": part.tensors["int4.0.0.scale"] * float("nan")}))
    with pytest.raises(SelfspecError, match="scales of layer 0 are not finite"):
        open_int4(runtime, file).get(0, 0)


def test_no_file_of_weights_at_all(runtime, tmp_path):
    (tmp_path / "w.safetensors").write_text("not tensors")
    with pytest.raises(SelfspecError, match="no trained part can be read from it"):
        open_int4(runtime, tmp_path / "w.safetensors")


def profile_with(runtime, file):
    spec = LayerSkipSpec.from_path(PATH, ControllerSpec(name="fixed", options={"k": 3}))
    return selfspec.Profile(
        model=runtime.skeleton.identity,
        draft=spec.model_copy(update={"int4_weights": "int4"}),
        parts={"int4": ModuleFile(file=file.name, sha256=sha256_of(file))},
    ).with_folder(file.parent)


def test_a_profile_brings_its_weights_and_drafts_with_them(runtime, file, tmp_path):
    """Written to another folder and read back: the path has the file's weights, the text is the model's."""
    (tmp_path / "there").mkdir()
    write_profile(profile_with(runtime, file), tmp_path / "there" / "p.yaml")
    profile = read_profile(tmp_path / "there" / "p.yaml")
    assert "int4 weights of the part int4" in profile.draft.summary
    file.unlink()
    drafter = make_drafter(runtime, profile)
    assert drafter.path == replace(PATH, int4_weights=profile.parts["int4"].sha256)
    tokens = torch.tensor([[5, 3, 8, 1, 30]])
    with runtime.session(8):
        mine, nearest = (runtime.forward(tokens, 0, path=runtime.compile(path)).logits for path in (drafter.path, PATH))
    assert not torch.equal(mine, nearest)
    for prompt in ([5, 3], [8, 1, 30]):
        assert run(runtime, drafter, prompt, 24)[0] == plain(LeanRuntime(runtime.model), prompt, 24)


def test_a_profile_with_another_file_is_refused(runtime, file):
    write_profile(profile_with(runtime, file), file.parent / "p.yaml")
    write_part(file, PartFile("int4", {}, {}, runtime.skeleton.identity))
    with pytest.raises(SelfspecError, match=r"part 'int4': .* is another file than the profile was made with"):
        read_profile(file.parent / "p.yaml")


def test_updated_weights_are_rounded_to_nearest(runtime, file):
    """Those of the group that an update changes; the others are the file's."""
    weights = open_int4(runtime, file)
    update = Update(torch.zeros(1, 32), torch.zeros(64, 1))
    quantizer = runtime.skeleton.quantizer
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))

    def qkv(trained, int4):
        out = torch.empty(1, 64)
        quantizer.sublayer(0, "attention", 4, trained, int4)[0].qkv(x, out)
        return out

    changed, nearest, ours = qkv(Trained(updates={(0, 0): update}), weights), qkv(None, None), qkv(None, weights)
    assert torch.equal(changed, nearest)
    assert not torch.equal(ours, nearest)


def test_weights_are_brought_to_another_folder(runtime, file, tmp_path):
    """Where a training writes a profile; a profile without weights brings none."""
    (tmp_path / "there").mkdir()
    profile = profile_with(runtime, file)
    assert bring_int4(profile, tmp_path / "there") == profile.parts
    assert (tmp_path / "there" / file.name).read_bytes() == file.read_bytes()
    assert bring_int4(profile.model_copy(update={"draft": LayerSkipSpec()}), tmp_path / "there") == {}
