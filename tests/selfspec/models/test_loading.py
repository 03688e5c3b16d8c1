"""Models in folders that are not what they seem: nothing of theirs is run."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from hostile import Code

from selfspec import builtin
from selfspec.basics.errors import SelfspecError
from selfspec.models.loading import load_model, load_tokenizer


@pytest.fixture
def folder(tmp_path):
    """The built-in model's folder without its weights."""
    copy = tmp_path / "model"
    shutil.copytree(builtin.model_folder(), copy, ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


def test_a_pickle_with_code_is_refused(folder, tmp_path):
    torch.save({"model.norm.weight": Code(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(SelfspecError, match=r"model .* cannot be loaded") as raised:
        load_model(str(folder))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "ran").exists()


def test_code_that_a_config_names_is_not_run(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (folder / "code.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})\n")
    named = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M", "AutoTokenizer": [None, "code.T"]}
    for name in ("config.json", "tokenizer_config.json"):
        config = json.loads((folder / name).read_text())
        config |= {"auto_map": named, "model_type": "x", "tokenizer_class": "T"}
        (folder / name).write_text(json.dumps(config))
    for load in (load_model, load_tokenizer):
        with pytest.raises(SelfspecError):
            load(str(folder))
    assert not (tmp_path / "ran").exists()
