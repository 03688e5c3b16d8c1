"""Pydantic base class and number types for validated data."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Json = dict[str, Any]
Count = Annotated[int, Field(ge=0, le=10**9)]
Positive = Annotated[int, Field(gt=0, le=10**9)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Data(BaseModel):
    """Frozen, strictly typed data; unknown keys and wrong types raise errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
