"""Files of trained weights beside a profile: their paths and checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Self

from pydantic import Field, model_validator

from selfspec.basics.checked_model import Data
from selfspec.basics.errors import SelfspecError, short
from selfspec.basics.files import check_file, kind, write_bytes

SUFFIX = ".safetensors"


class ModuleFile(Data):
    """A file of trained weights: its path beside the profile and its SHA-256."""

    file: str = Field(description="Path of a .safetensors file, relative to the profile's folder, without '..'.")
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] = Field(description="SHA-256 of the file, in hexadecimal.")

    @model_validator(mode="after")
    def _beside_the_profile(self) -> Self:
        check_beside(self.file, "parts")
        if PureWindowsPath(self.file).suffix != SUFFIX:
            raise SelfspecError(f"parts: {short(self.file)} is no {SUFFIX} file; expected one")
        return self


def check_beside(file: str, what: str) -> None:
    """Raise `SelfspecError`, which begins with `what`, unless `file` is a path beside or below the profile's folder."""
    windows = PureWindowsPath(file)  # parses both separators, and drives
    if windows.anchor or PurePosixPath(file).is_absolute() or ".." in windows.parts or "\0" in file:
        raise SelfspecError(
            f"{what}: {short(file)} is not beside the profile; expected a path from its folder, without '..'"
        )


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Raises `SelfspecError` for a missing or unreadable file."""
    check_file(file)
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise SelfspecError(f"{file}: cannot be read ({error.strerror or error})") from None


def bring_parts(parts: Mapping[str, ModuleFile], source: Path, folder: Path) -> dict[str, ModuleFile]:
    """Copy the parts that `folder` lacks from `source`, and return the parts as they are named in `folder`.

    Where another file has a part's name, the copy's name has the part's SHA-256. Raises `SelfspecError` if a part
    cannot be copied.
    """
    brought = dict(parts)
    if source.resolve() == folder.resolve():
        return brought
    for name, part in parts.items():
        if kind(folder / part.file) == "file" and sha256_of(folder / part.file) != part.sha256:
            named = PurePosixPath(part.file)
            file = str(named.with_name(f"{named.stem}-{part.sha256[:12]}{named.suffix}"))
            brought[name] = part.model_copy(update={"file": file})
        if kind(folder / brought[name].file) == "missing":
            check_file(source / part.file)
            try:
                write_bytes(folder / brought[name].file, (source / part.file).read_bytes())
            except OSError as error:
                raise SelfspecError(f"{source / part.file}: cannot be read ({error.strerror or error})") from None
    return brought


def check_parts(parts: Mapping[str, ModuleFile], folder: Path) -> None:
    """Raise `SelfspecError` unless each part is a file in `folder` with the recorded SHA-256."""
    for name, part in parts.items():
        try:
            checksum = sha256_of(folder / part.file)
        except SelfspecError as error:
            raise SelfspecError(f"part {short(name)}: {error}") from None
        if checksum != part.sha256:
            raise SelfspecError(
                f"part {short(name)}: {folder / part.file} is another file than the profile was made with; "
                f"expected one whose sha256 begins with {part.sha256[:12]}"  # the file's may be a secret, behind a link
            )
