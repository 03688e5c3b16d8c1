"""Names of decoding and int4 methods, and limits of passes and models. Imports neither torch nor pydantic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

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
OWN = ("plain", "profile", "path", EARLY_EXIT, *FREE)


def draft_model_of(name: str, kinds: Sequence[str] = NAMED) -> str | None:
    """Return the draft model's name in a method name of one of these `kinds`; None for any other method."""
    kind, colon, model = name.partition(":")
    return model if model and kind + colon in kinds else None


Int4Method = Literal["nearest", "weighted", "gptq"]
INT4_METHODS: tuple[Int4Method, ...] = get_args(Int4Method)
AUTO_METHOD = "auto"  # chosen by the amount of text
INT4_CHOICES = (AUTO_METHOD, *INT4_METHODS)
INT4_GROUP_SIZES = (64, 32)


WIDEST_DRAFT = 64  # most drafted tokens in a verification pass, besides the root
MOST_ROWS = 1 + WIDEST_DRAFT  # most rows of a verification pass for one sequence
MOST_LAYERS = 10_000
LOWEST_TEMPERATURE = 1e-5  # below it float32 scores overflow, and sampling is greedy decoding anyway
