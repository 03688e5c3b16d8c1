"""Files are written whole or not at all, and what stands in the way is told."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import check_writable, disk_errors, parse_json, read_text, write_cached, write_text


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


@pytest.mark.parametrize("there", [True, False])
def test_a_symbolic_link_is_not_written_to(there, tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    if there:
        target.write_text("before")
    link.symlink_to(target)
    for write in (check_writable, lambda path: write_text(path, "after")):
        with pytest.raises(SelfspecError, match=r"link is a symbolic link; expected a file to write"):
            write(link)
    assert link.is_symlink()
    assert target.exists() == there
    assert not there or target.read_text() == "before"
    (tmp_path / "folder").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "folder")
    write_text(tmp_path / "other" / "file", "a linked folder is a folder")


def test_a_file_that_is_longer_than_expected_is_not_read(tmp_path):
    (tmp_path / "a").write_text("12345")
    assert read_text(tmp_path / "a", most=5) == "12345"
    with pytest.raises(SelfspecError, match=r"a: 5 bytes; expected at most 4$"):
        read_text(tmp_path / "a", most=4)


def test_json_that_is_nested_without_end_is_invalid():
    assert parse_json('{"a": [1]}') == {"a": [1]}
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)


def test_a_full_disk_is_one_for_safetensors_too(tmp_path):
    """Its own error is no `OSError`; a file that is no safetensors file is another matter."""
    with pytest.raises(OSError, match="No such file or directory"), disk_errors():
        save_file({"a": torch.zeros(1)}, tmp_path / "nowhere" / "a.safetensors")
    (tmp_path / "b").write_bytes(b"no tensors at all")
    with pytest.raises(SafetensorError), disk_errors():
        load_file(tmp_path / "b")
