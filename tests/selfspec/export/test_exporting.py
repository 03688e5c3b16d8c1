"""An export as a whole: its page, its folder, and that nothing is left of one that failed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.export.exporter import ExportResult
from selfspec.export.exporting import ENGINES, check, common_limitations, export, find_engine, staged_folder
from selfspec.export.weights import weights_of
from selfspec.profile.draft_spec import Below, LayerSkipSpec, LookupSpec, ProposerSpec, Skip
from selfspec.profile.schema import Profile, SearchRecord

WHOLE = LayerSkipSpec(skip=Skip(attention=list(range(4, 12)), mlp=list(range(4, 12))), candidates=2)


@pytest.fixture(scope="module")
def plain():
    return selfspec.load("builtin", profile="none", layout="rows")


@pytest.fixture
def profile(plain):
    return Profile(model=plain.identity, draft=WHOLE)


def test_the_page_says_it_all(plain, profile, tmp_path):
    prompts = [plain.encode("def read(self):\n")]
    done = export(plain, profile, "vllm", tmp_path / "out", prompts=prompts, new=16, tokens=2, name="mine.yaml")
    page = (tmp_path / "out/README.md").read_text()
    assert page.startswith("# builtin for vllm\n")
    assert "from the profile `mine.yaml`: 8 of the model's 16 layers, as a separate model." in page
    assert f"```bash\n{done.written.commands[0][1]}\n```" in page
    assert f"| 2 | {done.expected.acceptance:.1%} | {done.expected.per_pass:.2f} |" in page
    assert "replayed here along the path, with a separate KV cache: 1 prompts, 16 greedy tokens" in page
    assert all(f"- {one}\n" in page for one in done.limitations)
    assert "the controller (adaptive): every draft has the same number of tokens" in done.limitations
    assert "2 candidates for each position: drafts are single sequences, not trees" in done.limitations
    assert ENGINES["vllm"].read in page
    assert "Not run by vLLM here" in page
    assert done.files == tuple(sorted(str(f.relative_to(done.out)) for f in done.out.rglob("*") if f.is_file()))


def test_what_is_not_known_is_not_told(plain, profile, tmp_path):
    done = export(plain, profile, "sglang", tmp_path / "out")
    page = (done.out / "README.md").read_text()
    assert "Drafts of 3 tokens." in page
    assert "The acceptance is unknown: the profile holds no measurement or prediction" in page


def test_what_is_lost_everywhere(profile):
    record = SearchRecord(strategy="climb", objective="replay", trials=1, seed=0, seconds=1.0, max_new_tokens=8)
    draft = LayerSkipSpec(
        skip=Skip(attention=[1], mlp=[1]), proposers=[ProposerSpec()], vocabulary=[1, 2], below=Below(part="eagle")
    )
    lost = " | ".join(common_limitations(profile.model_copy(update={"draft": draft, "search": record})))
    for said in (
        "lookup tokens (lookup)",
        "vocabulary of 2 tokens",
        "head below the path (eagle)",
        "search --kv own",
        "guard",
    ):
        assert said in lost
    own = record.model_copy(update={"kv": "own"})
    assert "--kv own" not in " | ".join(common_limitations(profile.model_copy(update={"search": own})))
    store = LookupSpec(proposers=[ProposerSpec(kind="store", path="x")])
    assert "1 store(s) of texts" in common_limitations(profile.model_copy(update={"draft": store}))[1]


def test_a_failed_export_leaves_nothing(plain, profile, tmp_path, monkeypatch):
    real = ENGINES["vllm"]

    class Failing:
        name, read, tried = "vllm", "nothing", "nothing"

        def plan_export(self, job):
            def write(folder, tokens):
                (folder / "half").write_text("half")
                raise SelfspecError("the disk is full")

            return replace(real.plan_export(job), write=write)

    monkeypatch.setitem(ENGINES, "vllm", Failing())
    with pytest.raises(SelfspecError, match="the disk is full"):
        export(plain, profile, "vllm", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    with pytest.raises(SelfspecError, match="the disk is full"):
        export(plain, profile, "vllm", tmp_path / "out", force=True)
    assert [of.name for of in tmp_path.rglob("*")] == ["out", "mine"]


def test_a_folder_is_written_over_only_if_told(plain, profile, tmp_path):
    out = tmp_path / "out"
    export(plain, profile, "sglang", out)
    with pytest.raises(SelfspecError, match="is not empty; expected another folder, or --force"):
        export(plain, profile, "tensorrt-llm", out)
    (out / "mine").write_text("mine")
    export(plain, profile, "tensorrt-llm", out, force=True)
    assert {"mine", "config.yaml", "draft", "launch.sh", "README.md"} <= {of.name for of in out.iterdir()}
    assert "for tensorrt-llm" in (out / "README.md").read_text()


def test_an_empty_folder_will_do(tmp_path):
    (tmp_path / "out").mkdir()
    with staged_folder(tmp_path / "out", force=False) as folder:
        (folder / "inside").mkdir()
    assert [of.name for of in tmp_path.rglob("*")] == ["out", "inside"]


def test_what_is_wrong_is_told_before_anything_is_done(profile, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SelfspecError, match="--to exllama: expected one of vllm, sglang, llama.cpp, tensorrt-llm, hf"):
        find_engine("exllama")
    with pytest.raises(SelfspecError, match="is a file; expected a folder"):
        check("vllm", profile, tmp_path / "file")
    with pytest.raises(SelfspecError, match="does not exist; make it first"):
        check("vllm", profile, tmp_path / "gone" / "out")
    with pytest.raises(SelfspecError, match="--type q3: expected one of"):
        check("vllm", profile, tmp_path / "out", type_name="q3")


def test_another_models_profile_is_refused(plain, profile, tmp_path):
    other = profile.model_copy(update={"model": profile.model.model_copy(update={"layers": 20})})
    with pytest.raises(SelfspecError, match="layers 20 in the profile, 16 in the model"):
        export(plain, other, "vllm", tmp_path / "out")


@pytest.mark.parametrize("layout", ["columns", "onednn"])
def test_however_weights_lie_they_are_the_same(plain, layout):
    """Or they are refused: no engine is ever given others."""
    mine = weights_of(plain.model).tensors
    try:
        found = weights_of(selfspec.load("builtin", profile="none", layout=layout).model).tensors
    except SelfspecError as error:
        assert "load it with layout='rows'" in str(error) or "not unquantised floats in memory" in str(error)
    else:
        assert set(found) == set(mine)
        assert all(torch.equal(tensor, mine[name]) for name, tensor in found.items())


def test_a_model_without_a_folder_is_written_too(plain, profile, tmp_path):
    """As a GGUF file's, which these engines would have to be told otherwise."""
    named = selfspec.wrap(plain.model, plain.tokenizer, profile="none", name="mine.gguf")
    done = export(named, profile, "vllm", tmp_path / "out")
    assert done.written.commands[0][1].startswith(f"vllm serve {tmp_path / 'out' / 'target'} ")
    assert "target/model.safetensors" in done.files
    assert isinstance(done.written, ExportResult)


def test_a_full_disk_is_told_by_the_folder(tmp_path):
    """By safetensors' error too, of which nothing is left."""
    said = r"--out \S+out: cannot be written \(No space left on device \(os error 28\)\)"
    with pytest.raises(SelfspecError, match=said), staged_folder(tmp_path / "out", force=False):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert not [*tmp_path.iterdir()]
