"""Every command that loads a model can spread it over devices, and says and gives the same."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from models import SIZES, tiny
from transformers import LlamaConfig

from selfspec.cli import main
from selfspec.models import loading

SPREAD = ("--device-map", "auto", "--device-memory", "cpu=2200KB", "--offload-folder", "offloaded")


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path, llm):
    """Run a command on a small model `m` with a profile `p.yaml`: what it says, and on what it was loaded."""
    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(**{**SIZES, "vocab_size": 4096, "eos_token_id": None})
    tiny(config, dtype=torch.float64).save_pretrained("m")
    llm.tokenizer.save_pretrained("m")
    (tmp_path / "p.yaml").write_text(
        "version: 2\nmodel: {layers: 4}\ndraft: {kind: layer-skip, skip: {attention: [1], mlp: [2]}}\n"
    )
    (tmp_path / "texts.txt").write_text("import os\ndef f(x):\n")
    asked = []
    load = loading.load_model

    def noted(name, *, device, dtype, **others):
        model, tokenizer = load(name, device=device, dtype=dtype, **others)
        asked.append({str(place) for place in getattr(model, "hf_device_map", {"": "cpu"}).values()})
        return model, tokenizer

    for module in ("llm.llm", "measure.model_copies"):
        monkeypatch.setattr(f"selfspec.{module}.load_model", noted)

    def run(*args):
        asked.clear()
        command, *rest = args
        how = ("--model", "m", "--profile", "p.yaml", "--dtype", "float64", "--max-new-tokens", "4")
        monkeypatch.setattr(sys, "argv", ["selfspec", command, *how, *rest])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert not ended.value.code, err
        return out, asked

    return run


def test_bench(cli):
    args = ("bench", "--prompts", "texts.txt", "--rounds", "1", "--temperature", "0", "--json")
    args += ("--methods", "plain,profile,hf")
    passes = []
    for more, places in (((), {"cpu"}), (SPREAD, {"cpu", "disk"})):
        out, asked = cli(*args, *more)
        assert asked == [places]
        (at,) = json.loads(out)["temperatures"]
        assert list(at["methods"]) == ["plain", "profile", "hf"]
        passes.append({name: found["tokens_per_round"] for name, found in at["methods"].items()})
    assert passes[0] == passes[1]


def test_report(cli, tmp_path):
    pages = []
    for more, places in (((), {"cpu"}), (SPREAD, {"cpu", "disk"})):
        _, asked = cli("report", "--prompts", "texts.txt", *more)
        assert asked == [places]
        pages.append((tmp_path / "report.html").read_text())
    texts = [page[page.index('id="texts"') :] for page in pages]
    assert texts[0] == texts[1]
