"""File reading and atomic writing with actionable errors, and whether other users can have written to a path."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from selfspec.basics.errors import SelfspecError

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


def kind(path: Path) -> Literal["file", "folder", "other", "missing"]:
    """Return the kind of `path`. Raises `SelfspecError` if the system cannot tell (name too long, no permission)."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except (OSError, ValueError) as error:
        raise SelfspecError(f"{_short(path)}: not a valid path ({_reason(error)})") from None
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def check_file(path: Path) -> None:
    """Raise `SelfspecError` unless `path` is a regular file."""
    match kind(path):
        case "missing":
            raise SelfspecError(f"{path}: no such file")
        case "folder":
            raise SelfspecError(f"{path} is a folder; expected a file")
        case "other":
            raise SelfspecError(f"{path} is a device or a pipe; expected a regular file")


def read_text(path: Path, *, most: int | None = None) -> str:
    """Read the text of `path`.

    Raises `SelfspecError` if it is missing, not a regular file, unreadable, not UTF-8, or longer than `most` bytes.
    """
    check_file(path)
    try:
        if most is not None and (size := path.stat().st_size) > most:
            raise SelfspecError(f"{path}: {size:,} bytes; expected at most {most:,}")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SelfspecError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise SelfspecError(f"{path}: cannot be read ({_reason(error)})") from None


def files_in(folder: Path) -> list[Path]:
    """Return the paths in a folder, sorted by name. Raises `SelfspecError` if it is not a folder or cannot be read."""
    match kind(folder):
        case "missing":
            raise SelfspecError(f"{folder}: no such folder")
        case "file" | "other":
            raise SelfspecError(f"{folder} is a file; expected a folder")
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise SelfspecError(f"{folder}: cannot be read ({_reason(error)})") from None


def check_writable(path: Path) -> None:
    """Raise `SelfspecError` if no file can be written at `path`; leave no file behind.

    A symbolic link is refused: writing to it would replace either the link or another file, unseen.
    """
    if os.path.islink(path):
        raise SelfspecError(f"{path} is a symbolic link; expected a file to write; name what it leads to, or delete it")
    if kind(path) in ("folder", "other"):
        raise SelfspecError(
            f"{path} is a {'folder' if path.is_dir() else 'device or a pipe'}; expected a file to write"
        )
    if kind(path.parent) != "folder":
        raise SelfspecError(f"{path}: the folder {path.parent} does not exist; make it first")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".selfspec-"):
            pass
    except OSError as error:
        raise SelfspecError(f"{path}: cannot be written ({_reason(error)})") from None


def check_not_read(out: Path, *read: str | Path | None, what: str = "a file that is read") -> None:
    """Raise `SelfspecError` if the file that `--out` names is one of those that a command reads (None: no file)."""
    files = [Path(file) for file in read if file is not None]
    if out.resolve() in {file.resolve() for file in files if kind(file) == "file"}:
        raise SelfspecError(f"--out {out} would write over {what}; expected another path")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises `ValueError`, also for lists and objects nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def json_line(value: Any, **options: Any) -> str:
    """Return a value as JSON in one line; separators that `str.splitlines` would split at are escaped.

    `options`: further options of `json.dumps`.
    """
    text = json.dumps(value, ensure_ascii=False, **options)
    return text.translate({0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"})


def make_folder(folder: Path) -> None:
    """Make a folder and the folders above it, if missing. Raises `SelfspecError` if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SelfspecError(f"{folder}: cannot be made ({_reason(error)})") from None


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically. Raises `SelfspecError` if it cannot be written."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, *data: bytes | memoryview) -> None:
    """Write `data`, one part after the other, to `path` atomically (a temporary file, then a rename).

    Raises `SelfspecError` if it cannot be written.
    """
    check_writable(path)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".selfspec-")
    except OSError as error:
        raise SelfspecError(f"{path}: cannot be written ({_reason(error)})") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            os.chmod(name, stat.S_IMODE(path.stat().st_mode))
        else:
            set_mode(name, 0o666)
        os.replace(name, path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        if isinstance(error, OSError):  # such as a full disk
            raise SelfspecError(f"{path}: cannot be written ({_reason(error)})") from None
        raise


def set_mode(path: str | Path, mode: int) -> None:
    """Give a temporary file or folder the permissions of one that is made as usual: `mode`, less the umask."""
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, mode & ~umask)


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Raise `OSError` if safetensors cannot write a file: its own error, such as for a full disk, is none."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        _, is_disk, why = str(error).rpartition("I/O error: ")
        if not is_disk:
            raise
        raise OSError(why) from error


def cache_folder() -> Path:
    """Return the cache folder: `SELFSPEC_CACHE` of the environment, else `selfspec` in the user's cache folder."""
    if folder := os.environ.get("SELFSPEC_CACHE"):
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfspec"
    except RuntimeError:  # no home directory
        return _temporary_cache()


@functools.cache
def _temporary_cache() -> Path:
    """Return this user's folder in the system's folder of temporary files; a new one if another user has made it."""
    user = os.getuid() if hasattr(os, "getuid") else "cache"
    folder = Path(tempfile.gettempdir()) / f"selfspec-{user}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder if is_private(folder) else Path(tempfile.mkdtemp(prefix="selfspec-"))


def cached_file(folder: str, what: object) -> Path:
    """Return the path of the JSON file that caches data for the JSON-serialisable key `what`, in subfolder `folder`."""
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / folder / f"{digest}.json"


def read_cached(path: Path) -> Any:
    """Return the data of a cached JSON file; None if the file is missing or unreadable."""
    try:
        return parse_json(read_text(path)) if kind(path) == "file" else None
    except (SelfspecError, ValueError):
        return None


def table_of(data: Any) -> dict[str, dict[int, float]] | None:
    """Return the table, rows by name and then by number, that JSON data holds with numbers as text.

    None if the data is no such table, or a value is not above 0 and finite.
    """
    try:
        table = {str(name): {int(key): float(value) for key, value in row.items()} for name, row in data.items()}
    except (AttributeError, TypeError, ValueError):
        return None
    return table if all(0 < value < math.inf for row in table.values() for value in row.values()) else None


def write_cached(path: Path, data: Any) -> None:
    """Write `data` as JSON to `path`; ignore failures."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(data))
    except (SelfspecError, OSError):
        pass


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _short(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 80 else text[:77] + "..."
