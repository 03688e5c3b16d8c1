"""Prompts from files, folders and the hub. Knows nothing of torch.

Lines of `.jsonl` and `.txt` are read here, not by `datasets`: its JSON reader makes dates of texts that look like one
and takes `["a"]` for a row, and neither of its readers tells the line that is wrong.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import kind, read_text
from selfspec.text.prompt import is_unicode
from selfspec.text.shape import Shape
from selfspec.text.sources import PRESETS, read_folder, read_parquet, read_preset


@dataclass(frozen=True, slots=True)
class Prompts:
    """Texts to draw prompts from, where they come from, and what of each row they are."""

    source: str
    texts: tuple[str, ...]
    column: str | None = None
    template: str | None = None


def read_prompts(
    data: str | Path, *, column: str | None = None, template: str | None = None, held_out: bool = False
) -> Prompts:
    """Prompts of a file, a folder, or a set of the hub by its name in `PRESETS`.

    A `.jsonl` file (an object a line), a `.txt` file (one a line) or a `.parquet` file; of a folder, each text file is
    one. A preset's name is the preset; write `./gsm8k` for a folder called that. `column` and `template` as in `Shape`;
    where neither is given, the preset's. `held_out`: of a preset, those that searches do not draw from, where it has
    such. Raises `SelfspecError` naming the file, and the line that is wrong.
    """
    name, path = str(data), Path(data)
    if not name:
        raise SelfspecError("the data's name is empty; want a file, a folder, or the name of a set")
    shape = Shape(column, template)
    if name in PRESETS:
        preset = PRESETS[name]
        shape = preset.shape if shape == Shape() else shape
        texts = read_preset(name, shape, held_out=held_out)
        split = preset.held_out if held_out else preset.split
        name = " ".join(filter(None, (preset.repository, preset.config, split)))
    elif kind(path) == "folder":
        texts, name = read_folder(path, shape), path.resolve().name
    elif path.suffix.lower() == ".parquet":
        texts, name = read_parquet(path, shape), path.name
    else:
        texts, name = _read_lines(path, shape), path.name
    return Prompts(name, tuple(texts), shape.column, shape.template)


def _read_lines(path: Path, shape: Shape) -> list[str]:
    suffix = path.suffix.lower()
    if suffix not in (".jsonl", ".txt"):
        missing = "no such file or folder; " if kind(path) == "missing" else ""
        raise SelfspecError(
            f"{path}: {missing}want a .jsonl file (rows with 'prompt' or 'text'), a .txt file (one a line), a .parquet "
            f"file, a folder of text files, or one of {', '.join(PRESETS)}"
        )
    lines = read_text(path).split("\n")
    rows = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    if suffix == ".txt":
        try:
            shape.columns(["text"])
        except SelfspecError as error:
            raise SelfspecError(f"{path}: {error}") from None
        found = (shape.text({"text": line.rstrip("\r")}) for _, line in rows)
        prompts = [text for text in found if text is not None]
    else:
        prompts = [_prompt(line, shape, where=f"{path}, line {number}") for number, line in rows]
    if not prompts:
        raise SelfspecError(f"{path}: holds no prompts")
    return prompts


def _prompt(line: str, shape: Shape, *, where: str) -> str:
    try:
        row = json.loads(line)
    except RecursionError:
        raise SelfspecError(f"{where}: not valid JSON (nested too deeply)") from None
    except ValueError as error:
        raise SelfspecError(f"{where}: not valid JSON ({getattr(error, 'msg', error)})") from None
    text = shape.text(row) if isinstance(row, dict) else None
    if text is None:
        raise SelfspecError(f"{where}: want an object whose {shape}")
    if not is_unicode(text):
        raise SelfspecError(f"{where}: the text has half a surrogate pair, which is no Unicode")
    return text
