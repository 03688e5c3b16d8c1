"""By which name another engine loads the target."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from models import CONFIGS, tiny

from selfspec.export.weights import save, target_of, weights_of


def test_a_revision_is_written_as_weights(llm, tmp_path):
    """As other engines do not read ID@REVISION."""
    out = Path("out")
    assert target_of(SimpleNamespace(name="org/model"), tmp_path, out) == "org/model"
    pinned = SimpleNamespace(name="org/model@v2", model=llm.model, tokenizer=llm.tokenizer)
    assert target_of(pinned, tmp_path, out) == "out/target"
    assert (tmp_path / "target" / "config.json").exists()


def test_a_model_of_a_file_without_its_class_is_written_with_it(tmp_path):
    """As `smollm2-135m` and other GGUF files: engines choose their code by it."""
    model = tiny(CONFIGS["llama"])
    model.config.architectures = None
    save(tmp_path / "target", weights_of(model), None, None)
    assert json.loads((tmp_path / "target/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert model.config.architectures is None
