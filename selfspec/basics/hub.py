"""Whether the hub of models and data can be asked. Knows nothing of either."""

from __future__ import annotations

PATIENCE = 5.0  # seconds that the hub has to answer


def unreachable() -> str | None:
    """Why the hub cannot be asked; None where it answers. Libraries would go on asking for half a minute and more."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and the cache has no copy"
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # whatever the network does
        return f"{constants.ENDPOINT} cannot be reached, and the cache has no copy"
    return None
