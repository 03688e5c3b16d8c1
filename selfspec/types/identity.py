"""The identity of a model, its sizes, and the bits read per weight by a draft step. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from selfspec.basics.checked_model import Data, Positive
from selfspec.types.draft_path import DraftPath, Mode
from selfspec.types.methods import MOST_LAYERS

Layers = Annotated[int, Field(gt=0, le=MOST_LAYERS)]
UNNAMED = "unnamed"  # the name of a model whose config has none


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


READ: Mapping[Mode, float] = {"int8": 8.0, "int4": 4.5, "skip": 0.0}  # int4: with scale and zero point per 64 weights
DTYPES = {"float64": 64.0, "float32": 32.0, "bfloat16": 16.0, "float16": 16.0}


@dataclass(frozen=True, slots=True)
class BitsRead:
    """Bits read per weight by a draft step and by a plain step: means over all sub-layers and the head."""

    draft: float
    plain: float

    @property
    def summary(self) -> str:
        """Description for display, with the bits of a draft step and of a plain step."""
        return f"a draft step reads {self.draft:.3g} bits per weight, a plain step {self.plain:.3g}"


def bits_read(path: DraftPath, model: Identity, *, dtype: str | None = None) -> BitsRead | None:
    """Return the mean bits per weight that a draft step and a plain step read of a model.

    `dtype`: the dtype of the unquantised weights, such as `bfloat16`; None and unknown names count as 32 bits. Returns
    None if one of the model's sizes is unknown. Raises `SelfspecError` for a layer that the model does not have.
    """
    full = DTYPES.get(dtype or "", 32.0)
    draft = bits_per_weight(path, model, full=full)
    return None if draft is None else BitsRead(draft, full)


def bits_per_weight(path: DraftPath, model: Identity, *, full: float = 32.0) -> float | None:
    """Return the mean bits read per weight of all sub-layers and the head; `full`: bits of a full-precision weight.

    Skipped sub-layers are not read; of the head, only the rows of the path's vocabulary are read. Norms and the
    embedding are left out, as a step reads little of either. The head dimension is assumed to be the hidden size
    divided by the number of heads. Returns None if one of the model's sizes is unknown. Raises `SelfspecError` for a
    layer that the model does not have.
    """
    return _mean(path, model, full, path.share(model.vocabulary) * {"full": full, **READ}[path.head])


def extra_share(path: DraftPath, model: Identity, *, dtype: str | None = None) -> float | None:
    """Return the memory that a path adds, divided by the memory of the model's own sub-layers and head in `dtype`.

    The path adds its quantised weights, and the weights of a head over a reduced vocabulary. `dtype`, the errors and a
    result of None are as in `bits_read`; the assumptions are those of `bits_per_weight`.
    """
    full = DTYPES.get(dtype or "", 32.0)
    head_bits = full if path.vocabulary is not None and path.head == "full" else {"full": 0.0, **READ}[path.head]
    bits = _mean(path, model, 0.0, path.share(model.vocabulary) * head_bits)
    return None if bits is None else bits / full


def _mean(path: DraftPath, model: Identity, full: float, head: float) -> float | None:
    """Return the mean bits per weight of all sub-layers and the head; None if one of the model's sizes is unknown.

    `full`: the bits of a sub-layer's weight in full precision; `READ` has the bits of the other modes. `head`: the bits
    per weight of the head.
    """
    modes = path.modes(model.layers)
    sizes = _weights(model)
    if sizes is None:
        return None
    of_attention, of_mlp, of_head = sizes
    bits: dict[Mode, float] = {"full": full, **READ}
    total = of_head * head
    total += of_attention * sum(bits[mode] for mode in modes[: model.layers])
    total += of_mlp * sum(bits[mode] for mode in modes[model.layers :])
    return total / (model.layers * (of_attention + of_mlp) + of_head)


def _weights(model: Identity) -> tuple[int, int, int] | None:
    """Return the number of weights of an attention sub-layer, of an MLP and of the head; None if a size is unknown."""
    hidden, heads, inner, tokens = model.hidden, model.heads, model.intermediate, model.vocabulary
    if hidden is None or heads is None or model.kv_heads is None or inner is None or tokens is None:
        return None
    keys = hidden * model.kv_heads // heads  # width of a layer's keys, and of its values
    return 2 * hidden * (hidden + keys), 3 * hidden * inner, tokens * hidden
