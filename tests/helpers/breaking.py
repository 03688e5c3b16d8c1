"""Calls that raise at a chosen event, to break decoding off between any two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Breaking:
    """Of all calls that it wraps, the `at`-th raises `error`: an odd one before it does anything, an even one after."""

    def __init__(self, error: type[BaseException], at: int) -> None:
        self.error, self.at = error, at
        self.events = 0

    def wrap(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any, **kwargs: Any) -> Any:
            self.events += 1
            here = self.events == self.at
            if here and self.at % 2:
                raise self.error
            result = inner(*args, **kwargs)
            if here:
                raise self.error
            return result

        return outer
