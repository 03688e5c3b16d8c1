"""Servers of tests' own: in this process, on a free port, with what their log says."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from selfspec.server.protocol import Settings
from selfspec.server.server import Server, bind_socket, url
from selfspec.server.service import Service
from selfspec.server.worker_pool import Replica, WorkerPool


@dataclass
class Served:
    """A server that runs: where, what it logged, and what decodes."""

    url: str
    service: Service
    server: Server
    batches: Sequence[Any]
    log: list[dict[str, Any]] = field(default_factory=list)

    @property
    def port(self) -> int:
        """Its port."""
        return int(self.url.rpartition(":")[2])


def service_of(llm: Any, batches: Sequence[Any], log: list[dict[str, Any]], **settings: Any) -> Service:
    """A service over batches."""
    told = Settings(**{"names": ("toy", "alias"), "rows": 4, **settings})
    pool = WorkerPool([Replica(batch) for batch in batches], rows=told.rows, queue=told.queue)
    return Service(llm, pool, told, log=log.append)


@contextmanager
def served(llm: Any, *batches: Any, **settings: Any) -> Iterator[Served]:
    """A server with these batches, in a thread, until it is left."""
    log: list[dict[str, Any]] = []
    service = service_of(llm, batches, log, **settings)
    at = bind_socket("127.0.0.1", 0)
    server = Server(service)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[at])))
    with service:
        thread.start()
        try:
            until(lambda: server.started)
            yield Served(url(at), service, server, batches, log)
        finally:
            server.end(at_once=True)
            thread.join()


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until something holds; fail where it never does."""
    given_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < given_up, "it never came"
        time.sleep(0.005)
