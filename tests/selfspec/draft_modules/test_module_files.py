"""Files of parts: what was written is read, and what is of something else is refused."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch
from heads import random_head, random_part
from models import small

from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.module_files import read_part, write_part
from selfspec.draft_modules.registry import make_head
from selfspec.runtime.forward import LeanRuntime

WORDS = (1, 2, 4)


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(small(11, seed=2))


def test_what_is_written_is_read(runtime, tmp_path):
    part = random_part(runtime, WORDS)
    write_part(tmp_path / "eagle.safetensors", part)
    read = read_part(tmp_path / "eagle.safetensors")
    assert (read.kind, dict(read.settings), read.model) == (part.kind, dict(part.settings), part.model)
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in part.tensors.items())
    assert make_head(runtime, read).words.tolist() == list(WORDS)
    assert random_head(runtime, WORDS).bytes > 0


@pytest.mark.parametrize(
    ("other", "said"),
    [(lambda: small(11, 2, seed=2), "another model: layers 3"), (lambda: small(11, seed=5), "other weights")],
)
def test_a_part_of_another_model_is_refused(runtime, other, said):
    with pytest.raises(SelfspecError, match=said):
        make_head(LeanRuntime(other()), random_part(runtime, WORDS))


def test_files_that_are_no_parts(tmp_path):
    (tmp_path / "notes.safetensors").write_bytes(b"not tensors")
    with pytest.raises(SelfspecError, match="no trained part can be read"):
        read_part(tmp_path / "notes.safetensors")
    with pytest.raises(SelfspecError, match="no such file"):
        read_part(tmp_path / "gone.safetensors")


@pytest.mark.parametrize("size", [2**60, 2**64 - 1, 10**8])
def test_a_header_of_2_60_bytes_is_refused_at_once(size, tmp_path):
    (tmp_path / "huge.safetensors").write_bytes(struct.pack("<Q", size) + b"{}")
    with pytest.raises(SelfspecError, match="huge.safetensors: no trained part can be read from it"):
        read_part(tmp_path / "huge.safetensors")


@pytest.mark.parametrize("settings", ["[]", "3", "[" * 100_000, "{"])
def test_settings_that_are_no_object_are_refused(settings, runtime, tmp_path):
    from safetensors.torch import save_file

    model = random_part(runtime, WORDS).model.model_dump_json()
    header = {"format": "selfspec part 1", "kind": "eagle", "settings": settings, "model": model}
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors", header)
    with pytest.raises(SelfspecError, match="a.safetensors: no trained part can be read from it") as raised:
        read_part(tmp_path / "a.safetensors")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "words", "said"),
    [
        ({"layers": [99]}, None, r"reads layers \(99,\); expected some of 0 to "),
        ({"layers": ["1"]}, None, r"reads layers \('1',\); expected some of 0 to "),
        ({"layers": []}, None, r"reads layers \(\); expected some of 0 to "),
        ({"layers": 1}, None, "wrong contents"),
        ({}, [1, 11], "draft vocabulary is not of the model's 11 tokens"),
        ({}, [-1, 2], "draft vocabulary is not of the model's 11 tokens"),
        ({}, [[1], [2]], "draft vocabulary is not of the model's 11 tokens"),
        ({}, [], "draft vocabulary is not of the model's 11 tokens"),
    ],
)
def test_a_head_of_layers_or_tokens_that_the_model_lacks_is_refused(settings, words, said, runtime):
    part = random_part(runtime, WORDS)
    tensors = dict(part.tensors) if words is None else {**part.tensors, "vocabulary": torch.tensor(words)}
    with pytest.raises(SelfspecError, match=said):
        make_head(runtime, replace(part, settings={**part.settings, **settings}, tensors=tensors))


def test_weights_of_something_else(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(SelfspecError, match="no trained part; expected"):
        read_part(tmp_path / "a.safetensors")
