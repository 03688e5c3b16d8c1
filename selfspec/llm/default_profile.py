"""The default profile of a model without a searched one: its own weights, quantised, and lookup tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from selfspec.basics.errors import SelfspecError
from selfspec.basics.machine import available_memory
from selfspec.controllers.rate import best_rate
from selfspec.llm.batch_memory import free_bytes
from selfspec.models.dispatch import device_of, dtype_of
from selfspec.models.families import base_model, is_lean, parts_of
from selfspec.models.half_storage import HALVES
from selfspec.models.layout import weight_bytes
from selfspec.models.low_precision import Bits, bytes_of, is_quantizable
from selfspec.models.module_quantizer import quantizer_of
from selfspec.models.native_library import available
from selfspec.models.skeleton import read_sizes
from selfspec.models.triton_kernels.switch import DTYPES, triton_enabled
from selfspec.profile.draft_spec import LookupSpec
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import by_method, choose_profile, quantized_profile, shipped_for
from selfspec.runtime.cache import slot_copy_bytes
from selfspec.runtime.compiled_path import BITS
from selfspec.types.acceptance import AcceptanceCurve, Confidence
from selfspec.types.controller import ControllerSpec
from selfspec.types.costs import CostModel, ModeCosts
from selfspec.types.draft_path import LowMode
from selfspec.types.identity import Identity

DRAFTED = 9  # most tokens of a draft, which are hardly ever rejected: ten rows take little more time than one
DRAFTED_ON_GPU = 4  # an int4 step takes half of a plain one there, an int8 step three quarters
_SPARE = 0.5  # largest share of the available memory that draft weights may take
_BANDWIDTH = 2e10  # bytes that a pass is assumed to read in a second; what is decided depends on ratios of times alone
_PASSES = {1: 1.0, 8: 1.15, 16: 1.4}  # time of a pass over that many tokens, in plain steps, as measured on CPUs
_REACHED = 0.85  # share of the best rate that decoding reaches, as measured
# The chance that an int8 token is accepted, as searches on SmolLM2 fit it; the controller corrects it, for int4 too.
_INT8_CONFIDENCE = Confidence(bias=4.4, probability=0.0, gap=0.7)
_INT8_ACCEPTANCE = AcceptanceCurve(
    confidence=[0.9, 0.97, 0.995],
    accepted=[0.93, 0.975, 1.0],
    following=[0.97, 0.98, 0.985],
    candidates=[[0.03, 0.01, 0.0]],
)


def resolve_profile(
    named: str | Profile,
    model: Any,
    identity: Identity,
    *,
    method: str | None = None,
    extra_memory: float | None = None,
) -> tuple[Profile | None, bool]:
    """Return the profile that `model` drafts with (None: plain decoding), and whether it is the default profile.

    This is what `auto` means in every command: the default profile if no shipped profile was measured on the model's
    weights, otherwise `choose_profile`. The arguments are those of `choose_profile` and `default_profile`.
    """
    if named != "auto" or method not in (None, "profile", "path") or shipped_for(identity):
        return choose_profile(identity, named, method), False
    default = default_profile(model, identity, extra_memory=extra_memory)
    if method is not None:
        default = by_method(method, default, identity)
    return default, default is not None


def default_profile(model: Any, identity: Identity, *, extra_memory: float | None = None) -> Profile | None:
    """Return the profile to draft with if there is none for a model's weights; None: plain decoding.

    It drafts with all linears in int8, in a 16-bit model in int4, where these are faster; with the head in int8; and
    with tokens looked up in the text. The guard bounds what that may lose. Its controller `rate` decides by the bytes
    that passes read, and learns how often tokens are accepted. On a GPU with Triton kernels, four tokens are drafted,
    with the linears in int4. `extra_memory`: the largest memory of these weights, as a share of the model's bytes; by
    default half of the available memory. Where they take more, or cannot be quantised, tokens are only looked up; on a
    GPU nothing is drafted then. Raises `SelfspecError` for an `extra_memory` that is negative or not finite.
    """
    check_extra_memory(extra_memory)
    model = base_model(model)
    head = model.get_output_embeddings()
    if head is None:
        return None
    device = device_of(head)
    gpu = _has_triton(model, device)
    if not gpu and device.type != "cpu":
        return None
    mode: LowMode = "int4" if gpu or _is_faster_in_int4(model) else "int8"
    needed = _draft_bytes(model, BITS[mode])
    free = free_bytes(device) if gpu else available_memory()
    most = free * _SPARE if extra_memory is None else extra_memory * weight_bytes(model)
    if needed is None or needed > most:
        return None if gpu else Profile(model=identity, draft=LookupSpec())
    if gpu:
        return quantized_profile(identity, "int4", head="int8", drafted=DRAFTED_ON_GPU)
    return profile_by_rate(model, identity, mode)


def _is_faster_in_int4(model: Any) -> bool:
    """Return whether drafts of a model on a CPU are faster in int4 than in int8: natively, and in 16 bits.

    A plain step reads half of the bytes there that it reads in float32, so what an int4 step saves weighs more than
    the tokens that are rejected.
    """
    if not is_lean(model) or dtype_of(model.get_output_embeddings()) not in HALVES:
        return False
    return _draft_bytes(model, 8) is not None and _draft_bytes(model, 4) is not None


def profile_by_rate(model: Any, identity: Identity, mode: LowMode) -> Profile:
    """Return a profile of all linears in `mode` and the head in int8, with the controller `rate` by assumed costs.

    Where some linears cannot be quantised so, or the costs of experts are not known, a fixed number of tokens is
    drafted.
    """
    model = base_model(model)
    profile, low = quantized_profile(identity, mode, head="int8", drafted=DRAFTED), _draft_bytes(model, BITS[mode])
    return profile if low is None else _by_rate(profile, _assumed_costs(model, identity.layers, mode, low))


def check_extra_memory(extra_memory: float | None) -> None:
    """Raise `SelfspecError` unless `extra_memory` is None, or a finite number of 0 or more."""
    if extra_memory is None:
        return
    if not isinstance(extra_memory, int | float) or not 0 <= extra_memory < math.inf:
        raise SelfspecError(
            f"extra_memory {extra_memory}: expected 0 or more and finite, as a share of the model's bytes"
        )


def _by_rate(profile: Profile, costs: CostModel) -> Profile:
    """Return the profile with the controller `rate`, by these costs."""
    assumed = {"costs": costs, "acceptance": _INT8_ACCEPTANCE, "note": "costs and acceptance are assumed, not measured"}
    draft = profile.draft.model_copy(update={"confidence": _INT8_CONFIDENCE})
    profile = profile.model_copy(update={**assumed, "draft": draft})
    rate = max(1.0, _REACHED * best_rate(profile.payoff, DRAFTED))
    return profile.with_controller(ControllerSpec(name="rate", options={"rate": rate, "k_max": DRAFTED}))


def _assumed_costs(model: Any, layers: int, mode: LowMode, low: int) -> CostModel:
    """Return the costs of passes as the time of reading their bytes, by which decoding is bound.

    `low`: the bytes of the weights that a draft step reads in `mode`. For a model that runs by its own forward, keys
    and values are not counted, and weights have the head's dtype; nor are keys and values of layers with a sliding
    window, which reads no more of them as a text grows.
    """
    weights = low * 8 / BITS[mode]
    full, per_key, low_per_key = weights * dtype_of(model.get_output_embeddings()).itemsize, 0.0, 0.0
    if is_lean(model):
        parts = parts_of(model)
        full = weight_bytes(nn.ModuleList(parts.linears()))
        sizes = read_sizes(model, parts)
        growing = sum(parts.attention_specs[layer.attention_spec].window is None for layer in parts.layers) / layers
        per_key = growing * sizes.slot_bytes / _BANDWIDTH
        low_per_key = growing * slot_copy_bytes(sizes.kv_heads, sizes.head_dim) / _BANDWIDTH
    each, low_each = (size / (2 * layers) / _BANDWIDTH for size in (full, low))
    return CostModel(
        context=1,
        base=0.0,
        attention=each,
        mlp=each,
        attention_per_key=per_key,
        low_per_key=low_per_key,
        widths=list(_PASSES),
        verify=[full / _BANDWIDTH * steps for steps in _PASSES.values()],
        round=0.0,
        low={mode: ModeCosts(attention=low_each, mlp=low_each, head=0.0)},
    )


def _has_triton(model: Any, device: torch.device) -> bool:
    """Return whether passes of `model` use Triton kernels on `device`."""
    if device.type == "cpu" or not is_lean(model) or not triton_enabled(device):
        return False
    return all(parameter.device == device and parameter.dtype in DTYPES for parameter in model.parameters())


def _draft_bytes(model: Any, bits: Bits) -> int | None:
    """Return the bytes of a model's linears in `bits` bits, with the head in int8; None if they cannot be quantised.

    That is where there are other modules than linears, or no kernel to multiply them.
    """
    if not is_lean(model):
        return quantizer_of(model).all_linears_bytes(bits) if available() else None
    parts = parts_of(model)
    if any(layer.experts is not None for layer in parts.layers) or (bits == 8 and not available()):
        return None
    layers = [module for group in parts.groups() for module in group.modules]
    if not is_quantizable(layers, bits) or not is_quantizable(parts.head.modules, 8):
        return None
    quantized = [*((bits, module) for module in layers), *((8, module) for module in parts.head.modules)]
    return sum(bytes_of(of, module.out_features, module.in_features) for of, module in quantized)
