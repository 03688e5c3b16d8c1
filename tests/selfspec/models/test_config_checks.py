"""Configurations that ask for endless work, or for code of the hub, are refused before anything is made of them."""

from __future__ import annotations

import json

import pytest

from selfspec import builtin
from selfspec.basics.errors import SelfspecError
from selfspec.models.config_checks import check_config
from selfspec.models.loading import load_model, read_identity
from selfspec.types.limits import MOST_LAYERS


def folder_with(tmp_path, **entries):
    """A model's folder, with other entries in its config."""
    config = json.loads((builtin.model_folder() / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | entries))
    return str(tmp_path)


CASES = [
    ({"num_hidden_layers": 10**7}, "num_hidden_layers 10000000 in its config; expected at most 10000"),
    ({"text_config": {"num_experts": 10**7}}, "num_experts 10000000 in its config"),
    ({"attn_implementation": "org/repo"}, "attn_implementation 'org/repo' in its config is a kernel of the hub"),
    ({"_attn_implementation": {"": "paged|org/repo@v1:f"}}, "_attn_implementation .* is a kernel of the hub"),
    ({"text_config": {"attn_implementation": "org/repo"}}, "attn_implementation 'org/repo' in its config"),
]


@pytest.mark.parametrize(("entries", "message"), CASES)
@pytest.mark.parametrize("read", [read_identity, load_model])
def test_what_is_refused(entries, message, read, tmp_path):
    with pytest.raises(SelfspecError, match=message):
        read(folder_with(tmp_path, **entries))


def test_what_is_served(tmp_path):
    check_config("m", folder_with(tmp_path, num_hidden_layers=MOST_LAYERS, attn_implementation="sdpa"))
    check_config("m", str(tmp_path / "missing"))  # its reader says so


def test_a_config_nested_without_end_gets_one_line(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(SelfspecError, match="cannot be read") as raised:
        read_identity(str(tmp_path))
    assert "\n" not in str(raised.value)
