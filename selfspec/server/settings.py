"""The settings of a server: model names, API key and limits."""

from __future__ import annotations

from dataclasses import dataclass, field


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
