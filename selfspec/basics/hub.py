"""Availability of the Hugging Face hub."""

from __future__ import annotations

import time
from threading import Event, Thread

PATIENCE = 5.0  # timeout of the request to the hub, in seconds
MEMORY = 30.0  # how long a hub that did not answer is not asked again, in seconds
_silent: dict[str, float] = {}  # when an endpoint did not answer, by `time.monotonic`


def unreachable() -> str | None:
    """Return why the hub is unreachable, or None if it answers.

    The request waits `PATIENCE` seconds at most, for the name's resolution too, which has no timeout of its own; the
    libraries that download from the hub retry for half a minute or more, and some of their requests wait for ever.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and the cache has no copy"
    endpoint = str(constants.ENDPOINT)
    if time.monotonic() - _silent.get(endpoint, -MEMORY) >= MEMORY and _answers(endpoint):
        return None
    _silent.setdefault(endpoint, time.monotonic())
    return f"{endpoint} cannot be reached, and the cache has no copy"


def _answers(endpoint: str) -> bool:
    """Return whether the hub answers within `PATIENCE` seconds."""
    from huggingface_hub import get_session

    _silent.pop(endpoint, None)
    answered, ended = Event(), Event()

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=PATIENCE)
            answered.set()
        except Exception:  # the network can fail in any way
            pass
        finally:
            ended.set()

    Thread(target=ask, daemon=True).start()
    ended.wait(PATIENCE)
    return answered.is_set()
