"""The command line. Imports nothing heavy until a command needs it, so that `--help` is instant."""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130  # what typer makes of Ctrl-C


def main() -> None:
    """Run `selfspec`; wrong input is one line on standard error and exit code 2."""
    from selfspec.basics.errors import SelfspecError
    from selfspec.cli.app import app

    if sys.stdout is None:
        _fail("standard output is closed; give it a file, or /dev/null")
    try:
        code = app(standalone_mode=False)
    except SelfspecError as error:
        _fail(str(error))
    except OSError as error:
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails again when it flushes
        print(f"error: {error.strerror or error}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        # Typer's own usage errors, whichever module of click or typer they come from.
        if not hasattr(error, "format_message"):
            raise
        _fail(error.format_message())
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    if message and sys.stderr is not None:  # no command at all has shown the help, and says nothing more
        rank = os.environ.get("RANK", "0")  # of one of several processes that torchrun has started
        where = "" if rank == "0" else f" (process {rank})"
        print(f"error{where}: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
