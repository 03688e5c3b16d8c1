"""The settings of a server, and the HTTP protocol of a connection, with limits for slow clients."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Access and limits of a server.

    `names`: the names by which requests may call the model. `api_key`: the key that requests to `/v1` must send (None:
    no key). `cors_origins`: the origins of web pages that may send requests (CORS); `*`: any. `hosts`: the values of
    the `Host` header that are answered, without port (none: any). `rows`: the most texts that a replica decodes at a
    time. `queue`: the most texts that wait for a cache row. `max_tokens`: the most new tokens of a text (None: as many
    as fit). `max_model_len`: the most tokens of prompt and new text together (None: as many as fit). `max_body`: the
    largest request body in bytes. `connections`: the most open connections. `timeout`: the seconds from a request's
    arrival after which its texts end. `reading`: the seconds within which a request's header, and then its body, must
    arrive. `grace`: the seconds that running requests have at shutdown.
    """

    names: tuple[str, ...]
    api_key: str | None = field(default=None, repr=False)
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    rows: int = 8
    queue: int = 64
    max_tokens: int | None = None
    max_model_len: int | None = None
    max_body: int = 4 * 2**20
    connections: int = 1000
    timeout: float = 600.0
    reading: float = 20.0
    grace: float = 30.0


ABORT = "selfspec.abort"  # key in a request's ASGI scope, of a function that closes the connection at once
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 10\r\ncontent-length: 0\r\n\r\n"


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP protocol, changed to close connections that exceed a limit; `limited_protocol` sets the limits.

    A connection is refused if there are `connections_limit` already. It is closed if a request header takes over
    `reading` seconds, and if the client reads too little of an answer for `timeout` seconds.
    """

    connections_limit: int
    reading: float
    timeout: float
    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or refuse it with a 503 response."""
        super().connection_made(transport)
        if len(self.connections) > self.connections_limit:
            transport.write(_FULL)
            transport.close()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        """Handle data, and time the next request header."""
        super().data_received(data)
        self._watch()

    def handle_events(self) -> None:
        """Begin requests, whose scope gets the function `ABORT`."""
        super().handle_events()
        if self.scope is not None:
            self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        super().connection_lost(exc)
        for timer in (self._head, self._unread):
            if timer is not None:
                timer.cancel()

    def send_400_response(self, msg: str) -> None:
        """Reject invalid HTTP and close the connection, after a 400 response unless a response has begun.

        In both cases, a request of this connection that is still running ends as if its client had disconnected.
        """
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def pause_writing(self) -> None:
        """Begin to time a client that reads too slowly."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Stop timing a client that has read most of what was sent."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def on_response_complete(self) -> None:
        """End a response; what is still unread of it is timed."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_reader()

    def _watch_reader(self) -> None:
        if self._unread is None:
            self._unread = self.loop.call_later(self.timeout, self._give_up)

    def _give_up(self) -> None:
        self._unread = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _watch(self) -> None:
        between = self.cycle is None or self.cycle.response_complete
        if between and self._head is None:
            self._head = self.loop.call_later(self.reading, self.transport.abort)
        elif not between and self._head is not None:
            self._head.cancel()
            self._head = None


def limited_protocol(settings: Settings) -> type[LimitedProtocol]:
    """Return the protocol with a server's limits; connections take at most half of the process's file descriptors."""
    limits = {
        "connections_limit": min(settings.connections, _max_files() // 2),
        "reading": settings.reading,
        "timeout": settings.timeout,
    }
    return type("ServerProtocol", (LimitedProtocol,), limits)


def backlog() -> int:
    """Return the number of connections that are accepted at a time; some times as many can be open until refused."""
    return min(128, _max_files() // 16)


def _max_files() -> int:
    """Return the most file descriptors that this process may have."""
    with contextlib.suppress(ImportError):  # Windows has no such limit
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return files if files > 0 else 2**20  # -1: any number
    return 2**20
