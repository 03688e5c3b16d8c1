"""The lock of a runtime: generations of several threads run one after the other, first come, first served."""

from __future__ import annotations

import threading
import time
from collections import deque

from selfspec.basics.errors import BusyError

TIMEOUT = 600.0  # seconds without progress of the generation that is waited for


class TurnLock:
    """A lock whose waiting threads take turns in the order in which they came.

    `timeout`: the seconds after which a thread stops waiting for a generation that makes no progress, such as a stream
    that another thread has left open.
    """

    def __init__(self) -> None:
        self.timeout = TIMEOUT
        self._changed = threading.Condition()
        self._queue: deque[int] = deque()  # thread ids: the owner, then those that wait
        self._progress = 0.0  # `time.monotonic` of the owner's last progress

    def note_progress(self) -> None:
        """Note that the owner's generation made progress."""
        self._progress = time.monotonic()

    def acquire(self) -> None:
        """Wait for the calling thread's turn.

        Raises `BusyError` at once if the thread itself holds the lock, and if its owner makes no progress for
        `timeout` seconds.
        """
        thread = threading.get_ident()
        with self._changed:
            if thread in self._queue:
                raise BusyError(
                    "this model is still generating; exhaust or close() the first stream, or load a second model"
                )
            self._queue.append(thread)
            try:
                while self._queue[0] != thread:
                    left = self.timeout - (time.monotonic() - self._progress)
                    if left <= 0:
                        raise BusyError(
                            f"another thread's generation has made no progress for {self.timeout:g} seconds; exhaust "
                            "or close() its stream, or load a second model"
                        )
                    self._changed.wait(left)
            except BaseException:  # an interrupt, too
                self._queue.remove(thread)
                self._changed.notify_all()
                raise
            self.note_progress()

    def release(self) -> None:
        """Give the lock to the thread that has waited longest. Any thread may release it."""
        with self._changed:
            self._queue.popleft()
            self.note_progress()
            self._changed.notify_all()
