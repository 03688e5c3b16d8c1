"""Reader of a GGUF file's header, metadata and tensor descriptions, in milliseconds; of all files of a split model.

`gguf`'s own reader makes an array of every token (seconds for a large vocabulary) and cannot explain what is wrong with
a broken file. Sizes of types are `gguf`'s. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from selfspec.basics.errors import SelfspecError, short
from selfspec.basics.files import kind
from selfspec.types.methods import MOST_LAYERS

MAGIC = b"GGUF"
_SCALARS = "BbHhIif?__Qqd"  # `struct` format letters by GGUF value type; 8 is a string, 9 an array
_FLOAT, _TEXT, _ARRAY = 6, 8, 9
_LONGEST = 1 << 26  # most bytes of a string, items of an array, or tensors: no real file comes near
_PART = re.compile(r"-([0-9]{5})-of-([0-9]{5})\.gguf$")  # how the names of a split model's files end
_MOST_FILES = 1000


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the file: its shape (fastest dimension first, as in the file), type and data offset."""

    shape: tuple[int, ...]
    type: int  # a `gguf.GGMLQuantizationType`
    start: int  # bytes from the beginning of the file
    path: Path  # the file


@dataclass(frozen=True, slots=True)
class Header:
    """A GGUF file's metadata by key and its tensors by name; of a split model, those of all its files.

    An array of up to `MOST_LAYERS` numbers is a tuple; of any other array, the metadata has only the length.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def architecture(self) -> str:
        """The model architecture, as llama.cpp names it."""
        return str(self.metadata.get("general.architecture", "unknown"))

    def arch_value(self, key: str) -> Any:
        """Return the value of an architecture key, such as `context_length`; None if there is none."""
        return self.metadata.get(f"{self.architecture}.{key}")


def is_gguf(path: Path) -> bool:
    """Return whether a file begins with GGUF's magic bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file, and of the other files of its model if it is split.

    Raises `SelfspecError` if a file is missing, broken, cut off, or not GGUF.
    """
    files = model_files(path)
    header = _read_one(files[0])
    for number, file in enumerate(files[1:], 2):
        part = _read_one(file)
        if part.metadata.get("split.no") != number - 1 or part.metadata.get("split.count") != len(files):
            raise SelfspecError(f"{file}: not file {number} of {len(files)} of {files[0].name}; fetch the files again")
        header = replace(header, tensors={**header.tensors, **part.tensors})
    total = header.metadata.get("split.tensors.count", len(header.tensors))
    if len(files) > 1 and total != len(header.tensors):
        raise SelfspecError(f"{files[0]}: {len(header.tensors)} tensors in {len(files)} files; expected {short(total)}")
    return header


def model_files(path: Path) -> list[Path]:
    """Return all files of the model that a GGUF file is part of, in order: by their names, as llama.cpp splits models.

    Raises `SelfspecError` if the file is part of a split model whose other files are missing, or cannot be
    derived from its name.
    """
    parts = _read_one(path).metadata.get("split.count", 1)
    if parts in (0, 1):
        return [path]
    name = _PART.search(path.name)
    if type(parts) is not int or not 1 < parts <= _MOST_FILES or name is None or int(name[2]) != parts:
        raise SelfspecError(
            f"{path}: one of {short(parts)} files of a split model; expected a name that ends in -00001-of-"
            f"{parts if type(parts) is int else 0:05}.gguf"
        )
    begin = path.name[: name.start()]
    files = [path.with_name(f"{begin}-{number:05}-of-{parts:05}.gguf") for number in range(1, parts + 1)]
    if missing := [file.name for file in files if kind(file) != "file"]:
        raise SelfspecError(
            f"{path}: one of {parts} files of a split model, of which {missing[0]} is missing beside it"
        )
    return files


def _read_one(path: Path) -> Header:
    """Return the header of one file, read again only if the file's size or modification time has changed."""
    try:
        stat = path.stat()
        return _parsed(path, stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise SelfspecError(f"{path}: cannot be read ({error.strerror or error})") from None


@lru_cache(maxsize=_MOST_FILES)
def _parsed(path: Path, size: int, _modified: int) -> Header:
    try:
        with path.open("rb") as file:
            header = _Reader(file, path).header()
    except (struct.error, UnicodeDecodeError, IndexError):
        raise SelfspecError(f"{path}: cut off or broken: its header cannot be read; fetch the file again") from None
    end = max((_end(name, tensor) for name, tensor in header.tensors.items()), default=0)
    if end > size:
        raise SelfspecError(f"{path}: cut off: {size:,} bytes of at least {end:,}; fetch the file again")
    return header


def _end(name: str, tensor: Tensor) -> int:
    """Return the offset where a tensor's data ends.

    Raises `SelfspecError` for a type unknown to `gguf`, and for rows that are not whole blocks of the type.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if tensor.type not in GGML_QUANT_SIZES:
        raise SelfspecError(
            f"{tensor.path}: tensor {name} is of type {tensor.type}, which gguf does not know; expected one of "
            f"{', '.join(kind.name for kind in GGMLQuantizationType if kind.name[0] in 'QFB')}"
        )
    quantization = GGMLQuantizationType(tensor.type)
    values, size = GGML_QUANT_SIZES[quantization]
    if tensor.shape and tensor.shape[0] % values:
        raise SelfspecError(
            f"{tensor.path}: tensor {name} of type {quantization.name} has rows of "
            f"{tensor.shape[0]} weights; expected a multiple of {values}"
        )
    return tensor.start + prod(tensor.shape) // values * size


class _Reader:
    """A sequential reader of a header; broken data raises `struct.error`."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path

    def header(self) -> Header:
        if self._file.read(len(MAGIC)) != MAGIC:
            raise SelfspecError(f"{self._path}: not a GGUF file (it does not begin with GGUF)")
        version = self._scalar("I")
        if version not in (2, 3):
            raise SelfspecError(
                f"{self._path}: GGUF version {version}; expected 2 or 3, little-endian; convert the model again"
            )
        tensors, pairs = self._length(), self._length()
        metadata = dict(self._pair() for _ in range(pairs))
        tensor_infos = {}
        for _ in range(tensors):
            name = self._text()
            shape = tuple(self._length() for _ in range(min(self._scalar("I"), 8)))
            tensor_infos[name] = Tensor(shape, self._scalar("I"), self._scalar("Q"), self._path)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise struct.error
        start = -(-self._file.tell() // alignment) * alignment  # the data begins at the next multiple of the alignment
        return Header(metadata, {name: replace(t, start=start + t.start) for name, t in tensor_infos.items()})

    def _pair(self) -> tuple[str, Any]:
        return self._text(), self._value(self._scalar("I"))

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _FLOAT:
            return _shortest(self._scalar("f"))
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        kind, length = self._scalar("I"), self._length()
        if kind == _TEXT:
            for _ in range(length):
                self._file.seek(self._length(), 1)
        elif length <= MOST_LAYERS:
            return tuple(self._scalar(_SCALARS[kind]) for _ in range(length))
        else:
            self._file.seek(length * struct.calcsize(f"<{_SCALARS[kind]}"), 1)
        return length

    def _text(self) -> str:
        return self._bytes(self._length()).decode("utf-8")

    def _length(self) -> int:
        length = self._scalar("Q")
        if length > _LONGEST:
            raise struct.error
        return int(length)

    def _scalar(self, letter: str) -> Any:
        form = f"<{letter}"
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _bytes(self, length: int) -> bytes:
        data = self._file.read(length)
        if len(data) < length:
            raise struct.error
        return data


def _shortest(value: float) -> float:
    """Return the number with the fewest digits that a float32 stands for: 0.1, and not 0.10000000149."""
    for digits in range(1, 9):
        with contextlib.suppress(OverflowError):
            if struct.pack("<f", number := float(f"{value:.{digits}g}")) == struct.pack("<f", value):
                return number
    return value
