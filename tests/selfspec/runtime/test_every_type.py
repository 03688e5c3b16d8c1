"""Every causal model type of the installed `transformers` gives the text of its `generate`, or is refused by name."""

from __future__ import annotations

import re

import pytest
from model_types import model_types
from type_table import tried


@pytest.mark.long("a tiny model of each of about 190 types")
@pytest.mark.parametrize("model_type", model_types())
def test_it_is_equal_or_refused_by_name(model_type):
    row = tried(model_type, raising=True)
    if row.outcome == "not tried":
        pytest.skip(row.why)
    assert row.outcome in ("equal", "refused"), row.line
    if row.outcome == "refused":
        assert re.search(rf"model_type '{re.escape(model_type)}'.* is not supported: .+", row.why), row.why
