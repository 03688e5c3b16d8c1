"""The profile that drafts for a model without a search: its own weights in int8, and tokens looked up in the text."""

from __future__ import annotations

import math
from typing import Any

from selfspec.basics.errors import SelfspecError
from selfspec.basics.machine import available_memory
from selfspec.models.dispatch import device_of
from selfspec.models.families import base_model, is_lean, parts_of
from selfspec.models.layout import weight_bytes
from selfspec.models.low_precision import bytes_of, is_quantizable
from selfspec.models.module_quantizer import quantizer_of
from selfspec.models.native_library import available
from selfspec.profile.draft_spec import LookupSpec
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import choose_profile, quantized_profile, shipped_for
from selfspec.types.identity import Identity

DRAFTED = 9  # tokens of a draft: int8 drafts are hardly ever rejected, and 10 rows are verified at little more than one
_SPARE = 0.5  # largest share of the available memory that draft weights may take


def resolve_profile(
    named: str | Profile,
    model: Any,
    identity: Identity,
    *,
    method: str | None = None,
    extra_memory: float | None = None,
) -> tuple[Profile | None, bool]:
    """Return the profile that `model` drafts with (None: plain decoding), and whether it is the default profile.

    This is what `auto` means in every command: `choose_profile` first; the default profile if no shipped profile was
    measured on the model's weights. The arguments are those of `choose_profile` and `default_profile`.
    """
    chosen = choose_profile(identity, named, method)
    if chosen is not None or named != "auto" or shipped_for(identity):
        return chosen, False
    default = default_profile(model, identity, extra_memory=extra_memory)
    return default, default is not None


def default_profile(model: Any, identity: Identity, *, extra_memory: float | None = None) -> Profile | None:
    """Return the profile to draft with if there is none for a model's weights; None off the CPU: plain decoding.

    It drafts with all linears and the head in int8, and with tokens looked up in the text; the guard bounds what that
    may lose. `extra_memory`: the largest memory of the int8 weights, as a share of the model's bytes; by default half
    of the available memory. Where the weights take more, or cannot be quantised, tokens are only looked up. Raises
    `SelfspecError` for an `extra_memory` that is negative or not finite.
    """
    if extra_memory is not None and not 0 <= extra_memory < math.inf:
        raise SelfspecError(
            f"extra_memory {extra_memory}: expected 0 or more and finite, as a share of the model's bytes"
        )
    model = base_model(model)
    head = model.get_output_embeddings()
    if head is None or device_of(head).type != "cpu":
        return None
    needed = _int8_bytes(model)
    most = available_memory() * _SPARE if extra_memory is None else extra_memory * weight_bytes(model)
    if needed is None or needed > most:
        return Profile(model=identity, draft=LookupSpec())
    return quantized_profile(identity, "int8", head="int8", drafted=DRAFTED)


def _int8_bytes(model: Any) -> int | None:
    """Return the bytes of a model's linears in int8; None if there are other modules than linears, or no kernel."""
    if not available():
        return None
    if not is_lean(model):
        return quantizer_of(model).all_linears_bytes(8)
    parts = parts_of(model)
    if any(layer.experts is not None for layer in parts.layers):
        return None
    modules = [module for group in (*parts.groups(), parts.head) for module in group.modules]
    if not is_quantizable(modules, 8):
        return None
    return sum(bytes_of(8, module.out_features, module.in_features) for module in modules)
