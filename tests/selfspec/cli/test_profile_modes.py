"""What `selfspec profile` says of drafts that run sub-layers in few bits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.reading import read_profile, write_profile
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import find_profile_file
from selfspec.types.acceptance import Confidence
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath, SkipSet
from selfspec.types.identity import Identity

PATH = DraftPath(SkipSet((3, 5, 9)), None, SkipSet((1, 2, 4), (0, 1)), SkipSet((10, 11, 12), (11, 12, 13, 14)), "int8")


@pytest.fixture
def modes_file(tmp_path):
    draft = LayerSkipSpec.from_path(
        PATH, ControllerSpec(name="fixed"), confidence=Confidence(bias=0.5, probability=0, gap=1.5)
    )
    model = find_profile_file("stdlib-llama-3.7m").model
    write_profile(Profile(model=model, draft=draft), tmp_path / "modes.yaml")
    return "modes.yaml"


def test_show_draws_modes(cli, modes_file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = cli("profile", "show", modes_file)
    assert code == 0
    assert "layer      0123456789012345\nattention  #88.8.###.444###\nmlp        88#########4444#\n" in out
    assert "32 sub-layers: 17 in full (#), 5 in int8 (8), 7 in int4 (4), 3 skipped (.)\n" in out
    assert re.search(r"\nthe head in int8; a draft step reads \d\d\.\d bits per weight, a plain step 32\n", out)
    assert re.search(r"\nhead +in int8", out)
    assert re.search(r"\nconfidence +by gap of the two best logits \(bias 0.5, gap 1.5\)", out)
    assert max(map(len, out.splitlines())) <= 80


def test_show_of_what_only_skips_says_what_is_read(cli):
    _, out, _ = cli("profile", "show", "stdlib-llama-3.7m")
    assert "\n19 of 32 sub-layers skipped (# runs, . skipped)\n" in out
    assert re.search(r"\na draft step reads 15\.\d bits per weight, a plain step 32\n", out)


def test_the_legend_names_only_the_modes_that_occur(cli, tmp_path):
    for path, said in (
        (DraftPath(int8=SkipSet((), (1,))), "32 sub-layers: 31 in full (#), 1 in int8 (8)\n"),
        (DraftPath(head="int4"), "32 sub-layers: 32 in full (#)\nthe head in int4\n"),
    ):
        write_profile(Profile(model=Identity(layers=16), draft=LayerSkipSpec.from_path(path)), tmp_path / "few.yaml")
        assert said in cli("profile", "show", "few.yaml")[1]


def test_validate_of_modes(cli, modes_file):
    said = "5 sub-layers in int8, 7 in int4, 3 skipped, the head in int8"
    code, out, _ = cli("profile", "validate", modes_file, "--model", "builtin")
    assert (code, out) == (0, f"{modes_file}: valid, {said}, fits builtin\n")


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ("int8: {mlp: [3]}, int4: {mlp: [3]}", "mlp of layer 3 is both int8 and int4; expected one of them"),
        ("skip: {attention: [3]}, int8: {attention: [3]}", "attention of layer 3 is both skip and int8; expected one"),
        ("int8: {mlp: [16]}", "int8.mlp: layer 16 does not exist; the model has 16 layers"),
        ("int4: {mlp: [2, 2]}", "int4.mlp: layer 2 is listed twice"),
        ("head: skip", "draft.head: Input should be 'int8' or 'int4', got 'skip'"),
        ("confidence: {gap: -1}", "draft.confidence.gap: Input should be greater than or equal to 0, got -1"),
    ],
)
def test_validate_of_wrong_modes_is_one_line(cli, tmp_path, draft, said):
    text = f"version: 2\nmodel: {{layers: 16}}\ndraft: {{kind: layer-skip, {draft}}}\n"
    (tmp_path / "wrong.yaml").write_text(text)
    code, out, err = cli("profile", "validate", "wrong.yaml")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"wrong.yaml: {said}" in err


def test_list_of_modes(cli, tmp_path, modes_file):
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "m.yaml").write_bytes(Path(modes_file).read_bytes())
    _, out, _ = cli("profile", "list", "some")
    assert re.search(r"m\.yaml +16 +3 \+ 0 +not measured *\n +builtin +5 int8 *\n +7 int4 *\n +head int8", out)
    assert "below it, how many run quantised" in " ".join(out.split())


def test_diff_of_modes(cli, tmp_path, modes_file):
    profile = read_profile(Path(modes_file))
    path = profile.path
    modes = list(path.modes(16))
    modes[3], modes[9], modes[16] = "int8", "int8", "int4"
    draft = LayerSkipSpec.from_path(
        DraftPath.from_modes(modes), profile.draft.controller, confidence=profile.draft.confidence
    )
    write_profile(profile.model_copy(update={"draft": draft}), tmp_path / "q.yaml")
    code, out, _ = cli("profile", "diff", modes_file, "q.yaml")
    assert code == 1
    assert "A attention #88.8.###.444###\nB attention #8888.###8444###\nA mlp       88####" in out
    assert "# in full, 8 in int8, 4 in int4, . skipped\n" in out
    assert "attention 3, 9: skip -> int8\nmlp 0: int8 -> int4\n" in out
    assert re.search(r"a draft step reads +\d\d\.\d of 32 bits per weight +\d\d\.\d of 32 bits", out)
    assert re.search(r"head +in int8 +-", out)
    assert "draft." not in out
    data = json.loads(cli("profile", "diff", modes_file, "q.yaml", "--json")[1])
    assert data["modes"] == [
        {"part": "attention", "layers": [3, 9], "a": "skip", "b": "int8"},
        {"part": "mlp", "layers": [0], "a": "int8", "b": "int4"},
    ]
    assert data["skipped_by_a_alone"] == {"attention": [3, 9], "mlp": []}
    assert "int8 -> full" in cli("profile", "diff", modes_file, "stdlib-llama-3.7m")[1]
    assert cli("profile", "diff", modes_file, modes_file)[:2] == (0, f"{modes_file} and {modes_file}: no difference\n")


def test_diff_of_what_is_written_otherwise(cli, tmp_path):
    for name, layers in (("a", "[1, 2]"), ("b", "[2, 1]")):
        text = f"version: 2\nmodel: {{layers: 4}}\ndraft: {{kind: layer-skip, skip: {{mlp: {layers}}}}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    code, out, _ = cli("profile", "diff", "a.yaml", "b.yaml")
    assert code == 1
    assert re.search(r"draft\.skip\.mlp +\[1, 2\] +\[2, 1\]", out)
