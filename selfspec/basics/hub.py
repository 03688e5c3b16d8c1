"""Availability of the Hugging Face hub."""

from __future__ import annotations

PATIENCE = 5.0  # timeout of the request to the hub, in seconds


def unreachable() -> str | None:
    """Return why the hub is unreachable, or None if it answers.

    The request waits `PATIENCE` seconds at most; the libraries that download from the hub retry for half a minute or
    more.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and the cache has no copy"
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # the network can fail in any way
        return f"{constants.ENDPOINT} cannot be reached, and the cache has no copy"
    return None
