"""Every causal model type of the installed `transformers`, at tiny sizes: its texts, and its passes in float32."""

from __future__ import annotations

import re

import pytest
import torch
from layouts import needs_native
from model_types import model_types, tiny_model
from taken_over import decoded
from type_table import PROMPT, tried

from selfspec.basics.errors import UnsupportedModelError
from selfspec.models import module_quantizer
from selfspec.runtime import open_runtime


@pytest.mark.long("a tiny model of each of about 190 types")
@pytest.mark.parametrize("model_type", model_types())
def test_it_is_equal_or_refused_by_name(model_type):
    row = tried(model_type, raising=True)
    if row.outcome == "not tried":
        pytest.skip(row.why)
    assert row.outcome in ("equal", "refused"), row.line
    if row.outcome == "refused":
        assert re.search(rf"model_type '{re.escape(model_type)}'.* is not supported: .+", row.why), row.why


@pytest.mark.long("a tiny model of each of about 190 types")
@pytest.mark.parametrize("model_type", model_types())
def test_a_row_that_takes_over_a_prefix_gives_its_own_text(model_type):
    try:
        alone = open_runtime(tiny_model(model_type))
    except Exception as error:  # whatever keeps a tiny model of this type from being made, or run
        pytest.skip(f"not tried: {error}")
    seqs, expected = decoded(alone, 0, vocabulary=50)
    assert [seq.tokens for seq in seqs] == expected


@needs_native
@pytest.mark.long("a tiny model of each of about 190 types")
@pytest.mark.parametrize("model_type", model_types())
def test_its_passes_by_native_products_are_near_its_own(model_type, monkeypatch):
    monkeypatch.setattr(module_quantizer, "suits_native", lambda linears: True)  # small as they are
    try:
        model = tiny_model(model_type).float()
        runtime = open_runtime(model)
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    except Exception as error:  # whatever keeps a tiny model of this type from being made
        pytest.skip(f"not tried: {error}")
    ids, first = torch.tensor([PROMPT]), len(PROMPT) - 4
    with torch.inference_mode(), runtime.session(len(PROMPT)):
        parts = [
            runtime.forward(ids[:, :first], 0),
            *(runtime.forward(ids[:, i : i + 1], i) for i in range(first, first + 4)),
        ]
        ours, own = torch.cat([part.logits for part in parts], 1), model(ids).logits
    own = own[:, -ours.shape[1] :]
    assert float((ours - own).norm()) < 1e-4 * float(own.norm())
