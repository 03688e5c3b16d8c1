"""Calibration text: prompts from files, folders, the hub, or the built-in ones, chosen by seed. Knows nothing of torch.

Lines of `.jsonl` and `.txt` are read here, not by `datasets`: its JSON reader makes dates of texts that look like one
and takes `["a"]` for a row, and neither of its readers tells the line that is wrong.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from selfspec import builtin
from selfspec.errors import SelfspecError
from selfspec.files import kind, read_text
from selfspec.profile import Calibration
from selfspec.text import is_unicode

from .shape import Shape
from .sources import PRESETS, read_folder, read_parquet, read_preset

COUNTED = 1000  # prompts that serve neither searching nor measuring, whose tokens are counted


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts to search on and prompts to measure on. `held_out`: whether the two have nothing in common.

    `rest`: the first few of those that serve neither, whose tokens can be counted. `available`: how many different ones
    there were to draw from; `column` and `template`: what of each row they are.
    """

    source: str
    search: tuple[str, ...]
    measure: tuple[str, ...]
    held_out: bool
    rest: tuple[str, ...] = ()
    available: int = 0
    column: str | None = None
    template: str | None = None


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


def choose(prompts: Sequence[str] | Prompts | None, *, source: str, count: int, seed: int) -> PromptSet:
    """`count` prompts to search on and as many others to measure on, drawn by `seed`; None: the built-in ones.

    Where there are too few for both, each gets half; a single one serves both. `source` names a plain sequence.
    """
    if isinstance(prompts, Prompts):
        chosen = choose(prompts.texts, source=prompts.source, count=count, seed=seed)
        return replace(chosen, column=prompts.column, template=prompts.template)
    draw = random.Random(seed)
    if prompts is None:
        parts = [builtin.prompts("calibration"), builtin.prompts("heldout")]
        search, measure = (tuple(draw.sample(part, min(count, len(part)))) for part in parts)
        left = tuple(prompt for prompt in parts[0] if prompt not in search)
        return PromptSet("builtin", search, measure, True, left, len(parts[0]))
    distinct = list(dict.fromkeys(prompts))
    draw.shuffle(distinct)
    count = min(count, (len(distinct) + 1) // 2)
    mine, rest = distinct[:count], distinct[count : 2 * count]
    left = tuple(distinct[2 * count : 2 * count + COUNTED])
    return PromptSet(source, tuple(mine), tuple(rest or mine), bool(rest), left, len(distinct))


def record(
    source: str,
    prompts: Iterable[Sequence[int]],
    *,
    column: str | None = None,
    template: str | None = None,
    chat: bool = False,
    drawn_from: int | None = None,
) -> Calibration:
    """What a profile says of the prompts (token ids) that were searched on."""
    digest, count, total = hashlib.sha256(), 0, 0
    for ids in prompts:
        digest.update((" ".join(map(str, ids)) + "\n").encode())
        count, total = count + 1, total + len(ids)
    return Calibration(
        source=source,
        column=column,
        template=template,
        chat=chat,
        drawn_from=drawn_from,
        prompts=count,
        tokens=total,
        sha256=digest.hexdigest(),
    )
