"""Calibration text: prompts from a file or the built-in ones, chosen by seed. Knows nothing of torch."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from selfspec import builtin
from selfspec.errors import SelfspecError
from selfspec.files import read_text
from selfspec.profile import Calibration
from selfspec.text import is_unicode

COUNTED = 1000  # prompts that serve neither searching nor measuring, whose tokens are counted


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts to search on and prompts to measure on. `held_out`: whether the two have nothing in common.

    `rest`: the first few of those that serve neither, whose tokens can be counted.
    """

    source: str
    search: tuple[str, ...]
    measure: tuple[str, ...]
    held_out: bool
    rest: tuple[str, ...] = ()


def read_prompts(path: Path) -> list[str]:
    """Prompts of a `.jsonl` file (each row's `prompt`, else its `text`) or a `.txt` file (one a line).

    Raises `SelfspecError` naming the file and the line that is wrong.
    """
    kind = path.suffix.lower()
    if kind not in (".jsonl", ".txt"):
        raise SelfspecError(f"{path}: want a .jsonl file (rows with 'prompt' or 'text') or a .txt file (one a line)")
    lines = read_text(path).split("\n")
    rows = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    if kind == ".txt":
        prompts = [line.rstrip("\r") for _, line in rows]
    else:
        prompts = [_prompt(line, where=f"{path}, line {number}") for number, line in rows]
    if not prompts:
        raise SelfspecError(f"{path}: holds no prompts")
    return prompts


def _prompt(line: str, *, where: str) -> str:
    try:
        row = json.loads(line)
    except RecursionError:
        raise SelfspecError(f"{where}: not valid JSON (nested too deeply)") from None
    except ValueError as error:
        raise SelfspecError(f"{where}: not valid JSON ({getattr(error, 'msg', error)})") from None
    text = (row.get("prompt", row.get("text"))) if isinstance(row, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise SelfspecError(f"{where}: want an object whose 'prompt' (or 'text') is a text that is not empty")
    if not is_unicode(text):
        raise SelfspecError(f"{where}: the text has half a surrogate pair, which is no Unicode")
    return text


def choose(prompts: Sequence[str] | None, *, source: str, count: int, seed: int) -> PromptSet:
    """`count` prompts to search on and as many others to measure on, drawn by `seed`; None: the built-in ones.

    Where there are too few for both, each gets half; a single one serves both.
    """
    draw = random.Random(seed)
    if prompts is None:
        parts = [builtin.prompts("calibration"), builtin.prompts("heldout")]
        search, measure = (tuple(draw.sample(part, min(count, len(part)))) for part in parts)
        left = tuple(prompt for prompt in parts[0] if prompt not in search)
        return PromptSet("builtin", search, measure, True, left)
    distinct = list(dict.fromkeys(prompts))
    draw.shuffle(distinct)
    count = min(count, (len(distinct) + 1) // 2)
    mine, rest = distinct[:count], distinct[count : 2 * count]
    left = tuple(distinct[2 * count : 2 * count + COUNTED])
    return PromptSet(source, tuple(mine), tuple(rest or mine), bool(rest), left)


def record(source: str, prompts: Iterable[Sequence[int]]) -> Calibration:
    """What a profile says of the prompts (token ids) that were searched on."""
    digest, count, total = hashlib.sha256(), 0, 0
    for ids in prompts:
        digest.update((" ".join(map(str, ids)) + "\n").encode())
        count, total = count + 1, total + len(ids)
    return Calibration(source=source, prompts=count, tokens=total, sha256=digest.hexdigest())
