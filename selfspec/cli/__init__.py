"""The command line. Heavy modules are imported only when a command needs them, so that `--help` is instant."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys

INTERRUPTED = 130  # exit code that typer returns for Ctrl-C
COLLECT = (50_000, 20, 50)  # the garbage collector's thresholds, see `main`


def main() -> None:
    """Run `selfspec`; invalid input prints one line on standard error and exits with code 2."""
    from selfspec.basics.errors import SelfspecError
    from selfspec.cli.app import app

    # Importing torch and transformers makes objects by the hundred thousand. With Python's own thresholds the collector
    # searches them for .7 s of the start, and for .3 s at the exit unless they are frozen then.
    gc.set_threshold(*COLLECT)
    atexit.register(gc.freeze)
    if sys.stdout is None:
        _fail("standard output is closed; expected an open one, such as a file or /dev/null")
    for stream in (sys.stdout, sys.stderr):  # an ASCII terminal shows other characters as escapes
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(standalone_mode=False)
    except SelfspecError as error:
        _fail(str(error))
    except OSError as error:
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit fails again
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        # Usage errors of typer, recognised by their method because they come from several modules of click and typer.
        if not hasattr(error, "format_message"):
            raise
        _fail(error.format_message())
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    from selfspec.basics.errors import as_signs, one_line

    if message and sys.stderr is not None:  # the message is empty if no command was named: the help was printed
        rank = os.environ.get("RANK", "0")  # set by torchrun, which starts several processes
        where = "" if rank == "0" else f" (process {rank})"
        print(f"error{where}: {as_signs(one_line(message))}", file=sys.stderr)
    sys.exit(2)
