"""GGUF files as models: dequantised through `transformers` into a cached folder that `from_pretrained` memory-maps.

Two things that `transformers` does not read from a GGUF file are added here: RoPE scaling, and all end tokens.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.basics.errors import SelfspecError, reason, short
from selfspec.basics.files import cache_folder, disk_errors
from selfspec.models.gguf_header import Header, read_header
from selfspec.types.limits import MOST_LAYERS

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

ARCHITECTURES = ("llama", "qwen2")  # Mistral's files say llama
KEEP = "SELFSPEC_GGUF_COPIES"  # environment variable: 0 caches no dequantised weights
_VERSION = 1  # version of the format of cached folders
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ORIGINAL = "rope.scaling.original_context_length"
_LARGEST = 1e15  # largest number of a header's RoPE entries
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_log = logging.getLogger("selfspec")


def check_gguf(path: Path) -> Header:
    """Return the header of a GGUF file, without its weights. Raises `SelfspecError` if it is no supported model."""
    header = read_header(path)
    parts = header.metadata.get("split.count", 1)
    if parts != 1:
        raise SelfspecError(
            f"{path}: one of {parts} parts of a split model; join them first: llama-gguf-split --merge FIRST OUT"
        )
    if header.architecture not in ARCHITECTURES:
        raise SelfspecError(
            f"{path}: a model of architecture '{header.architecture}'; supported in GGUF files: "
            f"{', '.join(ARCHITECTURES)} (Mistral's files say llama)"
        )
    if header.arch_value("expert_count"):
        raise SelfspecError(f"{path}: a mixture of experts, which is not supported in GGUF files")
    if "tokenizer.ggml.tokens" not in header.metadata:
        raise SelfspecError(f"{path}: no tokenizer in the file; expected the GGUF file of a language model")
    layers = header.arch_value("block_count")
    if type(layers) is not int or not 0 < layers <= MOST_LAYERS:
        raise SelfspecError(f"{path}: {short(layers)} layers; expected 1 to {MOST_LAYERS}")
    _rope(path, header)
    return header


def description(path: Path) -> Path:
    """Return the folder with a GGUF file's config, tokenizer and generation config, written at the first call.

    Raises `SelfspecError` if they cannot be read from the file.
    """
    folder = _folder(path)
    if not (folder / "config.json").is_file():
        header = check_gguf(path)
        try:
            with _making(folder) as made:
                _describe(path, header, made)
        except Exception as error:  # a broken file can raise anything
            raise SelfspecError(f"{path}: cannot be used as a model: {reason(error)}") from error
    return folder


def _describe(path: Path, header: Header, folder: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    AutoTokenizer.from_pretrained(**_alone(path), trust_remote_code=False).save_pretrained(folder)
    config = _config(path, header)
    keys = (f"tokenizer.ggml.{name}" for name in _ENDS)
    ends = sorted({header.metadata[key] for key in keys if key in header.metadata})
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=ends or None, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    config.save_pretrained(folder)


def weights(path: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Return the keyword arguments of `from_pretrained` that load a GGUF file's weights.

    Dequantised weights are written to the cache folder on the first call. If they cannot be written, or the environment
    variable `SELFSPEC_GGUF_COPIES` is 0, the arguments dequantise the file at each load.
    """
    import torch

    stored = torch.float32 if dtype == torch.float64 else dtype  # dequantised weights are exact in float32
    folder = description(path) / str(stored).removeprefix("torch.")
    if (folder / "config.json").is_file():
        return {"pretrained_model_name_or_path": str(folder)}
    if os.environ.get(KEEP) != "0" and folder.is_relative_to(cache_folder()):
        try:
            _copy(path, folder, stored)
        except OSError as error:
            _log.warning("%s: dequantised weights cannot be cached (%s)", path.name, error.strerror or error)
        else:
            return {"pretrained_model_name_or_path": str(folder)}
    return _from_file(path)


def own_dtype(path: Path) -> torch.dtype:
    """Return the dtype for an accelerator: float32 or float16 if all the file's matrices have it, else bfloat16."""
    import torch
    from gguf import GGMLQuantizationType as Type

    types = {tensor.type for tensor in read_header(path).tensors.values() if len(tensor.shape) > 1}
    known = {Type.F32: torch.float32, Type.F16: torch.float16}
    return known.get(Type(types.pop()), torch.bfloat16) if len(types) == 1 else torch.bfloat16


