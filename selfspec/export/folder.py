"""The output folder of an export: files are written to a temporary folder in the same parent, then moved there."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import disk_errors, files_in, kind


def check_out(out: Path, *, force: bool) -> None:
    """Raise `SelfspecError` unless `out` can be written: a missing or empty folder, with `force` any folder."""
    there = kind(out)
    if there not in ("missing", "folder"):
        raise SelfspecError(f"--out {out} is a file; expected a folder that is empty, or not there yet")
    if there == "folder" and not force and files_in(out):
        raise SelfspecError(
            f"--out {out} is not empty; expected another folder, or --force to write over what is there"
        )
    if kind(out.absolute().parent) != "folder":
        raise SelfspecError(f"--out {out}: the folder {out.parent} does not exist; make it first")


@contextlib.contextmanager
def staged_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary folder that becomes `out` on success. With `force`, other files in `out` are kept.

    Raises `SelfspecError` as `check_out` does, and if `out` cannot be written.
    """
    check_out(out, force=force)
    out = out.absolute()
    try:
        made = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    except OSError as error:
        raise SelfspecError(f"--out {out}: cannot be written ({error.strerror or error})") from None
    try:
        with disk_errors():
            yield made
        _put(made, out)
    except OSError as error:  # a full disk
        raise SelfspecError(f"--out {out}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _put(made: Path, out: Path) -> None:
    """Move the folder `made` to `out`; if `out` exists, move the entries of `made` into it, replacing equal names."""
    umask = os.umask(0)
    os.umask(umask)
    made.chmod(0o777 & ~umask)
    if not out.is_dir():
        made.rename(out)
        return
    for entry in made.iterdir():
        place = out / entry.name
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        os.replace(entry, place)
