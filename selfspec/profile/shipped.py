"""Profiles that ship with the package, and the search for a profile by name or file."""

from __future__ import annotations

import difflib
import functools
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import kind
from selfspec.profile.reading import parse_profile, read_profile
from selfspec.profile.schema import Profile


def shipped_profiles() -> dict[str, Profile]:
    """Return the profiles that ship with the package by name, which is the file's name without `.yaml`."""
    return {name: _shipped(file) for name, file in _shipped_files().items()}


def find_profile_file(name: str | Path) -> Profile:
    """Read a profile from a file, or find a shipped profile by name. Raises `SelfspecError`."""
    path = Path(name)
    if not str(name):
        raise SelfspecError("the profile's name is empty; expected a file or the name of a shipped profile")
    if kind(path) != "missing":
        return read_profile(path)
    shipped = _shipped_files()
    if str(name) in shipped:
        return _shipped(shipped[str(name)])
    near = difflib.get_close_matches(str(name), shipped, 1)
    hint = f"did you mean {near[0]}? All shipped profiles" if near else "shipped profiles"
    lacking = f"profile {name}: no such file, and no shipped profile of that name"
    raise SelfspecError(f"{lacking}; {hint} are listed by: selfspec profile list")


def _shipped_files() -> dict[str, Traversable]:
    folder = resources.files("selfspec.profiles")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    return {f.name[: -len(".yaml")]: f for f in files}


def _shipped(file: Traversable) -> Profile:
    return _parsed(file.read_text("utf-8"), file.name)


@functools.cache
def _parsed(text: str, name: str) -> Profile:
    return parse_profile(text, source=name)
