"""A PostgreSQL server of the tests' own, from the distribution's packages, in a temporary folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def binaries() -> Path | None:
    """Where PostgreSQL's programs are, if they are."""
    found = shutil.which("initdb")
    folders = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    return Path(found).resolve().parent if found else next((f for f in folders if (f / "initdb").exists()), None)


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Start a server, and stop it at the end; its URL."""
    programs = binaries()
    assert programs is not None
    as_user: list[str] = []
    if os.getuid() == 0:  # which PostgreSQL refuses to run as
        as_user = ["runuser", "-u", "postgres", "--"]
        shutil.chown(folder, "postgres")
        for parent in [folder, *folder.parents]:
            if parent.owner() == "root" and parent not in (Path("/"), Path("/tmp")):
                parent.chmod(parent.stat().st_mode | 0o011)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(program: str, *args: str) -> None:
        command = [*as_user, str(programs / program), "-D", str(folder / "data"), *args]
        subprocess.run(
            command, check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, timeout=120
        )

    run("initdb", "--auth=trust", "--username=selfspec", "--encoding=UTF8", "--no-sync")
    options = f"-c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories='' -c fsync=off"
    run("pg_ctl", "start", "--wait", "--log", str(folder / "log"), "--options", options)
    try:
        yield f"postgresql://selfspec@127.0.0.1:{port}/postgres"
    finally:
        run("pg_ctl", "stop", "--mode", "fast")
