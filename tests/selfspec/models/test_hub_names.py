"""Models of the hub at a revision: from its copy in the cache, of which no other revision is read.

Configurations that ask for endless work, or for code of the hub, are refused before anything is made of them.
"""

from __future__ import annotations

import json
import shutil

import huggingface_hub
import pytest

from selfspec import builtin
from selfspec.basics.errors import SelfspecError
from selfspec.models.hub_names import check_config, pinned, with_revision
from selfspec.models.loading import check_at_hand, load_model, load_tokenizer, read_identity, stored_config
from selfspec.types.methods import MOST_LAYERS


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A cache with two revisions of org/model, of which the second, v2, has its weights; the hub is not asked."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--org--model"
    for branch, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / branch).write_text(commit)
    (folder / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (folder / "snapshots" / ("a" * 40) / "config.json").write_text('{"model_type": "no-such-type"}')
    shutil.copytree(builtin.model_folder(), folder / "snapshots" / ("b" * 40))
    return folder / "snapshots"


def test_a_revision_is_read(cached):
    for revision in ("v2", "b" * 40):
        assert stored_config(f"org/model@{revision}") == str(cached / ("b" * 40))
        assert read_identity(f"org/model@{revision}").model_type == "llama"
    model, tokenizer = load_model("org/model@v2")
    assert model.config.model_type == "llama"
    assert tokenizer("import")["input_ids"] == load_tokenizer("builtin")("import")["input_ids"]
    with pytest.raises(SelfspecError, match="no-such-type"):
        read_identity("org/model")


def test_one_that_is_not_there(cached):
    with pytest.raises(SelfspecError, match="model org/model@v3 cannot be loaded: there is no such folder"):
        check_at_hand("org/model@v3")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("smolm2-135m", "smollm2-135m"),
        ("SmolLM2-135M", "smollm2-135m"),
        ("biultin", "builtin"),
        ("smolm2", "smollm2-135m"),
    ],
)
def test_a_mistyped_name_is_not_looked_up_on_the_hub(monkeypatch, name, meant):
    monkeypatch.setattr("selfspec.models.loading.unreachable", lambda: pytest.fail("asked the hub"))
    with pytest.raises(SelfspecError, match=rf"model {name}: no such folder; did you mean {meant}\?"):
        check_at_hand(name)


@pytest.mark.parametrize("name", ["gpt2", "org/smollm2-135m", "distilgpt2"])
def test_names_of_the_hub_are_looked_up(cached, name):
    with pytest.raises(SelfspecError, match="HF_HUB_OFFLINE"):
        check_at_hand(name)


def test_names_for_transformers(tmp_path):
    assert pinned("org/model") == ("org/model", {})
    assert pinned("org/model@refs/pr/1") == ("org/model", {"revision": "refs/pr/1"})
    (tmp_path / "a@b").mkdir()
    assert pinned(str(tmp_path / "a@b")) == (str(tmp_path / "a@b"), {})


def test_a_revision_of_a_name(tmp_path):
    assert with_revision("org/model", "v2") == "org/model@v2"
    for name in (None, "builtin", "smollm2-135m", str(tmp_path), "org/model@v1"):
        with pytest.raises(SelfspecError, match="--revision v2: expected a branch, tag or commit"):
            with_revision(name, "v2")
    with pytest.raises(SelfspecError, match="expected a branch"):
        with_revision("org/model", "")


def test_a_command_at_a_revision(cached, monkeypatch, capsys):
    from selfspec.cli import main

    args = ["generate", "import os", "-m", "org/model", "-n", "3", "--profile", "none", "-q"]
    for revision, code in (("v2", 0), ("v3", 2)):
        monkeypatch.setattr("sys.argv", ["selfspec", *args, "--revision", revision])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
    assert "model org/model@v3 cannot be loaded" in capsys.readouterr().err


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
