"""Paths that other users can write to are told from paths that only this user can."""

from __future__ import annotations

import os
import stat

import pytest

from selfspec.basics import files
from selfspec.basics.files import is_private, open_private

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="Windows has no such modes")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two folders, one in the other, of a group that others are in."""
    monkeypatch.setattr(files, "_is_own_group", lambda group: False)
    (tmp_path / "outer" / "inner").mkdir(parents=True, mode=0o700)
    (tmp_path / "outer").chmod(0o755)
    return tmp_path / "outer" / "inner"


def test_a_folder_of_ones_own_is_private(folder):
    assert is_private(folder)
    assert not is_private(folder / "missing")


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o1777])
def test_whoever_may_write_above_can_exchange_it(mode, folder):
    folder.parent.chmod(mode)
    sticky = bool(mode & stat.S_ISVTX) and os.getuid() == 0  # then it is as /tmp is
    assert is_private(folder) == sticky
    folder.chmod(0o711)
    assert is_private(folder) == sticky
    folder.chmod(0o775)
    assert not is_private(folder)
    folder.chmod(0o755)
    folder.parent.chmod(0o755)
    assert is_private(folder)


def test_a_group_of_this_user_alone_may_write(folder, monkeypatch):
    folder.parent.chmod(0o775)
    assert not is_private(folder)
    monkeypatch.setattr(files, "_is_own_group", lambda group: group == folder.stat().st_gid)
    assert is_private(folder)
    folder.parent.chmod(0o777)
    assert not is_private(folder)


def test_a_link_counts_as_where_it_leads(folder, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    assert not is_private(tmp_path / "link")
    (folder / "a").symlink_to(folder / "a")
    assert not is_private(folder / "a")


@pytest.mark.parametrize("owner", [0, 1])  # of the folder above; another user's may not be
def test_another_users_folders_are_not_private(owner, folder):
    if os.getuid() != 0:
        pytest.skip("only the administrator can give folders away")
    os.chown(folder.parent, owner, 0)
    assert is_private(folder) == (owner == 0)
    os.chown(folder, 1, 0)
    assert not is_private(folder)


def test_only_ones_own_files_are_opened(folder):
    file = folder / "file"
    file.write_bytes(b"mine")
    file.chmod(0o700)
    descriptor = open_private(file)
    assert os.read(descriptor, 9) == b"mine"
    os.close(descriptor)
    file.chmod(0o720)
    assert open_private(file) is None
    os.mkfifo(folder / "pipe", 0o700)
    assert open_private(folder / "pipe") is None
    (folder / "link").symlink_to(file)
    with pytest.raises(OSError, match="symbolic links"):
        open_private(folder / "link")


def test_without_a_home_the_cache_is_no_folder_that_another_user_made(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.delenv("SELFSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(files.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
    files._temporary_cache.cache_clear()
    own = tmp_path / f"selfspec-{os.getuid()}"
    assert files.cache_folder() == own
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    files._temporary_cache.cache_clear()
    other = files.cache_folder()
    assert other != own
    assert other == files.cache_folder(), "one for each process"
    files._temporary_cache.cache_clear()
