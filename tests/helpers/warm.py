"""Commands that start at once: a process that has imported everything forks for each `selfspec` or `python` it is told.

`WarmShell` makes two programs of those names. They hand their arguments, folder, environment and open files to the
process, which runs the command line or the script as a process of its own would, and end as that does.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import numpy

IMPORTED = (  # what commands import when they need it
    "rich.progress",
    "scipy.stats",
    "selfspec.cli.app",
    "selfspec.llm.llm",
    "selfspec.search.trial_tables",
    "selfspec.search.study",
    "selfspec.show.report",
    "sqlalchemy",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)
CLIENT = """
import json, os, signal, socket, sys
address, name, *arguments = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as server:
    server.connect(address)
    told = json.dumps([name, os.getcwd(), arguments, dict(os.environ)]).encode()
    socket.send_fds(server, [len(told).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(told)
    code = int.from_bytes(server.recv(2), "big", signed=True)
if code < 0:  # the signal that ended it
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
sys.exit(code & 255)
"""
PROGRAM = """#!/bin/sh
exec "{python}" -SEI "{client}" "{address}" {name} "$@"
"""
_SETTINGS = "SELFSPEC_WARM"  # an environment variable that only the programs here read


class WarmShell:
    """Runs programs, and bash with warm commands. `python` and `selfspec` are the paths of the programs."""

    def __init__(self, folder: Path) -> None:
        self._socket = Path(tempfile.mkdtemp(prefix="warm-", dir="/tmp"))  # a socket's path has to be short
        address = str(self._socket / "s")
        self._programs = folder / "bin"
        self._programs.mkdir()
        client = folder / "client.py"
        client.write_text(CLIENT)
        for name in ("selfspec", "python"):
            program = self._programs / name
            program.write_text(PROGRAM.format(python=sys.executable, client=client, address=address, name=name))
            program.chmod(0o755)
        self.python, self.selfspec = str(self._programs / "python"), str(self._programs / "selfspec")
        # It ends, with all that it has begun, when this end of the pipe is closed: by `close`, or as we are killed.
        self._process = subprocess.Popen([sys.executable, __file__, address], stdin=subprocess.PIPE)
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
        """End the process, and what it runs."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._socket, ignore_errors=True)


def _serve(address: str) -> None:
    """Run what clients ask for until the standard input is closed."""
    for name in IMPORTED:
        import_module(name)
    running: set[int] = set()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{address}.new")
        server.listen()
        os.rename(f"{address}.new", address)  # there from when it can be connected to
        while True:
            ready, _, _ = select.select([server, sys.stdin], [], [])
            if sys.stdin in ready:
                break
            client, _ = server.accept()
            running -= {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}
            if (pid := os.fork()) == 0:
                server.close()
                _supervise(client)
            running.add(pid)
            client.close()
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _supervise(client: socket.socket) -> None:
    """Run a command in a process of its own, tell the client how it ended, and end it where the client is gone."""
    os.setpgid(0, 0)
    if (pid := os.fork()) == 0:
        _answer(client)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):
                client.sendall(code.to_bytes(2, "big", signed=True))
            os._exit(0)
        if select.select([client], [], [], 0.005)[0] and not _there(client):
            os.killpg(0, signal.SIGKILL)


def _there(client: socket.socket) -> bool:
    """Whether the client has not closed its end; what it still sends is the command's to read."""
    try:
        there = bool(client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:  # the command has read it meanwhile
        return True
    except OSError:
        return False
    time.sleep(0.002)
    return there


def _answer(client: socket.socket) -> None:
    sys.path.remove(str(Path(__file__).parent))
    numpy.random.seed()
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
        threading._shutdown()
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 255)


if __name__ == "__main__":
    _serve(sys.argv[1])
