"""A cache folder for this process's tests, with the compiled products that earlier tests have left.

No test reads or writes the user's own cache. Compiling takes a processor 20 seconds, so what was compiled is kept in
`build/tests`, under the name that selfspec gives it: a hash of the sources, the compiler and the processor.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

KEPT = Path(__file__).resolve().parents[2] / "build" / "tests" / "native"
_MADE: list[str] = []


def make_cache() -> Path:
    """Make a cache folder for this process, removed at its end, and let `SELFSPEC_CACHE` name it; the same again."""
    if not _MADE:
        _MADE.append(tempfile.mkdtemp(prefix="selfspec-tests-"))
        atexit.register(shutil.rmtree, _MADE[0], ignore_errors=True)
        os.environ["SELFSPEC_CACHE"] = _MADE[0]
        seed(Path(_MADE[0]))
    return Path(_MADE[0])


def seed(cache: Path) -> None:
    """Put what was kept into a cache folder, so that nothing is compiled there again."""
    _copy(KEPT, cache / "native")


def keep() -> None:
    """Keep what was compiled in this process's cache."""
    with suppress(OSError):  # a checkout that cannot be written to
        _copy(make_cache() / "native", KEPT)


def _copy(source: Path, target: Path) -> None:
    """Copy libraries that the target lacks, each whole or not at all."""
    for library in sorted(source.glob("*.so")):
        if not (target / library.name).exists():
            target.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, part = tempfile.mkstemp(dir=target)
            os.close(handle)
            shutil.copyfile(library, part)
            os.chmod(part, 0o700)
            os.replace(part, target / library.name)
