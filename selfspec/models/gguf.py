"""GGUF files as models: dequantised, one tensor at a time, into a cached folder that `from_pretrained` memory-maps.

Configuration and weights are read here, the tokenizer by `transformers`. All end tokens of a file end a text.
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
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.basics.errors import SelfspecError, reason
from selfspec.basics.files import cache_folder, disk_errors
from selfspec.models.gguf_config import check_header, read_config
from selfspec.models.gguf_header import Header, model_files, read_header

if TYPE_CHECKING:
    import torch

    from selfspec.models.gguf_tensors import GGUFTensors

KEEP = "SELFSPEC_GGUF_COPIES"  # environment variable: 0 caches no dequantised weights
_VERSION = 2  # version of the format of cached folders
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_CLASSES = (
    "llama",
    "qwen2",
)  # architectures whose tokenizer's class `transformers` chooses; else it is the file's alone
_log = logging.getLogger("selfspec")


def check_gguf(path: Path) -> Header:
    """Return the header of a GGUF file, without its weights. Raises `SelfspecError` if it is no supported model."""
    header = read_header(path)
    check_header(path, header)
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
        except SelfspecError:
            raise
        except Exception as error:  # a broken file can raise anything
            raise SelfspecError(f"{path}: cannot be used as a model: {reason(error)}") from error
    return folder


def _describe(path: Path, header: Header, folder: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

    made = AutoTokenizer if header.architecture in _CLASSES else PreTrainedTokenizerFast
    made.from_pretrained(**_alone(model_files(path)[0]), trust_remote_code=False).save_pretrained(folder)
    config = read_config(path, header)
    keys = (f"tokenizer.ggml.{name}" for name in _ENDS)
    ends = sorted({header.metadata[key] for key in keys if key in header.metadata})
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=ends or None, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)
    config.save_pretrained(folder)


def load_dequantized(path: Path, dtype: torch.dtype, spread: dict[str, Any]) -> tuple[Any, list[str]]:
    """Load a GGUF file's model in `dtype`; return it with the names of missing weights.

    `spread`: arguments of `from_pretrained` that place the model on devices. Dequantised weights are written to the
    cache folder on the first call, and mapped. If they cannot be written, or the environment variable
    `SELFSPEC_GGUF_COPIES` is 0, the file is dequantised into memory at each call.
    """
    import torch
    from transformers import AutoModelForCausalLM

    stored = torch.float32 if dtype == torch.float64 else dtype  # dequantised weights are exact in float32
    folder = description(path) / str(stored).removeprefix("torch.")
    options = {"output_loading_info": True, "trust_remote_code": False, "dtype": dtype, **spread}
    if (folder / "config.json").is_file() or _cached(path, folder, stored):
        model, loaded = AutoModelForCausalLM.from_pretrained(str(folder), **options)
    else:
        empty, tensors = _empty_model(path)
        state = {name: tensors.read(name).to(dtype) for name in _names(empty, tensors)}
        model, loaded = type(empty).from_pretrained(None, config=empty.config, state_dict=state, **options)
    return model, sorted(loaded["missing_keys"])


def _cached(path: Path, folder: Path, dtype: torch.dtype) -> bool:
    """Write the dequantised weights to the cache, and return whether that was possible."""
    if os.environ.get(KEEP) == "0" or not folder.is_relative_to(cache_folder()):
        return False
    try:
        _copy(path, folder, dtype)
    except OSError as error:
        _log.warning("%s: dequantised weights cannot be cached (%s)", path.name, error.strerror or error)
        return False
    return True


def own_dtype(path: Path) -> torch.dtype:
    """Return the dtype for an accelerator: float32 or float16 if all the file's matrices have it, else bfloat16."""
    import torch
    from gguf import GGMLQuantizationType as Type

    types = {tensor.type for tensor in read_header(path).tensors.values() if len(tensor.shape) > 1}
    known = {Type.F32: torch.float32, Type.F16: torch.float16}
    return known.get(Type(types.pop()), torch.bfloat16) if len(types) == 1 else torch.bfloat16


def _copy(path: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write a file's dequantised weights and config to `folder`, and log that."""
    _log.warning("%s: dequantising it to %s, once ...", path.name, str(dtype).removeprefix("torch."))
    with _making(folder) as made:
        model, tensors = _empty_model(path)
        _write_safetensors(made / "model.safetensors", model, tensors, dtype)
        model.config.dtype = dtype
        model.config.save_pretrained(made)
    size = sum(file.stat().st_size for file in folder.iterdir())
    _log.warning("%s: cached %.0f MB in %s for later loads (%s=0 caches nothing)", path.name, size / 1e6, folder, KEEP)


def _empty_model(path: Path) -> tuple[Any, GGUFTensors]:
    """Return a file's model without weights, and the file's tensors."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    from selfspec.models.gguf_tensors import GGUFTensors

    header = check_gguf(path)
    config = read_config(path, header)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model, GGUFTensors(path, header, config)


def _names(model: Any, tensors: GGUFTensors) -> list[str]:
    """Return the names of a model's parameters, without a head that is tied to the embedding."""
    return [name for name, _ in model.named_parameters() if not (name == "lm_head.weight" and not tensors.has(name))]


def _write_safetensors(path: Path, model: Any, tensors: GGUFTensors, dtype: torch.dtype) -> None:
    """Write a model's weights in `dtype`, one after the other. Format: https://huggingface.co/docs/safetensors."""
    import torch

    kinds = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names, end = _names(model, tensors), 0
    for name in names:
        shape = list(model.get_parameter(name).shape)
        begin, end = end, end + model.get_parameter(name).numel() * dtype.itemsize
        header[name] = {"dtype": kinds[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            tensor = tensors.read(name).to(dtype).contiguous()
            if list(tensor.shape) != header[name]["shape"]:
                raise SelfspecError(f"{name} has the shape {list(tensor.shape)}; expected {header[name]['shape']}")
            file.write(tensor.view(torch.uint8).numpy().data)


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


def _folder(path: Path) -> Path:
    """Return the cache folder of this model, by its files' paths, sizes and modification times."""
    path = path.resolve()
    stats = [(str(file), file.stat()) for file in model_files(path)]
    what = json.dumps([_VERSION, *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats)])
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
