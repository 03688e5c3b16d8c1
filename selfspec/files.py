"""Reading and writing files with errors a person can act on; writes are atomic. Knows nothing of torch."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from selfspec.errors import SelfspecError


def read_text(path: Path) -> str:
    """The text of `path`. Raises `SelfspecError` when it is missing, no file, unreadable or not UTF-8."""
    if path.is_dir():
        raise SelfspecError(f"{path} is a folder; want a file")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SelfspecError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise SelfspecError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise SelfspecError(f"{path}: cannot be read ({error.strerror})") from None


def check_writable(path: Path) -> None:
    """Raise `SelfspecError` when a file could not be written at `path`; leaves nothing behind."""
    if path.is_dir():
        raise SelfspecError(f"{path} is a folder; want a file to write")
    if not path.parent.is_dir():
        raise SelfspecError(f"{path}: the folder {path.parent} does not exist; make it first")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".selfspec-"):
            pass
    except OSError as error:
        raise SelfspecError(f"{path}: cannot be written ({error.strerror})") from None


def write_text(path: Path, text: str) -> None:
    """Write `text` at `path` whole or not at all (a temporary file, then a rename)."""
    check_writable(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".selfspec-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
