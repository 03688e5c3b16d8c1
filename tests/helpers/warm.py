"""Commands that start at once: a process that has imported everything forks for each `selfspec` or `python` it is told.

`WarmShell` makes two programs of those names. They hand their arguments, folder, environment and open files to the
process, which runs the command line or the script as a process of its own would, and end as that does.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

IMPORTED = (  # what commands import when they need it
    "rich.progress",
    "scipy.stats",
    "selfspec.cli.app",
    "selfspec.llm.llm",
    "selfspec.search.front_pick",
    "selfspec.search.study",
    "selfspec.show.report",
    "sqlalchemy",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)
CLIENT = """#!{python} -SEI
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    told = json.dumps([os.path.basename(sys.argv[0]), os.getcwd(), sys.argv[1:], dict(os.environ)]).encode()
    socket.send_fds(server, [len(told).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(told)
    code = server.recv(1)
if not code:  # it was killed
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(code[0])
"""
_SETTINGS = "SELFSPEC_WARM"  # an environment variable that only the programs here read


class WarmShell:
    """Runs programs, and bash with warm commands. `python` and `selfspec` are the paths of the programs."""

    def __init__(self, folder: Path) -> None:
        address = str(folder / "warm")
        self._programs = folder / "bin"
        self._programs.mkdir()
        for name in ("selfspec", "python"):
            program = self._programs / name
            program.write_text(CLIENT.format(python=sys.executable, address=address))
            program.chmod(0o755)
        self.python, self.selfspec = str(self._programs / "python"), str(self._programs / "selfspec")
        self._process = subprocess.Popen([sys.executable, __file__, address], stdin=subprocess.DEVNULL)
        while not os.path.exists(address):
            assert self._process.poll() is None, "the process that runs the commands has ended"
            time.sleep(0.02)

    def run(
        self, script: Path, folder: Path, *, budgets: Mapping[str, str], constants: Mapping[str, float]
    ) -> subprocess.CompletedProcess[str]:
        """Run a `.sh` or `.py` file in a folder; what it wrote is in `stdout`.

        `budgets`: options added to those of commands that begin so, as in `{"search": "--trials 2"}`. `constants`:
        other values for what modules hold, as in `{"package.module.NAME": 1}`.
        """
        program = self.python if script.suffix == ".py" else "bash"
        strict = [] if script.suffix == ".py" else ["-euo", "pipefail"]
        path = f"{self._programs}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [program, *strict, str(script)],
            cwd=folder,
            env={**os.environ, "PATH": path, _SETTINGS: json.dumps([budgets, constants])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=300,
        )

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def _serve(address: str) -> None:
    for name in IMPORTED:
        import_module(name)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{address}.new")
        server.listen()
        os.rename(f"{address}.new", address)  # there from when it can be connected to
        while True:
            client, _ = server.accept()
            while _reaped():
                pass
            if os.fork() == 0:
                server.close()
                _answer(client)
            client.close()


def _reaped() -> bool:
    """Whether a child had ended, so that none stays as a zombie."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    return False


def _answer(client: socket.socket) -> None:
    size, files, _, _ = socket.recv_fds(client, 4, 3)
    told = b""
    while len(told) < int.from_bytes(size, "big"):
        told += client.recv(1 << 16)
    program, folder, arguments, environment = json.loads(told)
    os.environ.clear()
    os.environ.update(environment)
    budgets, constants = json.loads(environment.get(_SETTINGS, "[{}, {}]"))
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        found = import_module(module)
        assert hasattr(found, constant), f"{name} is not there any more"
        setattr(found, constant, value)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    code = 1
    try:
        if program == "python":
            sys.argv = arguments
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            from selfspec.cli import main

            begun = " ".join(arguments)
            added = [option for name, more in budgets.items() if begun.startswith(name) for option in more.split()]
            sys.argv = ["selfspec", *arguments, *added]
            main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        client.sendall(bytes([code]))
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
