"""`selfspec` in a terminal of 80 columns: what is typed, and what stands there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

COLUMNS, LINES = 80, 24
ESCAPES = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]|\r")


class Terminal:
    """A program in a terminal of its own. `raw`: all that it has written, escapes included."""

    def __init__(self, program: Sequence[str], *, cwd: Path | None = None) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "INPUTRC": "/dev/null"}
        for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            program,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_begin,
            cwd=cwd,
            env=environment,
        )
        os.close(slave)
        self.raw = ""

    def until(self, met: Callable[[str], bool], *, seconds: float = 500) -> str:
        """What is written until it meets a condition, without escapes."""
        given_up, start = time.monotonic() + seconds, len(self.raw)
        while not met(seen := self.shown(start)):
            assert time.monotonic() < given_up, seen
            if select.select([self._master], [], [], 1)[0]:
                self.raw += os.read(self._master, 4096).decode("utf-8", "replace")
        return seen

    def shown(self, start: int = 0) -> str:
        """What was written, from a place in `raw` on, without escapes."""
        return ESCAPES.sub("", self.raw[start:])

    def type(self, text: str) -> None:
        """Type this; Ctrl-C is `\\x03`, Ctrl-D `\\x04`."""
        os.write(self._master, text.encode())

    def end(self) -> int:
        """Wait for the program to end; its exit code."""
        with contextlib.suppress(OSError):  # how a terminal that nobody holds any more ends
            while read := os.read(self._master, 4096):
                self.raw += read.decode("utf-8", "replace")
        os.close(self._master)
        return self.process.wait(300)

    def kill(self) -> None:
        """End the program if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _begin() -> None:
    """In the new process: this terminal is its own, and Ctrl-C reaches it whatever it was started by."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
