"""Files that would run code if they were read carelessly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Code:
    """An object whose unpickling creates `file`: code that a pickle would run."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)
