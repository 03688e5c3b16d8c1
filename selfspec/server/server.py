"""The server process: its socket and its shutdown."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from selfspec.basics.errors import SelfspecError
from selfspec.server.app import make_app
from selfspec.server.protocol import backlog, limited_protocol
from selfspec.server.request_state import EndReason
from selfspec.server.responses import LAST
from selfspec.server.service import Service


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to a host and port, not listening yet. Raises `SelfspecError` if it cannot be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise SelfspecError(f"--host {host}: cannot be served at ({getattr(error, 'strerror', error)})") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise SelfspecError(f"{host}:{port} cannot be served at ({error.strerror}); expected another --port") from None
    return sock


def url(sock: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """An HTTP server with a graceful shutdown.

    `ready`: called once the server listens. After the first signal only running requests continue, for at most
    `Settings.grace` seconds. A second signal ends all requests.
    """

    def __init__(self, service: Service, *, ready: Callable[[], None] = lambda: None) -> None:
        config = uvicorn.Config(
            make_app(service),
            http=limited_protocol(service.settings),
            backlog=backlog(),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.ERROR,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=LAST,
        )
        super().__init__(config)
        self._service, self._ready = service, ready
        self._end: float | None = None  # `time.monotonic` at which running requests are ended; None: no shutdown yet

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then call `ready`."""
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown at a signal; if it has begun already, end running requests now."""
        self.end(at_once=self._end is not None)

    def end(self, *, at_once: bool = False) -> None:
        """Begin the shutdown. `at_once`: end running requests now, not after `Settings.grace` seconds."""
        self._end = time.monotonic() + (0 if at_once else self._service.settings.grace)
        self._service.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Exit once a shutdown has begun and no request runs; uvicorn calls this method ten times a second."""
        if self._end is not None and (self._service.idle or time.monotonic() >= self._end):
            self._service.ended = True
            self._service.pool.cancel_all(EndReason.SHUTDOWN)
            self.should_exit = True
        return await super().on_tick(counter)


def serve(service: Service, sock: socket.socket, *, ready: Callable[[], None] = lambda: None) -> None:
    """Serve requests until SIGINT or SIGTERM; `service` must have been entered, and `sock` bound.

    `ready`: called once the server listens.
    """
    asyncio.run(Server(service, ready=ready).serve(sockets=[sock]))
