"""Files of parts: what was written is read, and what is of something else is refused."""

from __future__ import annotations

import pytest
import torch
from heads import random_head, random_part
from models import small

from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.module_files import read_part, write_part
from selfspec.draft_modules.registry import make_head
from selfspec.runtime.forward import Runtime

WORDS = (1, 2, 4)


@pytest.fixture(scope="module")
def runtime():
    return Runtime(small(11, seed=2))


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
        make_head(Runtime(other()), random_part(runtime, WORDS))


def test_files_that_are_no_parts(tmp_path):
    (tmp_path / "notes.safetensors").write_bytes(b"not tensors")
    with pytest.raises(SelfspecError, match="no trained part can be read"):
        read_part(tmp_path / "notes.safetensors")
    with pytest.raises(SelfspecError, match="no such file"):
        read_part(tmp_path / "gone.safetensors")


def test_weights_of_something_else(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(SelfspecError, match="no trained part; expected"):
        read_part(tmp_path / "a.safetensors")
