"""The storage of a search's trials, by Optuna: memory, a journal file, or a database."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

import optuna
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from selfspec.basics.errors import SelfspecError, one_line
from selfspec.basics.files import check_writable, kind, parse_json, read_text

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MEMORY = "memory"
DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql"}
INSTALLED_BY = {"postgresql": "'psycopg[binary]'", "mysql": "pymysql"}
_TRIES = 6  # attempts to create the tables of a database, which several workers may try at the same time


def is_database(where: str | Path) -> bool:
    """Return whether `where` is the URL of a database."""
    return isinstance(where, str) and "://" in where


def resolve_storage(where: str | Path) -> str | Path:
    """Return the path of a file, unless `where` is `memory` or the URL of a database, which are returned unchanged."""
    return where if where == MEMORY or is_database(where) else Path(where)


def display_name(where: str | Path) -> str:
    """Return a storage's name for display, with a URL's password hidden."""
    if not is_database(where):
        return str(where)
    head, _, rest = str(where).partition("://")
    user, separator, host = rest.rpartition("@")
    return f"{head}://{user.partition(':')[0]}:***@{host}" if separator and ":" in user else str(where)


def open_storage(where: str | Path, *, write: bool = True) -> BaseStorage:
    """Open a study's storage, for reading alone unless `write`.

    `where`, as `resolve_storage` returns it, is `memory`, a URL such as `postgresql://...`, or else the path of a
    journal file, which is made if it is missing. Raises `SelfspecError` for a file that is not a journal, and for a
    database that cannot be reached or whose driver is not installed.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if where == MEMORY:
        return InMemoryStorage()
    return _database(str(where)) if is_database(where) else _journal(Path(where), write=write)


def check_storage(where: str | Path) -> None:
    """Raise `SelfspecError` if `open_storage` would fail; a missing journal file is not made."""
    if isinstance(where, Path):
        check_writable(where)
        _check_journal(where)
    else:
        open_storage(where)


def _journal(path: Path, *, write: bool) -> BaseStorage:
    if write:
        check_writable(path)
    _check_journal(path)
    with storage_errors(path):
        lock = JournalFileOpenLock(str(path)) if fcntl is None else _JournalLock(path)
        return JournalStorage(JournalFileBackend(str(path), lock))


def _check_journal(path: Path) -> None:
    """Raise `SelfspecError` for a file that is not a journal or has a damaged line; the last line may be unfinished."""
    if kind(path) == "missing":
        return
    text = read_text(path)
    for number, line in enumerate(text.split("\n")[:-1] or [text] * bool(text)):
        try:
            sound = isinstance(parse_json(line)["op_code"], int)
        except (ValueError, KeyError, TypeError):
            sound = number == 0 and not text.endswith("\n") and '{"op_code":'.startswith(line[:11]) and line == text
        if not sound:
            what = "is damaged" if number else "is not a file of trials"
            raise SelfspecError(f"{path} {what}; delete it, or name another storage for the trials")


class _JournalLock(JournalFileOpenLock):
    """Lock of a journal file by the operating system, which releases it when the worker that holds it is killed.

    Optuna takes the lock for each write; a last line that a kill cut short is dropped before.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def acquire(self) -> bool:
        """Wait for the lock, and drop an incomplete last line of the file."""
        self._descriptor = os.open(self._path, os.O_RDWR)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        with open(self._descriptor, "r+b", closefd=False) as file:
            if _torn(file):
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        """Release the lock by closing the file."""
        os.close(self._descriptor)


def _torn(file: BinaryIO) -> bool:
    """Return whether the last line of the file is incomplete."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def _database(url: str) -> BaseStorage:
    from sqlalchemy.exc import ArgumentError

    name = display_name(url)
    scheme, _, rest = url.partition("://")
    kind_of, _, driver = scheme.partition("+")
    if not driver and kind_of in DRIVERS and find_spec(DRIVERS[kind_of]) is not None:
        url = f"{kind_of}+{DRIVERS[kind_of]}://{rest}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _patiently(lambda: RDBStorage(url, engine_kwargs={"pool_pre_ping": True}), name)
    except SelfspecError:
        raise
    except RuntimeError as error:  # tables of another version of Optuna
        raise SelfspecError(f"storage {name}: {one_line(error)}") from None
    except (ArgumentError, ValueError):
        raise SelfspecError(
            f"storage {name}: expected memory, a file, or a database's URL such as postgresql://user:password@host/name"
        ) from None
    except ImportError as error:
        install = f"pip install {INSTALLED_BY[kind_of]}" if kind_of in DRIVERS else " ".join(str(error).split())
        raise SelfspecError(f"storage {name}: its driver is not installed; {install}") from None


def _patiently(make: Callable[[], BaseStorage], name: str) -> BaseStorage:
    """Open a database by `make`; retry if the tables exist already because another worker makes them just now."""
    for again in range(_TRIES):
        try:
            with storage_errors(name):
                return make()
        except SelfspecError as error:
            if again == _TRIES - 1 or "exist" not in str(error.__cause__) + str(error):
                raise
            time.sleep(0.2 * (again + 1))
    raise AssertionError("not reached")


@contextmanager
def storage_errors(name: str | Path) -> Iterator[None]:
    """Raise errors of the storage as a `SelfspecError` of one line; `name`: the storage's path or name."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError

    try:
        yield
    except (SelfspecError, ArgumentError):
        raise
    except (StorageInternalError, SQLAlchemyError, OSError) as error:
        cause = error.__cause__ or error
        lines = str(getattr(cause, "orig", None) or cause).strip().splitlines()
        raise SelfspecError(f"storage {name}: {lines[0] if lines else type(cause).__name__}") from cause
    except Exception as error:  # Optuna replays a journal's lines without checking them
        if isinstance(name, Path):
            raise SelfspecError(f"{name} is damaged ({type(error).__name__}); delete it to start anew") from None
        raise
