"""The names of ways of decoding: plain data, so that `--help` can tell them. Knows nothing of torch and pydantic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Drafts that need no profile: a method's name says all.
FREE: Mapping[str, Mapping[str, object]] = {
    "lookup": {"kind": "guesses"},
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
DRAFT_MODEL = "model:"  # and the draft model's name
STAGED = "staged:"  # and the name of a draft model that itself checks what lookup guesses
NAMED = (DRAFT_MODEL, STAGED)
OWN = ("plain", "skip", "path", EARLY_EXIT, *FREE)


def draft_model_of(name: str, kinds: Sequence[str] = NAMED) -> str | None:
    """The name of the draft model in a method's name of one of these `kinds`; None for any other method."""
    kind, colon, model = name.partition(":")
    return model if model and kind + colon in kinds else None
