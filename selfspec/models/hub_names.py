"""Names of models of the hub: `ID`, or `ID@REVISION` for a branch, tag or commit."""

from __future__ import annotations

import re
from pathlib import Path

from selfspec import builtin
from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import kind
from selfspec.models.pypi_models import PACKAGED

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[A-Za-z0-9][\w./-]*)?")


def is_hub_name(name: str) -> bool:
    """Return whether `name` has the form `ID` or `ID@REVISION`."""
    return _HUB_ID.fullmatch(name) is not None


def pinned(source: str) -> tuple[str, dict[str, str]]:
    """Return a folder or hub id as `from_pretrained` takes it, with the argument `revision` if `source` names one."""
    if kind(Path(source)) == "folder":
        return source, {}
    name, at, revision = source.partition("@")
    return name, {"revision": revision} if at else {}


def with_revision(name: str | None, revision: str) -> str:
    """Return `ID@REVISION`. Raises `SelfspecError` if `name` is not that of a model of the hub, or has a revision."""
    here = name is not None and (name in (builtin.NAME, *PACKAGED) or kind(Path(name)) != "missing")
    if name is None or here or "@" in name or not is_hub_name(f"{name}@{revision}"):
        got = "no --model" if name is None else f"--model {name}"
        raise SelfspecError(
            f"--revision {revision}: expected a branch, tag or commit, with a hub id as --model; got {got}"
        )
    return f"{name}@{revision}"


def stored(source: str) -> str | None:
    """Return `source` if it is a folder, else the folder of a hub id's copy in the cache, None if there is none.

    Raises `HFValidationError`, a `ValueError`, for a name that is no hub id.
    """
    if kind(Path(source)) == "folder":
        return source
    from huggingface_hub import try_to_load_from_cache

    name, revision = pinned(source)
    file = try_to_load_from_cache(name, "config.json", **revision)
    return str(Path(file).parent) if isinstance(file, str) else None
