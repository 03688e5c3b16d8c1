"""Models larger than one device: dispatched by accelerate, decoded and searched as if they were not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from hypothesis import given
from hypothesis import strategies as st
from models import CONFIGS, SIZES, tiny
from selfspec.search import find_profile, prepare
from transformers import AutoModelForCausalLM, LlamaConfig

import selfspec
from selfspec.basics.errors import SelfspecError, UnsupportedModelError
from selfspec.cli import main
from selfspec.models.linears import is_exact
from selfspec.models.loading import DeviceMap, parse_devices
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import SkipSet

PROMPT = [3, 1, 4, 1, 5]
REST = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
MAPS = {
    "some layers on disk": {**dict.fromkeys(REST, "cpu"), **{f"model.layers.{i}": "cpu" for i in (0, 2)}},
    "ends on disk": {**dict.fromkeys(REST, "disk"), **{f"model.layers.{i}": "cpu" for i in range(4)}},
    "all on disk": {"": "disk"},
}
MAPS["some layers on disk"] |= {f"model.layers.{i}": "disk" for i in (1, 3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, llm):
    """A small checkpoint with a tokenizer."""
    where = tmp_path_factory.mktemp("model")
    config = LlamaConfig(**{**SIZES, "vocab_size": 4096, "eos_token_id": None})
    tiny(config, dtype=torch.float64).save_pretrained(where)
    llm.tokenizer.save_pretrained(where)
    return where


def read(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options).eval()


@pytest.fixture(scope="module")
def whole(folder, llm):
    return selfspec.wrap(read(folder), llm.tokenizer, profile="none")


def logits(runtime):
    with runtime.session(len(PROMPT)):
        return runtime.forward(torch.tensor([PROMPT]), 0).logits


@pytest.mark.parametrize("places", MAPS.values(), ids=MAPS)
def test_a_dispatched_model_is_the_same_model(folder, whole, places, tmp_path):
    model = read(folder, device_map=places, offload_folder=tmp_path)
    assert any(p.is_meta for p in model.parameters())
    llm = selfspec.wrap(model, whole.tokenizer, profile="none")
    assert llm.identity.fingerprint == whole.identity.fingerprint
    torch.testing.assert_close(logits(llm.runtime), logits(whole.runtime), atol=1e-10, rtol=1e-10)
    drafter = llm.layer_skip(SkipSet((1,), (2, 3)), "fixed:k=3")
    for options in ({}, {"temperature": 0.9, "seed": 3}):
        plain = whole.generate(PROMPT, max_new_tokens=12, **options)
        assert llm.generate(PROMPT, max_new_tokens=12, drafter=drafter, **options).tokens == plain.tokens
    assert any(p.is_meta for p in model.parameters())


def test_a_search_on_a_dispatched_model(folder, whole, tmp_path, monkeypatch):
    costs = CostModel(context=16, base=0.1, attention=0.1, mlp=0.1, widths=[1, 8], verify=[1.0, 1.1], round=0.0, head=1)
    monkeypatch.setattr(prepare, "measure_costs", lambda *_, **__: costs)  # which takes its time
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    llm = selfspec.wrap(read(folder, device_map=MAPS["some layers on disk"]), whole.tokenizer, profile="none")
    profile = find_profile(llm, trials=2, count=2, max_new_tokens=4, keep_best=True)
    assert profile.path.cheaper
    assert profile.measured
    again = selfspec.wrap(llm.model, whole.tokenizer, profile=profile)
    assert again.generate(PROMPT, max_new_tokens=6).tokens == whole.generate(PROMPT, max_new_tokens=6).tokens


def test_modules_whose_inputs_alone_are_moved_keep_their_fast_path(whole):
    """Several GPUs without offloading: hooks that find everything in place."""
    model = tiny(CONFIGS["llama"])
    expected = logits(LeanRuntime(model))
    model = dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert is_exact(model.model.layers[0].mlp.up_proj)
    torch.testing.assert_close(logits(LeanRuntime(model)), expected, atol=1e-12, rtol=1e-12)
    hooked = model.model.layers[0].mlp.up_proj
    hooked.register_forward_hook(lambda *_: None)
    assert not is_exact(hooked)


def test_loaded_by_its_name(folder, whole, tmp_path):
    """Part of it is read from disk, and so it is drafted with."""
    spread = DeviceMap("auto", max_memory={"cpu": "2200KB"}, offload_folder=tmp_path / "offload")
    llm = selfspec.load(str(folder), profile="none", device=spread, dtype="float64")
    assert {"cpu", "disk"} == {str(place) for place in llm.model.hf_device_map.values()}
    drafter = llm.layer_skip(SkipSet((0,), (3,)), "fixed:k=2")
    expected = whole.generate(PROMPT, max_new_tokens=8).tokens
    assert llm.generate(PROMPT, max_new_tokens=8, drafter=drafter).tokens == expected


def test_from_the_command_line(folder, monkeypatch, capsys, tmp_path):
    (tmp_path / "p.yaml").write_text(
        "version: 2\nmodel: {layers: 4}\ndraft: {kind: layer-skip, skip: {attention: [1], mlp: [2]}}\n"
    )
    command = ["generate", "--model", str(folder), "--profile", str(tmp_path / "p.yaml"), "--max-new-tokens", "6"]
    texts = []
    for more in (
        [],
        ["--device-map=auto", "--device-memory=cpu=2200KB", "--offload-folder", str(tmp_path / "off")],
    ):
        monkeypatch.setattr(sys, "argv", ["selfspec", *command, *more, "--dtype", "float64", "import os"])
        with pytest.raises(SystemExit) as ended:
            main()
        texts.append(capsys.readouterr().out)
        assert not ended.value.code
    assert texts[0] == texts[1] != "\n"


def preloaded(model):
    return cpu_offload(
        model, execution_device=torch.device("cpu"), offload_buffers=False, preload_module_classes=["LlamaDecoderLayer"]
    )


def moved_as_a_whole(model):
    return cpu_offload_with_hook(model, torch.device("cpu"))[0]


def without_weights(model):
    return model.to("meta")


def split(model):
    """As a map with a device for a part of a layer does it."""
    hook = AlignDevicesHook(execution_device="meta")
    add_hook_to_module(model.model.layers[1].mlp.up_proj, hook)
    hook.offload = True  # so that its weights are not missed
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (preloaded, r"'model.layers.0' is offloaded as a whole, .* without preload_module_classes"),
        (moved_as_a_whole, "the model has a hook or a replaced forward"),
        (without_weights, "'model.embed_tokens' has no weights"),
        (split, r"layer 1 is on two devices \(input_layernorm on cpu, up_proj on meta\); give each"),
    ],
)
def test_what_cannot_be_followed_is_refused(change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        LeanRuntime(change(tiny(CONFIGS["llama"])))


TWO_DEVICES = """
import copy, torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as add_device
from models import CONFIGS
from transformers import AutoModelForCausalLM
from selfspec.models import skeleton
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.draft_path import DraftPath
from selfspec.types.draft_path import SkipSet

