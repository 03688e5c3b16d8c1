"""`selfspec export`."""

from __future__ import annotations

import json

import pytest


def test_a_shipped_profile_for_vllm(cli):
    told = ("--num-prompts", "1", "--max-new-tokens", "8", "--tokens", "2")
    code, out, err = cli("export", "--to", "vllm", "stdlib-llama-3.7m", "--out", "there", *told, "--json")
    said = json.loads(out)
    assert (code, said["engine"], said["out"], said["tokens"]) == (0, "vllm", "there", 2)
    assert 0 <= said["acceptance"] <= 1 <= said["tokens_per_pass"] <= 3
    assert "replayed here along the path" in said["source"]
    assert {"README.md", "speculative_config.json", "draft/config.json"} <= set(said["files"])
    with open("there/speculative_config.json") as file:
        assert json.load(file) == {"method": "draft_model", "model": "there/draft", "num_speculative_tokens": 2}
    assert "saved there: 10 of the model's 16 layers" in err
    assert said["commands"]["serve"] in err
    assert f"limitation: {said['lost'][0]}" in err


def test_by_the_profiles_word_nothing_is_decoded(cli):
    code, _, err = cli("export", "--to", "sglang", "stdlib-llama-3.7m", "--out", "there", "--num-prompts", "0")
    assert code == 0
    assert "rehearsing" not in err
    assert "from the profile's measurement" in err


def test_what_is_lost_is_told_of_layers_kept_by_half(cli):
    code, _, err = cli("export", "--to", "hf", "stdlib-llama-3.7m", "--out", "there", "--num-prompts", "0")
    assert code == 0
    assert "limitation: the time of 7 sub-layer(s) skipped in layers that are kept" in err
    assert "selfspec search --kv own finds one for engines" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "exllama", "stdlib-llama-3.7m", "--out", "x"], "--to exllama: expected one of vllm"),
        (["--to", "vllm", "stdlib-llama-3.7m", "--out", "gone/x"], "the folder gone does not exist"),
        (["--to", "vllm", "gone.yaml", "--out", "x"], "gone.yaml"),
        (["--to", "llama.cpp", "stdlib-llama-3.7m", "--out", "x", "--type", "q3"], "--type q3: expected one of f32"),
        (["--to", "vllm", "stdlib-llama-3.7m"], "Missing option '--out'"),
        (["stdlib-llama-3.7m", "--out", "x"], "Missing option '--to'"),
        (["--to", "vllm", "plain.yaml", "--out", "x"], "the profile drafts nothing, so there is nothing to export"),
        (
            ["--to", "vllm", "recycle.yaml", "--out", "x", "--num-prompts", "0"],
            "it could run instead: lookup tokens alone",
        ),
        (["--to", "vllm", "stdlib-llama-3.7m", "--out", "full"], "--out full is not empty"),
    ],
    ids=lambda value: " ".join(value[-3:]) if isinstance(value, list) else None,
)
def test_wrong_input(cli, tmp_path, arguments, said):
    (tmp_path / "plain.yaml").write_text("version: 2\nmodel: {layers: 16, name: builtin}\n")
    (tmp_path / "recycle.yaml").write_text("version: 2\nmodel: {layers: 16, name: builtin}\ndraft: {kind: recycle}\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("x")
    code, out, err = cli("export", *arguments)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())
    assert "Traceback" not in err
    assert not (tmp_path / "x").exists()
