"""`selfspec train`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import command
import pytest
from builtin_model import on_builtin

import selfspec
from selfspec.basics.errors import SelfspecError

FEW = [
    "--texts",
    "20",
    "--steps",
    "12",
    "--max-new-tokens",
    "16",
    "--vocabulary",
    "256",
    "--batch-size",
    "8",
    "--threads",
    "1",
]


@pytest.fixture
def prompts(tmp_path):
    """Prompts of code, a line each."""
    file = tmp_path / "prompts.jsonl"
    some = selfspec.builtin.prompts("calibration")[:8]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in some))
    return file


def test_a_head_is_trained_and_used(cli, prompts, tmp_path):
    code, out, err = cli("train", "eagle", "--prompts", prompts, *FEW, "--json")
    told = json.loads(out)
    assert not code
    assert told["part"] == "parts/eagle.safetensors"
    assert told["profiles"] == ["parts/eagle.yaml"]  # no draft path is the model's own
    assert (told["steps"], told["texts"], told["interrupted"]) == (12, 20, False)
    assert told["tokens_per_pass"] == max(brings for _, brings in told["history"])
    beside = json.loads((tmp_path / "parts" / "eagle.json").read_text())
    assert (beside["steps"], beside["acceptance"]) == (12, told["acceptance"])
    assert "tokens a pass on held-out texts" in err
    assert "use it with: selfspec generate --profile parts/eagle.yaml 'your prompt'" in err
    plain = cli("generate", "--profile", "none", "--max-new-tokens", "24", "def read(")[1]
    assert cli("generate", "--profile", "parts/eagle.yaml", "--max-new-tokens", "24", "def read(")[1] == plain


@pytest.mark.long("training")
def test_below_the_draft_path_of_a_profile(cli, prompts):
    code, out, _ = cli("train", "eagle", "--profile", "stdlib-llama-3.7m", "--prompts", prompts, *FEW, "--json")
    assert not code
    assert json.loads(out)["profiles"] == ["parts/eagle.yaml", "parts/eagle-below.yaml"]
    plain = cli("generate", "--profile", "none", "--max-new-tokens", "24", "def read(")[1]
    assert cli("generate", "--profile", "parts/eagle-below.yaml", "--max-new-tokens", "24", "def read(")[1] == plain
    assert not cli("profile", "show", "parts/eagle-below.yaml")[0]


@pytest.mark.long("training")
def test_a_bridge_is_fitted_to_a_profiles_path(cli, prompts):
    Path("path.yaml").write_text(
        "version: 2\nmodel: {layers: 16}\ndraft: {kind: layer-skip, skip: {attention: [7], mlp: [7]}}\n"
    )
    code, out, err = cli(
        "train",
        "bridge",
        "--model",
        "builtin",
        "--profile",
        "path.yaml",
        "--prompts",
        prompts,
        *FEW,
        "--rank",
        "8",
        "--json",
    )
    told = json.loads(out)
    assert not code
    assert told["profiles"] == ["parts/bridge.yaml"]
    assert told["right"][1] == told["acceptance"][0]
    assert "the draft path's best token is the model's at" in err
    plain = cli("generate", "--model", "builtin", "--profile", "none", "--max-new-tokens", "24", "def read(")[1]
    assert (
        cli("generate", "--model", "builtin", "--profile", "parts/bridge.yaml", "--max-new-tokens", "24", "def read(")[
            1
        ]
        == plain
    )
    assert "bridge.safetensors" in cli("profile", "show", "parts/bridge.yaml")[1]


@pytest.mark.long("training")
def test_fine_tuning_says_that_it_gives_another_model(cli, prompts):
    few = [*FEW[:2], "--steps", "1", *FEW[4:]]
    code, out, err = cli("train", "layerskip", "--prompts", prompts, *few, "--layers", "4", "--json")
    before, after = json.loads(out)["perplexity"]
    assert not code
    said = f"training changed the model: perplexity on held-out answers {after:.2f}, before {before:.2f}"
    assert said in err
    use = "selfspec generate --model parts/layerskip --profile parts/layerskip.yaml"
    assert f"use it with: {use} 'your prompt'" in err
    assert not cli(*use.split()[1:], "--max-new-tokens", "8", "def read(")[0]


def run_in_a_process(warm, event, folder, prompts):
    arguments = [warm.python, str(Path(command.__file__)), event]
    arguments += on_builtin(["train", "eagle", "--prompts", prompts, *FEW])
    return subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.long("training that was cut short")
def test_an_interrupt_saves_the_best_and_the_same_command_goes_on(cli, warm, prompts, tmp_path):
    ended = run_in_a_process(warm, "interrupted-fit:5", tmp_path, prompts)
    assert ended.returncode == 130
    assert "to resume, run the same command again" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert (tmp_path / "parts" / "eagle.yaml").exists()
    code, out, _ = cli("train", "eagle", "--prompts", prompts, *FEW, "--json")
    assert (code, json.loads(out)["steps"]) == (0, 12)


@pytest.mark.long("training that was cut short")
def test_a_kill_loses_no_texts(cli, warm, prompts, tmp_path):
    assert run_in_a_process(warm, "killed-fit:5", tmp_path, prompts).returncode == -9
    assert not (tmp_path / "parts" / "eagle.safetensors").exists()
    assert (tmp_path / "parts" / "eagle.checkpoint").exists()
    code, out, _ = cli("train", "eagle", "--prompts", prompts, *FEW, "--json")
    assert (code, json.loads(out)["steps"]) == (0, 12)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "method 'nonsense' cannot be trained; expected eagle, medusa, hydra, mlp, mtp, chimera"),
        (["eagle", "--minutes", "0"], "minutes 0.0: expected more than 0"),
        (["eagle", "--minutes", "nan"], "minutes nan: expected more than 0"),
        (["eagle", "--seed", str(2**64)], "seed 18446744073709551616: expected 0 to 18446744073709551615"),
        (["adapter", "--loss", "kl"], "loss 'kl': expected forward-kl, reverse-kl, tv"),
        (["layerskip", "--model", "parts/layerskip"], "--out parts would write over the model"),
        (["adapter", "--profile", "parts/adapter.yaml"], "would write over the profile that is given"),
        (["eagle", "--out", "file"], "file is no folder; expected one that parts can be written to"),
        (["eagle", "--out", "gone/parts"], "gone/parts is no folder"),
        (["eagle", "--prompts", "gone.jsonl"], "gone.jsonl"),
        (["eagle", "--model", "gone/model"], "gone/model"),
        (["eagle", "--column", "q"], "--column and --template: given without --prompts"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_input(cli, tmp_path, arguments, said):
    (tmp_path / "file").write_text("")
    (tmp_path / "parts" / "layerskip").mkdir(parents=True)
    (tmp_path / "parts" / "layerskip" / "config.json").write_text('{"model_type": "llama"}')
    path = "version: 2\nmodel: {layers: 16, name: builtin}\ndraft: {kind: layer-skip, skip: {mlp: [3]}}\n"
    (tmp_path / "parts" / "adapter.yaml").write_text(path)
    code, out, err = cli("train", *arguments)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())
    assert "Traceback" not in err


def test_the_default_profile_is_not_one_to_train_for(cli, monkeypatch):
    """It is for decoding: else a head got a variant below a path that nobody searched."""
    given = []

    def fit(llm, *, profile, **_):
        given.append((llm.has_default_profile, profile))
        raise SelfspecError("enough")

    monkeypatch.setattr(selfspec.profile.shipped, "shipped_profiles", dict)
    monkeypatch.setattr("selfspec.training.fit.fit", fit)
    assert cli("train", "eagle")[0] == 2
    assert given == [(True, None)]