add_device("fake")
skeleton._fingerprint = lambda model: None  # there are no values
PLACES = {"embed_tokens": 0, "layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1, "norm": 1, "rotary_emb": 1}
with FakeTensorMode():
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["llama"])).eval()
    for part, number in [(model.lm_head, 1), *((model.model.get_submodule(n), i) for n, i in PLACES.items())]:
        device = torch.device("fake", number)
        for leaf in part.modules():
            for name, held in leaf.named_parameters(recurse=False):
                setattr(leaf, name, torch.nn.Parameter(torch.empty(held.shape, device=device), requires_grad=False))
            for name, held in leaf.named_buffers(recurse=False):
                setattr(leaf, name, torch.empty(held.shape, device=device))
            add_hook_to_module(leaf, AlignDevicesHook(execution_device=device))
    runtime = LeanRuntime(model)
    assert [block.device.index for block in runtime.skeleton.blocks] == [0, 0, 1, 1]
    with runtime.session(64):
        for n, skip in ((1, SkipSet((1,), (2,))), (20, SkipSet((2, 3), (2, 3)))):
            tokens = torch.zeros((1, n), dtype=torch.long, device="fake:0")
            mask = torch.ones((1, n, 50), dtype=torch.bool, device="fake:0")
            path = runtime.compile(DraftPath(skip))
            for options in ({}, {"slots": 5, "mask": mask}, {"slots": tokens, "mask": mask}):
                step = runtime.forward(tokens, tokens if options else 3, path=path, **options)
                assert step.logits.device == runtime.device
        runtime.cache.commit(0, [1, 2])
"""


def test_parts_on_two_devices():
    """With tensors that have a device and no values, where no two devices are: what meets is on the same one."""
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no devices made in Python")
    helpers = Path(__file__).parents[2] / "helpers"
    code = f"import sys, warnings; sys.path.insert(0, {str(helpers)!r}); warnings.simplefilter('ignore')\n{TWO_DEVICES}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_options_of_a_command():
    assert parse_devices("cuda:1", None, None, None) == "cuda:1"
    spread = parse_devices("auto", "balanced", "0=20GiB, cpu = 1.5TB", Path("there"))
    assert spread == DeviceMap("balanced", {0: "20GiB", "cpu": "1.5TB"}, Path("there"))
    assert spread.options() == {
        "device_map": "balanced",
        "max_memory": {0: "20GiB", "cpu": "1.5TB"},
        "offload_folder": Path("there"),
    }
    assert DeviceMap().options() == {"device_map": "auto"}
    assert DeviceMap({"": "disk"}, max_memory={"cpu": 10**9}).options()["device_map"] == {"": "disk"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("auto", "everywhere", None, None), "device map 'everywhere' is not known; known: auto, balanced, "),
        (("cpu", "auto", None, None), "--device cpu and --device-map: expected only one of these options"),
        (
            ("auto", None, "cpu=1GiB", None),
            "--device-memory is for models spread over devices; expected --device-map auto too",
        ),
        (("auto", None, None, Path("x")), "--offload-folder is for models spread"),
        (
            ("auto", "auto", "cpu=lots", None),
            "device memory cpu=lots: expected a GPU's number or cpu, and a size such as",
        ),
        (("auto", "auto", "tpu=1GiB", None), "device memory tpu=1GiB: expected"),
        (("auto", "auto", "0=1GiB,00=2GiB", None), "00 is given twice"),
        (("auto", "auto", None, Path(__file__)), "is a file; expected a folder"),
    ],
)
def test_wrong_options_of_a_command(options, message):
    with pytest.raises(SelfspecError, match=message):
        parse_devices(*options)


@given(st.text("0123456789=,GiBcpu .-\n", max_size=30))
def test_any_text_for_memory_is_read_or_refused_in_one_line(text):
    try:
        spread = parse_devices("auto", "auto", text, None)
    except SelfspecError as error:
        assert "\n" not in str(error)
    else:
        assert spread.max_memory
        assert all(device == "cpu" or device >= 0 for device in spread.max_memory)