def _copy(path: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write a file's dequantised weights and config to `folder`, and log that."""
    from transformers import AutoModelForCausalLM

    _log.warning("%s: dequantising it to %s, once ...", path.name, str(dtype).removeprefix("torch."))
    with _making(folder) as made, quietly():
        model = AutoModelForCausalLM.from_pretrained(**_from_file(path), dtype=dtype, trust_remote_code=False)
        model.hf_quantizer = None  # the weights are dequantised, but transformers would refuse to save them
        model.config = _config(path, check_gguf(path))
        model.save_pretrained(made)
    size = sum(file.stat().st_size for file in folder.iterdir())
    _log.warning("%s: cached %.0f MB in %s for later loads (%s=0 caches nothing)", path.name, size / 1e6, folder, KEEP)


def _from_file(path: Path) -> dict[str, Any]:
    import transformers

    plain = {}
    if hasattr(transformers, "GgufConfig"):  # newer versions may keep weights packed where they have a kernel
        plain["quantization_config"] = transformers.GgufConfig(dequantize=True)
    config = _config(path, check_gguf(path))
    return {**_alone(path), "config": config} | plain


def _alone(path: Path) -> dict[str, str]:
    """Return the arguments of `from_pretrained` for a GGUF file, in a folder of its own.

    In the file's own folder, `transformers` would also read other configuration files, and may run code named in them.
    """
    return {"pretrained_model_name_or_path": str(_folder_of_its_own(path.resolve())), "gguf_file": path.resolve().name}


@functools.cache
def _folder_of_its_own(path: Path) -> Path:
    """Return a temporary folder, deleted at exit, with a link to the file and nothing else."""
    folder = _temporary()
    link = folder / path.name
    try:
        link.symlink_to(path)
    except OSError:  # Windows allows symbolic links to administrators only
        os.link(path, link)
    return folder


def _config(path: Path, header: Header) -> PretrainedConfig:
    """Return the file's configuration as `transformers` reads it, plus the file's RoPE scaling."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(**_alone(path), trust_remote_code=False)
    rope = _rope(path, header)
    if rope:
        config.rope_parameters = {**config.rope_parameters, **rope}
    return config


def _rope(path: Path, header: Header) -> dict[str, Any]:
    """Return the RoPE scaling as configuration entries, empty if there is none. Raises `SelfspecError` if unknown."""
    kind = header.arch_value("rope.scaling.type")
    if "rope_freqs.weight" in header.tensors:
        return _llama3(path, header)
    if kind in (None, "none"):
        return {}
    original = header.arch_value(_ORIGINAL)
    if kind == "linear" or (kind == "yarn" and original):
        rope = {"rope_type": kind, "factor": _number(path, header, "rope.scaling.factor")}
        return rope | ({"original_max_position_embeddings": int(_number(path, header, _ORIGINAL))} if original else {})
    raise SelfspecError(f"{path}: rope scaling {short(kind)} is not supported in GGUF files")


def _number(path: Path, header: Header, key: str, default: float | None = None) -> float:
    """Return a positive number of the header; `default` if there is none. Raises `SelfspecError` for anything else."""
    value = header.arch_value(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
        raise SelfspecError(f"{path}: {key} {short(value)}; expected a number above 0")
    return value


def _llama3(path: Path, header: Header) -> dict[str, Any]:
    """Return Llama 3.1's RoPE scaling from the frequency divisors `[d / 2]`, which are all that the file holds."""
    import numpy as np

    tensor = header.tensors["rope_freqs.weight"]
    unknown = SelfspecError(f"{path}: unknown rope frequencies in 'rope_freqs.weight'; expected Llama 3.1's")
    if tensor.type != 0 or len(tensor.shape) != 1 or not tensor.shape[0]:
        raise unknown
    divisors = np.fromfile(path, dtype="<f4", count=tensor.shape[0], offset=tensor.start)
    if np.all(divisors == 1):
        return {}
    if not np.all(np.isfinite(divisors) & (divisors > 0)):
        raise unknown
    base = _number(path, header, "rope.freq_base", 10_000.0)
    lengths = 2 * np.pi * base ** (np.arange(len(divisors)) / len(divisors))  # wavelengths in positions
    factor = float(np.round(divisors.max(), 3))
    original, high, low = (
        _LLAMA3[name] for name in ("original_max_position_embeddings", "high_freq_factor", "low_freq_factor")
    )
    share = np.clip((original / lengths - low) / (high - low), 0, 1)  # weight of the unscaled frequency
    if not np.allclose(divisors, 1 / ((1 - share) / factor + share), rtol=1e-3):
        raise unknown
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _folder(path: Path) -> Path:
    """Return the cache folder of this file, by its path, size and modification time."""
    path = path.resolve()
    stat = path.stat()
    what = json.dumps([_VERSION, str(path), stat.st_size, stat.st_mtime_ns])
    return _root() / f"{path.stem}-{hashlib.sha256(what.encode()).hexdigest()[:16]}"


def _root() -> Path:
    """Return the cache folder of all GGUF files; if not writable, a temporary folder, deleted at exit."""
    folder = cache_folder() / "gguf"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return _lost()


@functools.cache
def _lost() -> Path:
    return _temporary()


def _temporary() -> Path:
    """Return a new temporary folder, deleted at exit."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="selfspec-gguf-"))
    except OSError as error:
        raise SelfspecError(
            f"a GGUF file needs a folder that can be written to ({error.strerror or error}); expected one in "
            "SELFSPEC_CACHE or TMPDIR"
        ) from None
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _making(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, which then becomes `folder` or is merged into it; an error deletes it."""
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        with disk_errors():
            yield made
        try:
            made.rename(folder)
        except OSError:  # the folder holds the description, or was made by another process meanwhile
            for file in made.iterdir():
                os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress stderr, and so progress bars, unless it is a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield
