"""How many bits of each weight a draft step reads, by its path and the model's sizes. Plain data, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from selfspec.types.draft_path import DraftPath, Mode
from selfspec.types.identity import Identity

READ: Mapping[Mode, float] = {"int8": 8.0, "int4": 4.5, "skip": 0.0}  # in 4 bits with a scale and a zero for 64 weights
DTYPES = {"float64": 64.0, "float32": 32.0, "bfloat16": 16.0, "float16": 16.0}


@dataclass(frozen=True, slots=True)
class BitsRead:
    """Bits per weight that a draft step reads, and a plain step: means over all sub-layers and the head."""

    draft: float
    plain: float

    @property
    def said(self) -> str:
        """In words."""
        return f"a draft step reads {self.draft:.3g} bits per weight, a plain step {self.plain:.3g}"


def bits_read(path: DraftPath, model: Identity, *, dtype: str | None = None) -> BitsRead | None:
    """What a draft step reads of a model in a dtype, such as `bfloat16`; without one, and for others, in 32 bits.

    None where one of the model's sizes is not known. Raises `SelfspecError` for a layer that it does not have.
    """
    full = DTYPES.get(dtype or "", 32.0)
    draft = bits_per_weight(path, model, full=full)
    return None if draft is None else BitsRead(draft, full)


def bits_per_weight(path: DraftPath, model: Identity, *, full: float = 32.0) -> float | None:
    """The mean bits that a draft step reads of the weights of all sub-layers and the head; `full`: of one in full.

    What is bypassed is not read; of the head only the path's vocabulary is. Norms and the embedding, of which a step
    reads little, do not count. Heads are taken to be as wide as the residual stream divided by their number. None
    where one of the model's sizes is not known. Raises `SelfspecError` for a layer that it does not have.
    """
    return _mean(path, model, full, path.share(model.vocabulary) * {"full": full, **READ}[path.head])


def extra_share(path: DraftPath, model: Identity, *, dtype: str | None = None) -> float | None:
    """What a path holds beside a model, as a share of the weights of all its sub-layers and its head in a dtype.

    That is: weights in few bits, and the weights of a head over some tokens only. The dtype, what is taken for granted
    and what is raised are as in `bits_read`.
    """
    full = DTYPES.get(dtype or "", 32.0)
    held = full if path.vocabulary is not None and path.head == "full" else {"full": 0.0, **READ}[path.head]
    bits = _mean(path, model, 0.0, path.share(model.vocabulary) * held)
    return None if bits is None else bits / full


def _mean(path: DraftPath, model: Identity, full: float, head: float) -> float | None:
    """Bits per weight where one in full counts `full`, the others as in `READ`, and the head's `head` each."""
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
    """How many an attention, an MLP and the head have."""
    hidden, heads, inner, tokens = model.hidden, model.heads, model.intermediate, model.vocabulary
    if hidden is None or heads is None or model.kv_heads is None or inner is None or tokens is None:
        return None
    keys = hidden * model.kv_heads // heads  # as wide are a layer's keys, and its values
    return 2 * hidden * (hidden + keys), 3 * hidden * inner, tokens * hidden
