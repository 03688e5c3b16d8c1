"""By which name another engine loads the target."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from selfspec.export.weights import target_of


def test_a_revision_is_written_as_weights(llm, tmp_path):
    """As other engines do not read ID@REVISION."""
    out = Path("out")
    assert target_of(SimpleNamespace(name="org/model"), tmp_path, out) == ("org/model", False)
    pinned = SimpleNamespace(name="org/model@v2", model=llm.model, tokenizer=llm.tokenizer)
    assert target_of(pinned, tmp_path, out) == ("out/target", True)
    assert (tmp_path / "target" / "config.json").exists()
