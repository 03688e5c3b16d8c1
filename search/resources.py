"""A context manager that opens several resources, and closes those that it has opened if opening another fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from types import TracebackType
from typing import Self


class Opened(ABC):
    """Base of context managers over the resources that `_open` enters into `_resources`."""

    def __init__(self) -> None:
        self._resources = ExitStack()

    @abstractmethod
    def _open(self) -> None:
        """Enter all resources."""

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.close()
