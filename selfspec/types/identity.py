"""The identity of a model: the sizes of its architecture, and a fingerprint of its weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from selfspec.basics.checked_model import Data, Positive
from selfspec.types.limits import MOST_LAYERS

Layers = Annotated[int, Field(gt=0, le=MOST_LAYERS)]


class Identity(Data):
    """The model that a profile is for. Each field that is set must agree with the model; `layers` is required."""

    layers: Layers = Field(description="Number of decoder layers.")
    name: str | None = Field(
        None, description="Model to load without --model: a folder, GGUF file, hub id, or builtin."
    )
    model_type: str | None = Field(None, description="Model type, as in the model's config.json.")
    hidden: Positive | None = Field(None, description="Hidden size.")
    heads: Positive | None = Field(None, description="Number of attention heads.")
    kv_heads: Positive | None = Field(None, description="Number of key-value heads.")
    intermediate: Positive | None = Field(None, description="Intermediate size of the MLP.")
    vocabulary: Positive | None = Field(None, description="Vocabulary size.")
    fingerprint: str | None = Field(None, description="Fingerprint of the weights; written by the search.")

    def mismatch(self, other: Identity) -> str | None:
        """Return the first architecture field that differs from `other`, as text; None if all set fields agree."""
        for field in ("model_type", "layers", "hidden", "heads", "kv_heads", "intermediate", "vocabulary"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine is not None and theirs is not None and mine != theirs:
                return f"{field} {mine} in the profile, {theirs} in the model"
        return None

    def other_weights(self, other: Identity) -> bool:
        """Return whether both have a fingerprint of their weights, and the two differ."""
        return None not in (self.fingerprint, other.fingerprint) and self.fingerprint != other.fingerprint
