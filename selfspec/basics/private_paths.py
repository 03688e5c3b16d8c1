"""Whether other users can have written to a folder or a file, for what is as dangerous as code, such as a library."""

from __future__ import annotations

import functools
import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def is_private(folder: Path) -> bool:
    """Return whether only this user, or the system's administrator, can put anything at a folder's path.

    Whoever may write to a folder above can exchange what lies in it, so each folder up to the root must belong to this
    user or the administrator, and be writable to nobody else (a group of this user alone, as many systems make, may
    write). A sticky folder of the administrator's, such as /tmp, may be writable to all if the folder in it is this
    user's, as nobody else can then exchange that. Windows has no such modes: always True.
    """
    if not hasattr(os, "getuid"):
        return True
    try:
        folder = folder.resolve(strict=True)
        levels = [path.lstat() for path in (folder, *folder.parents)]
    except (OSError, RuntimeError):  # missing, or links without end
        return False
    ours, administrators = os.getuid(), {0, levels[-1].st_uid}  # in a container the root folder may be another user's
    below: os.stat_result | None = None
    for level in levels:
        if not stat.S_ISDIR(level.st_mode) or level.st_uid not in {ours, *administrators}:
            return False
        if level.st_mode & stat.S_IWOTH or (level.st_mode & stat.S_IWGRP and not _is_own_group(level.st_gid)):
            sticky = bool(level.st_mode & stat.S_ISVTX) and level.st_uid in administrators
            if not sticky or below is None or below.st_uid != ours or below.st_mode & _OTHERS_WRITE:
                return False
        below = level
    return True


@functools.cache
def _is_own_group(group: int) -> bool:
    """Return whether a group is this user's private group: of the user's name, and without other members."""
    import grp
    import pwd

    try:
        user, entry = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}


def open_private(file: Path) -> int | None:
    """Return a descriptor of a regular file that only this user or root can have written; None for any other.

    The caller closes the descriptor. What is read through it is what was checked, whatever the path leads to later.
    Raises `OSError` if the file cannot be opened, as a symbolic link cannot.
    """
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    info = os.fstat(descriptor)
    ours = not hasattr(os, "getuid") or (info.st_uid in (0, os.getuid()) and not info.st_mode & _OTHERS_WRITE)
    if ours and stat.S_ISREG(info.st_mode):
        return descriptor
    os.close(descriptor)
    return None
