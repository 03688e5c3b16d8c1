"""The names of ways of decoding: plain data, so that `--help` can tell them. Knows nothing of torch and pydantic."""

from __future__ import annotations

from collections.abc import Mapping

# Drafts that need no profile: a method's name says all.
FREE: Mapping[str, Mapping[str, object]] = {
    "lookup": {"kind": "guesses"},
    "recycle": {"kind": "recycle"},
    "input": {"kind": "input"},
    "jacobi": {"kind": "jacobi", "method": "jacobi"},
    "gauss-seidel": {"kind": "jacobi", "method": "gauss-seidel"},
    "hybrid-jacobi": {"kind": "jacobi", "method": "hybrid"},
    "lookahead": {"kind": "lookahead"},
}
EARLY_EXIT = "early-exit"
DRAFT_MODEL = "model:"  # and the draft model's name
OWN = ("plain", "skip", "path", EARLY_EXIT, *FREE)
