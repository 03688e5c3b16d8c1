"""The RoPE of a GGUF file's model, as the `rope_parameters` of a configuration of `transformers`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from selfspec.basics.errors import SelfspecError, short
from selfspec.models.gguf_header import Header, Tensor

_ORIGINAL = "rope.scaling.original_context_length"
_LARGEST = 1e15  # largest number of a header's RoPE entries
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_YARN = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}


def rope_parameters(path: Path, header: Header) -> dict[str, Any]:
    """Return a model's RoPE: its base and its scaling. Raises `SelfspecError` if the scaling is unknown or invalid."""
    return {"rope_theta": number(path, header, "rope.freq_base", 10_000.0), **_scaling(path, header)}


def number(path: Path, header: Header, key: str, default: float | None = None) -> float:
    """Return a positive number of the header; `default` if there is none. Raises `SelfspecError` for anything else."""
    value = header.arch_value(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
        raise SelfspecError(f"{path}: {key} {short(value)}; expected a number above 0")
    return value


def _scaling(path: Path, header: Header) -> dict[str, Any]:
    if "rope_factors_long.weight" in header.tensors:
        return _longrope(path, header)
    kind = header.arch_value("rope.scaling.type")
    if "rope_freqs.weight" in header.tensors:
        return _llama3(path, header)
    if kind in (None, "none"):
        return {"rope_type": "default"}
    original = header.arch_value(_ORIGINAL)
    if kind not in ("linear", "yarn") or (kind == "yarn" and not original):
        raise SelfspecError(f"{path}: rope scaling {short(kind)} is not supported in GGUF files")
    rope: dict[str, Any] = {"rope_type": kind, "factor": number(path, header, "rope.scaling.factor")}
    if original:
        rope["original_max_position_embeddings"] = int(number(path, header, _ORIGINAL))
    if kind == "yarn":
        keys = {key: name for key, name in _YARN.items() if header.arch_value(key) is not None}
        rope |= {name: number(path, header, key) for key, name in keys.items()}
        if (times := number(path, header, "rope.scaling.attn_factor", 1.0)) != 1:
            rope["attention_factor"] = times * (1 + 0.1 * math.log(rope["factor"]))
    return rope


def _longrope(path: Path, header: Header) -> dict[str, Any]:
    """Return Phi-3's RoPE scaling, with a divisor for each frequency, of short and of long texts."""
    original = int(number(path, header, _ORIGINAL))
    rope = {
        "rope_type": "longrope",
        "short_factor": _divisors(header.tensors.get("rope_factors_short.weight"), path),
        "long_factor": _divisors(header.tensors["rope_factors_long.weight"], path),
        "original_max_position_embeddings": original,
        "factor": number(path, header, "context_length") / original,
    }
    if header.arch_value("rope.scaling.attn_factor") is not None:
        rope["attention_factor"] = number(path, header, "rope.scaling.attn_factor")
    return rope


def _divisors(tensor: Tensor | None, path: Path) -> list[float]:
    """Return the divisors `[d / 2]` of RoPE's frequencies that a tensor holds. Raises `SelfspecError` for others."""
    import numpy as np

    if tensor is not None and tensor.type == 0 and len(tensor.shape) == 1 and tensor.shape[0]:
        divisors = np.fromfile(tensor.path, dtype="<f4", count=tensor.shape[0], offset=tensor.start)
        if np.all(np.isfinite(divisors) & (divisors > 0)):
            return [float(divisor) for divisor in divisors]
    raise SelfspecError(f"{path}: unknown rope frequencies; expected numbers above 0 in float32")


def _llama3(path: Path, header: Header) -> dict[str, Any]:
    """Return Llama 3.1's RoPE scaling from the frequency divisors `[d / 2]`, which are all that the file holds."""
    import numpy as np

    divisors = np.array(_divisors(header.tensors["rope_freqs.weight"], path))
    if np.all(divisors == 1):
        return {"rope_type": "default"}
    base = number(path, header, "rope.freq_base", 10_000.0)
    lengths = 2 * np.pi * base ** (np.arange(len(divisors)) / len(divisors))  # wavelengths in positions
    factor = float(np.round(divisors.max(), 3))
    original, high, low = (
        _LLAMA3[name] for name in ("original_max_position_embeddings", "high_freq_factor", "low_freq_factor")
    )
    share = np.clip((original / lengths - low) / (high - low), 0, 1)  # weight of the unscaled frequency
    if not np.allclose(divisors, 1 / ((1 - share) / factor + share), rtol=1e-3):
        raise SelfspecError(f"{path}: unknown rope frequencies in 'rope_freqs.weight'; expected Llama 3.1's")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
