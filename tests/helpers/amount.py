"""How much is tested: `make test` takes minutes and samples, `make test-all` leaves out nothing that a CPU can run."""

from __future__ import annotations

import os

_WHOLE = "SELFSPEC_TEST_ALL"


def set_whole(whole: bool) -> None:
    """Say, before tests are collected, whether everything is to be tested."""
    os.environ[_WHOLE] = str(int(whole))


def whole() -> bool:
    """Whether everything is to be tested."""
    return os.environ.get(_WHOLE) == "1"


def examples(count: int) -> int:
    """Return how many examples hypothesis draws, of `count` in `make test-all`: a fifth of them, 3 at least."""
    return count if whole() else max(count // 5, min(count, 3))


def some(everything: int, enough: int) -> int:
    """Return a number of seeds, prompts or steps: `everything` in `make test-all`, else `enough`."""
    return everything if whole() else enough
