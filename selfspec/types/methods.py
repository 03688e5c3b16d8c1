"""The names of decoding methods: plain data for `--help`. Imports neither torch nor pydantic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Drafting methods that need no profile: the name determines all settings.
FREE: Mapping[str, Mapping[str, object]] = {
    "lookup": {"kind": "lookup"},
    "recycle": {"kind": "recycle"},
    "input": {"kind": "input"},
    "jacobi": {"kind": "jacobi", "method": "jacobi"},
    "gauss-seidel": {"kind": "jacobi", "method": "gauss-seidel"},
    "hybrid-jacobi": {"kind": "jacobi", "method": "hybrid"},
    "lookahead": {"kind": "lookahead"},
    "swift": {"kind": "swift"},
    "clasp": {"kind": "clasp"},
}
EARLY_EXIT = "early-exit"
DRAFT_MODEL = "model:"  # followed by the draft model's name
STAGED = "staged:"  # followed by the name of a draft model that itself verifies lookup tokens
NAMED = (DRAFT_MODEL, STAGED)
OWN = ("plain", "skip", "path", EARLY_EXIT, *FREE)


def draft_model_of(name: str, kinds: Sequence[str] = NAMED) -> str | None:
    """Return the draft model's name in a method name of one of these `kinds`; None for any other method."""
    kind, colon, model = name.partition(":")
    return model if model and kind + colon in kinds else None
