"""Part files: safetensors files of a trained draft module, with its kind, settings and target model as metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from selfspec.basics.errors import SelfspecError, reason
from selfspec.basics.files import check_file, write_bytes
from selfspec.types.identity import Identity

_FORMAT = "selfspec part 1"
_COMMANDS = {"int4": "make one with: selfspec quantize"}  # by kind; others are trained


@dataclass(frozen=True, slots=True)
class PartFile:
    """The contents of a part file: a module's kind, its settings (any JSON), its tensors by name, its target model."""

    kind: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    model: Identity

    def check(self, kind: str, model: Identity) -> None:
        """Raise `SelfspecError` if the module is of another kind, or was trained for another model or other weights."""
        remedy = _COMMANDS.get(kind, "train one with: selfspec train")
        if self.kind != kind:
            raise SelfspecError(f"the part is of kind '{self.kind}'; expected '{kind}'")
        if difference := self.model.mismatch(model):
            raise SelfspecError(f"the part is of another model: {difference}; {remedy}")
        mine, theirs = self.model.fingerprint, model.fingerprint
        if mine is not None and theirs is not None and mine != theirs:
            raise SelfspecError(f"the part is of other weights (fingerprint {mine}, the model's is {theirs}); {remedy}")


def write_part(path: Path, part: PartFile) -> None:
    """Write a part file atomically. Raises `SelfspecError` if the file cannot be written."""
    header = {
        "format": _FORMAT,
        "kind": part.kind,
        "settings": json.dumps(dict(part.settings)),
        "model": part.model.model_dump_json(),
    }
    write_bytes(path, save({name: tensor.contiguous() for name, tensor in part.tensors.items()}, header))


def read_part(path: Path) -> PartFile:
    """Read a part file. Raises `SelfspecError` if the file does not exist or is no part file."""
    with opened_part(path) as (part, file):
        return replace(part, tensors={name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 (no mapping)


@contextmanager
def opened_part(path: Path) -> Iterator[tuple[PartFile, Any]]:
    """Open a part file, to read some of its tensors: yields the part without tensors, and the safetensors file.

    Raises `SelfspecError` as `read_part`, also for any error in the context.
    """
    check_file(path)
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            if header.get("format") != _FORMAT:
                raise SelfspecError(f"{path}: no trained part; expected a file that selfspec train wrote")
            model = Identity.model_validate_json(header["model"])
            settings = json.loads(header["settings"])
            if not isinstance(settings, dict):
                raise ValueError("its settings are no object")
            yield PartFile(header["kind"], settings, {}, model), file
    except SelfspecError:
        raise
    except Exception as error:
        raise SelfspecError(f"{path}: no trained part can be read from it ({reason(error)})") from None
