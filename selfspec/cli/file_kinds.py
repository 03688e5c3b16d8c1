"""Kinds of files, recognised by content (profile, trials of a search, benchmark, training); opening of a study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import kind, parse_json, read_text

if TYPE_CHECKING:
    from selfspec.search.ledger import Ledger

FileKind = Literal["profile", "study", "bench", "training"]


def recognise(source: str, storage: str | None) -> FileKind:
    """Return the kind of `source`, a file, a folder or a name.

    With a `storage`, `source` is the name of a study; a name without a file is taken for a shipped profile; a folder
    is a training. A file is recognised by its content, which is not validated. Raises `SelfspecError` for a file of no
    known kind.
    """
    if storage is not None:
        return "study"
    path_kind = kind(Path(source)) if source else "missing"
    if path_kind == "missing":
        return "profile"  # a shipped profile's name, or missing: its reader raises the error
    if path_kind == "folder":
        return "training"
    text = read_text(Path(source)).lstrip()
    first = _json(text.partition("\n")[0])
    if isinstance(first, dict) and "op_code" in first:
        return "study"
    if isinstance(content := _json(text), dict) and "model" in content:
        return "bench" if "temperatures" in content else "training" if "history" in content else "profile"
    if content is None and text and text[0] not in '{["':
        return "profile"
    raise SelfspecError(
        f"{source}: expected a profile, a search's file of trials, or a file that selfspec bench or train wrote"
    )


def open_study(study: str, storage: str | None) -> Ledger:
    """Open a study by its file of trials, or by its name in a storage. Raises `SelfspecError` if there is none."""
    from selfspec.search.ledger import Ledger
    from selfspec.search.storage import resolve_storage

    if storage is None:
        if not study or kind(Path(study)) != "file":
            raise SelfspecError(f"{study}: no such file; expected a file of trials, or --storage and a study's name")
        return Ledger(Path(study), None)
    where = resolve_storage(storage)
    if isinstance(where, Path) and kind(where) != "file":
        raise SelfspecError(f"--storage {storage}: no such file; expected a file of trials, or a database's URL")
    return Ledger(where, study)


def _json(text: str) -> object:
    try:
        return parse_json(text)
    except ValueError:
        return None
