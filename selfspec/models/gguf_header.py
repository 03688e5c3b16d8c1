"""Reader of a GGUF file's header, metadata and tensor descriptions, in milliseconds.

`gguf`'s own reader makes an array of every token (seconds for a large vocabulary) and cannot explain what is wrong with
a broken file. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from selfspec.basics.errors import SelfspecError

MAGIC = b"GGUF"
_SCALARS = "BbHhIif?__Qqd"  # `struct` format letters by GGUF value type; 8 is a string, 9 an array
_TEXT, _ARRAY = 8, 9
_LONGEST = 1 << 26  # most bytes of a string, items of an array, or tensors: no real file comes near


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the file: its shape (fastest dimension first, as in the file), type and data offset."""

    shape: tuple[int, ...]
    type: int  # a `gguf.GGMLQuantizationType`
    start: int  # bytes from the beginning of the file


@dataclass(frozen=True, slots=True)
class Header:
    """A GGUF file's metadata by key (for an array, only its length) and its tensors by name."""

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
    """Read the header of a GGUF file. Raises `SelfspecError` if the file is broken, cut off, or not GGUF."""
    try:
        with path.open("rb") as file:
            header = _Reader(file, path).header()
            size = path.stat().st_size
    except OSError as error:
        raise SelfspecError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (struct.error, UnicodeDecodeError, IndexError):
        raise SelfspecError(f"{path}: cut off or broken: its header cannot be read; fetch the file again") from None
    end = max((_end(path, name, tensor) for name, tensor in header.tensors.items()), default=0)
    if end > size:
        raise SelfspecError(f"{path}: cut off: {size:,} bytes of at least {end:,}; fetch the file again")
    return header


def _end(path: Path, name: str, tensor: Tensor) -> int:
    """Return the offset where a tensor's data ends. Raises `SelfspecError` for a type unknown to `gguf`."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    if tensor.type not in known:
        raise SelfspecError(
            f"{path}: tensor {name} is of type {tensor.type}, which gguf does not know; expected one of "
            f"{', '.join(kind.name for kind in GGMLQuantizationType if kind.name[0] in 'QFB')}"
        )
    values, size = known[tensor.type]
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
            tensor_infos[name] = Tensor(shape, self._scalar("I"), self._scalar("Q"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise struct.error
        start = -(-self._file.tell() // alignment) * alignment  # the data begins at the next multiple of the alignment
        return Header(metadata, {name: Tensor(t.shape, t.type, start + t.start) for name, t in tensor_infos.items()})

    def _pair(self) -> tuple[str, Any]:
        return self._text(), self._value(self._scalar("I"))

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        kind, length = self._scalar("I"), self._length()
        if kind == _TEXT:
            for _ in range(length):
                self._file.seek(self._length(), 1)
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
