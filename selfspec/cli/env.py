"""The command `selfspec env`: versions, processor, kernels, caches and devices, as a bug report needs them."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from selfspec import __version__
from selfspec.basics.errors import SelfspecError, reason
from selfspec.basics.files import cache_folder
from selfspec.basics.machine import available_memory, machine
from selfspec.cli.common import print_json, quiet, size, stdout
from selfspec.models.loading import check_at_hand

_PACKAGES = ("torch", "transformers", "tokenizers", "huggingface-hub", "safetensors", "numpy")
_KV_TOKENS = 2048  # tokens of the KV cache that a model's memory is said for
_BITS = {"float32": 32.0, "bfloat16": 16.0, "int8": 8.0, "int4": 4.5}  # a weight's, with scales of 64 in int4


def run(model: str | None, *, as_json: bool) -> None:
    """Print the environment, and with `model` what that model's weights take. Raises `SelfspecError`."""
    quiet()
    if model is not None:
        check_at_hand(model)
    found = environment()
    if model is not None:
        found["model"] = model_memory(model)
    if as_json:
        print_json(found)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in _rows(found):
        table.add_row(name, Text(text, overflow="fold"))
    stdout().print(table)


def environment() -> dict[str, Any]:
    """Return versions, processor, kernels, caches and devices (with memory in bytes, GPUs' kernels)."""
    import torch

    from selfspec.models.native_library import compiler, instruction_set, library

    try:
        library()
        kernels, problem = "selfspec", None
    except SelfspecError as error:
        kernels, problem = "torch", str(error)
    cpu = {"device": "cpu", "name": machine(torch.device("cpu")), "available_bytes": _finite(available_memory())}
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return {
        "selfspec": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        **{name: _version(name) for name in _PACKAGES},
        "processor": cpu["name"],
        "isa": instruction_set(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "kernels": kernels,
        "kernels_problem": problem,
        "layout": "native" if problem is None else "timed for each model",
        "compiler": compiler(),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if _is_ours(name)},
        "caches": [{"folder": str(folder), "bytes": bytes_in(folder)} for folder in _caches()],
        "devices": [
            cpu,
            *map(_gpu, gpus),
        ],
    }


def _gpu(device: Any) -> dict[str, Any]:
    """Return a CUDA device's name, bytes of memory, and kernels."""
    import torch

    from selfspec.models.triton_kernels.switch import triton_enabled

    of = torch.cuda.get_device_properties(device)
    kernels = f"Triton {_version('triton') or ''}".strip() if triton_enabled(device) else "torch"
    return {"device": str(device), "name": of.name, "total_bytes": of.total_memory, "kernels": kernels}


def model_memory(name: str) -> dict[str, Any]:
    """Return a model's parameters and the bytes of its weights by type, and of its KV cache, in float32.

    The weights are not read: the model is built from its configuration, without values. The bytes of the KV cache, and
    of the int8 copies of it that quantised drafts read with native passes, are None for a model outside `FAMILIES`,
    whose cache may hold other things. Raises `SelfspecError`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from selfspec.llm.batch_memory import copy_bytes
    from selfspec.models.families import FAMILIES
    from selfspec.models.loading import read_identity, stored_config

    identity = read_identity(name)
    try:
        config = AutoConfig.from_pretrained(stored_config(name), trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a broken configuration can raise anything
        raise SelfspecError(f"model {name} cannot be built from its configuration: {reason(error)}") from error
    parameters = sum(parameter.numel() for parameter in model.parameters())
    heads = identity.heads or 1
    head = getattr(config, "head_dim", None) or (identity.hidden or 0) // heads
    kv_heads = identity.kv_heads or heads
    kv = 2 * identity.layers * kv_heads * head * _KV_TOKENS * 4
    copies = copy_bytes(identity.layers, kv_heads, head) * _KV_TOKENS
    return {
        "name": name,
        "model_type": identity.model_type,
        "parameters": parameters,
        "weight_bytes": {kind: round(parameters * bits / 8) for kind, bits in _BITS.items()},
        "kv_tokens": _KV_TOKENS,
        "kv_bytes": kv if identity.model_type in FAMILIES else None,
        "kv_copy_bytes": copies if identity.model_type in FAMILIES else None,
    }


def bytes_in(folder: Path) -> int:
    """Return the bytes of the files in a folder and below it, links not followed; 0 if it is missing."""
    found = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                found += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # removed meanwhile
                continue
    return found


def _caches() -> list[Path]:
    from huggingface_hub import constants

    own = cache_folder()
    parts = sorted(place for place in own.iterdir() if place.is_dir()) if own.is_dir() else []
    return [own, *parts, Path(constants.HF_HUB_CACHE)]


def _is_ours(name: str) -> bool:
    """Return whether a variable changes what selfspec does; the key of its server is nobody's business."""
    return name in ("CXX", "OMP_NUM_THREADS", "HF_HUB_OFFLINE") or (
        name.startswith("SELFSPEC_") and name != "SELFSPEC_API_KEY"
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _finite(memory: float) -> int | None:
    return None if memory == float("inf") else round(memory)


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the table: names and texts."""
    rows = [(name, str(found[name] or "not installed")) for name in ("selfspec", "python", "system", *_PACKAGES)]
    rows.append(
        ("processor", f"{found['processor']}, {found['threads']} {'thread' if found['threads'] == 1 else 'threads'}")
    )
    rows.append(("instructions", f"{found['isa'] or 'unknown'} (torch: {found['torch_isa']})"))
    rows.append(("kernels", "selfspec's own" if found["kernels_problem"] is None else found["kernels_problem"]))
    rows.append(("layout", found["layout"]))
    rows.append(("compiler", found["compiler"] or "none found"))
    rows += [("variable", f"{name}={value}") for name, value in found["variables"].items()]
    rows += [("cache", f"{cache['folder']}: {size(cache['bytes'])}") for cache in found["caches"]]
    for device in found["devices"]:
        memory = device.get("total_bytes") or device.get("available_bytes")
        what = "" if memory is None else f", {size(memory)}{' available' * ('available_bytes' in device)}"
        kernels = f", kernels by {device['kernels']}" if "kernels" in device else ""
        rows.append((device["device"], f"{device['name']}{what}{kernels}"))
    if (model := found.get("model")) is not None:
        weights = ", ".join(f"{size(bytes_)} in {kind}" for kind, bytes_ in model["weight_bytes"].items())
        rows.append(("model", f"{model['name']}: {model['model_type']}, {model['parameters']:,} parameters"))
        rows.append(("weights", weights))
        if model["kv_bytes"] is not None:
            copies = f"{size(model['kv_copy_bytes'])} more for the copies that quantised drafts read"
            rows.append(
                ("KV cache", f"{size(model['kv_bytes'])} for {model['kv_tokens']:,} tokens in float32; {copies}")
            )
    return rows
