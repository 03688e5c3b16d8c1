"""What a server is told: names, keys and limits. Knows nothing of models."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Who may ask for what, and how much of it.

    `names`: the model's, the first of which answers bear. `api_key`: what requests to `/v1` must bear, if any. `rows`:
    texts that each replica decodes at a time. `queue`: texts that may wait for a row. `max_tokens`: the most new tokens
    of a text (None: what the context leaves). `max_body`: bytes. `timeout`: seconds of a request, from its arrival;
    `reading`: seconds in which its head, and then its body, must be there. `grace`: seconds that running requests have
    when the server is asked to end.
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
