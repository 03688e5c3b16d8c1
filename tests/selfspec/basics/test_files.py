"""Files are written whole or not at all, and what stands in the way is told."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import disk_errors, write_cached, write_text


def test_a_full_disk_names_the_file_and_leaves_what_was_there(tmp_path, monkeypatch):
    def full(_handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = tmp_path / "report.html"
    write_text(file, "before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SelfspecError, match=r"report\.html: cannot be written \(No space left on device\)"):
        write_text(file, "after")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("report.html", "before")]
    write_cached(tmp_path / "cache" / "a.json", {})  # which does without
    assert not list((tmp_path / "cache").iterdir())


def test_a_full_disk_is_one_for_safetensors_too(tmp_path):
    """Its own error is no `OSError`; a file that is no safetensors file is another matter."""
    with pytest.raises(OSError, match="No such file or directory"), disk_errors():
        save_file({"a": torch.zeros(1)}, tmp_path / "nowhere" / "a.safetensors")
    (tmp_path / "b").write_bytes(b"no tensors at all")
    with pytest.raises(SafetensorError), disk_errors():
        load_file(tmp_path / "b")
