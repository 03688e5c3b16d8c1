"""The settings of a server: model names, API key and limits."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Access and limits of a server.

    `names`: the model's names; responses bear the first. `api_key`: the key that requests to `/v1` must bear, if any.
    `rows`: texts that each replica decodes at a time. `queue`: texts that may wait for a row. `max_tokens`: the maximum
    of new tokens of a text (None: what the context leaves). `max_body`: bytes. `timeout`: seconds of a request, from
    its arrival; `reading`: seconds in which its header, and then its body, must arrive. `grace`: seconds that running
    requests have at shutdown.
    """

    names: tuple[str, ...]
    api_key: str | None = field(default=None, repr=False)
    rows: int = 8
    queue: int = 64
    max_tokens: int | None = None
    max_body: int = 4 * 2**20
    timeout: float = 600.0
    reading: float = 20.0
    grace: float = 30.0
