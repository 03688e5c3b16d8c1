"""The lines of a text file, and lines of JSON, with errors that tell the line. Knows nothing of torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import read_text
from selfspec.text.prompt import is_unicode


def lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line that is not blank, after where it stands, for errors. Raises `SelfspecError`."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield f"{path}, line {number}", line


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """What each line of a .jsonl file holds, after where it stands. Raises `SelfspecError` for one that is no JSON."""
    for where, line in lines(path):
        try:
            yield where, json.loads(line)
        except RecursionError:
            raise SelfspecError(f"{where}: not valid JSON (nested too deeply)") from None
        except ValueError as error:
            raise SelfspecError(f"{where}: not valid JSON ({getattr(error, 'msg', error)})") from None


def checked(text: str, where: str) -> str:
    """The text. Raises `SelfspecError` for one that is no Unicode, which JSON can say."""
    if not is_unicode(text):
        raise SelfspecError(f"{where}: the text has half a surrogate pair, which is no Unicode")
    return text
