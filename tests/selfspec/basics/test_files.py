"""Files are written whole or not at all, and what stands in the way is told."""

from __future__ import annotations

import errno
import os

import pytest

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import write_cached, write_text


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
