"""Pydantic base class and number types for validated data, and what is wrong with data that are not valid."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from selfspec.basics.errors import SelfspecError, one_line, short

Json = dict[str, Any]
Count = Annotated[int, Field(ge=0, le=10**9)]
Positive = Annotated[int, Field(gt=0, le=10**9)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A finite number, zero or more."""
Seconds = NonNegative
Rate = NonNegative
Share = Annotated[float, Field(ge=0, le=1)]
"""A share of a whole, or a probability."""


class Data(BaseModel):
    """Frozen, strictly typed data; unknown keys and wrong types raise errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def first_problem(error: ValidationError, whole: str) -> str:
    """Return the first problem of data that failed validation on one line: its key, what is wrong, what was given.

    `whole`: what the data are called, for a problem that belongs to no key.
    """
    first = error.errors(include_url=False)[0]
    keys = [str(key) for key in first["loc"] if not str(key).startswith("constrained-")]  # pydantic's, in a union
    where, what = one_line(".".join(keys)) or whole, one_line(first["msg"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, SelfspecError):
        return one_line(cause)
    if first["type"] == "extra_forbidden":
        return f"unknown key '{where}'"
    return f"{where}: {what}" if first["type"] == "missing" else f"{where}: {what}, got {short(first['input'])}"
