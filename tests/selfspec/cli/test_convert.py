"""`selfspec convert`."""

from __future__ import annotations

import json

import pytest
import torch


@pytest.fixture
def medusa(tmp_path):
    """A head for the built-in model as Medusa's are published, that says what the model says."""
    folder, hidden = tmp_path / "medusa", 128
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    tensors = {}
    for j in range(2):
        tensors |= {f"{j}.0.linear.weight": torch.zeros(hidden, hidden), f"{j}.0.linear.bias": torch.zeros(hidden)}
    torch.save(tensors, folder / "medusa_lm_head.pt")
    return folder


def test_a_published_head_drafts(cli, medusa):
    code, out, err = cli("convert", "medusa", "--model", "builtin", "--profile", "stdlib-llama-3.7m", "--json")
    told = json.loads(out)
    assert (code, told["kind"], told["part"]) == (0, "medusa", "parts/medusa.safetensors")
    assert told["profiles"] == ["parts/medusa.yaml", "parts/medusa-below.yaml"]
    assert told["megabytes"] > 0
    assert "use it with: selfspec generate --profile parts/medusa.yaml 'your prompt'" in err
    plain = cli("generate", "--profile", "none", "--max-new-tokens", "24", "def read(")[1]
    for profile in told["profiles"]:
        assert cli("generate", "--profile", profile, "--max-new-tokens", "24", "def read(")[1] == plain


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gone", "--model", "builtin"], "gone is no folder; expected the one of a published head"),
        (["empty", "--model", "builtin"], "config.json: no such file"),
        (["empty", "--model", "gone/model"], "gone/model"),
        (["empty", "--model", "builtin", "--out", "gone/parts"], "gone/parts is no folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_input(cli, tmp_path, arguments, said):
    (tmp_path / "empty").mkdir()
    code, out, err = cli("convert", *arguments)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())
    assert "Traceback" not in err
