"""Finding and loading models through `from_pretrained`: built in, a folder, an adapter, a GGUF file, or a hub id."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec import builtin
from selfspec.basics.errors import SelfspecError, reason
from selfspec.basics.files import kind, parse_json
from selfspec.basics.machine import unreachable
from selfspec.models.adapters import base_of, is_adapter, merged, saved_vocabulary
from selfspec.models.gguf import check_gguf, description, load_dequantized, own_dtype
from selfspec.models.gguf_header import is_gguf
from selfspec.models.hub_names import PACKAGED, check_config, did_you_mean, is_hub_name, packaged_file, pinned, stored

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig

    from selfspec.types.identity import Identity

PLACINGS = ("auto", "balanced", "balanced_low_0", "sequential")
_MEMORY = re.compile(r"[0-9]+(\.[0-9]+)?[KMGT]i?B")
DTYPES = ("auto", "float32", "float64", "bfloat16", "float16", "file")


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """A device map for a model larger than one device, as `from_pretrained` of `transformers` takes it.

    `places`: one of `PLACINGS`, or a device for each module by name. `max_memory`: the limit for each device (a GPU's
    number, or cpu), in bytes or as a string such as 20GiB. Weights that fit on no device stay on disk, in the
    checkpoint or in `offload_folder`, and are read at every use. Raises `SelfspecError` for invalid values.
    """

    places: str | Mapping[str, int | str] = "auto"
    max_memory: Mapping[int | str, int | str] | None = None
    offload_folder: Path | None = None

    def __post_init__(self) -> None:
        if isinstance(self.places, str) and self.places not in PLACINGS:
            raise SelfspecError(f"device map '{self.places}' is not known; known: {', '.join(PLACINGS)}")
        for device, memory in (self.max_memory or {}).items():
            known = device == "cpu" or (isinstance(device, int) and device >= 0)
            size = memory > 0 if isinstance(memory, int) else _MEMORY.fullmatch(memory) is not None
            if not known or not size:
                raise SelfspecError(
                    f"device memory {device}={memory}: expected a GPU's number or cpu, and a size such as 20GiB"
                )
        if self.offload_folder is not None and kind(self.offload_folder) not in ("folder", "missing"):
            raise SelfspecError(f"offload folder {self.offload_folder} is a file; expected a folder")

    def options(self) -> dict[str, Any]:
        """Return the fields that are not None as keyword arguments of `from_pretrained`."""
        named = {"device_map": self.places, "max_memory": self.max_memory, "offload_folder": self.offload_folder}
        return {name: dict(v) if isinstance(v, Mapping) else v for name, v in named.items() if v is not None}


def parse_devices(
    device: str, device_map: str | None, device_memory: str | None, offload_folder: Path | None
) -> str | DeviceMap:
    """Parse the device options of a command: return `device`, or a `DeviceMap` if `device_map` is given.

    `device_memory` has the form 0=20GiB,cpu=60GiB. Raises `SelfspecError` for options that are invalid or do not go
    together.
    """
    if device_map is None:
        for name, value in (("--device-memory", device_memory), ("--offload-folder", offload_folder)):
            if value is not None:
                raise SelfspecError(f"{name} is for models spread over devices; expected --device-map auto too")
        return device
    if device != "auto":
        raise SelfspecError(f"--device {device} and --device-map: expected only one of these options")
    memory: dict[int | str, int | str] = {}
    for part in [] if device_memory is None else " ".join(device_memory.split()).split(","):
        place, _, size = (text.strip() for text in part.partition("="))
        key = int(place) if re.fullmatch("[0-9]{1,4}", place) else place
        if key in memory:
            raise SelfspecError(f"device memory: {place} is given twice")
        memory[key] = size
    return DeviceMap(device_map, memory or None, offload_folder)


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file that a model's name stands for; None if the model is not in a GGUF file.

    The name is the file's path, or a key of `PACKAGED`. Raises `SelfspecError` if the file does not exist or its
    package is not installed.
    """
    if name in PACKAGED and kind(Path(name)) == "missing":
        return packaged_file(name)
    path = Path(name)
    there = kind(path) if name else "missing"
    if there == "file" and (path.suffix == ".gguf" or is_gguf(path)):
        return path
    if there == "missing" and path.suffix == ".gguf":
        raise SelfspecError(f"model {name}: no such file")
    return None


def check_model_name(name: str) -> None:
    """Raise `SelfspecError` if `name` cannot be the name of a model. Cheap: torch is not imported."""
    if name == builtin.NAME:
        return
    want = f"expected a folder, a GGUF file, a hub id, {', '.join(PACKAGED)}, or '{builtin.NAME}'"
    if not name:
        raise SelfspecError(f"the model's name is empty; {want}")
    if (file := gguf_file(name)) is not None:
        check_gguf(file)
        return
    path = Path(name)
    there = kind(path)
    if there == "folder":
        if (base := _base(name)) != name:
            try:
                check_model_name(base)
            except SelfspecError as error:
                raise SelfspecError(f"{name} is a PEFT adapter: its {error}") from None
        elif kind(path / "config.json") != "file":
            files = sorted(path.glob("*.gguf"))
            want = f"a GGUF file by its own path, such as {files[0]}" if files else "a model saved by save_pretrained"
            raise SelfspecError(f"model {name}: the folder has no config.json; expected {want}")
    elif there != "missing":
        raise SelfspecError(f"model {name} is a file, but not a GGUF file; {want}")
    elif not is_hub_name(name):
        raise SelfspecError(f"model {name}: no such folder; {want}")


def check_at_hand(name: str) -> None:
    """Raise `SelfspecError` if `name` cannot be a model, or is a hub id without a local copy and the hub is offline.

    A mistyped name of a built-in or packaged model is not looked up on the hub; the error names the model.
    """
    check_model_name(name)
    base = _base(name)
    here = base == builtin.NAME or gguf_file(base) is not None or kind(Path(base)) == "folder"
    if here or stored_config(base) is not None:
        return
    if (meant := did_you_mean(name)) is not None:
        raise SelfspecError(f"model {name}: no such folder; did you mean {meant}?")
    if (why := unreachable()) is not None:
        named = name if base == name else f"{base}, which the adapter {name} changes,"
        raise SelfspecError(f"model {named} cannot be loaded: there is no such folder; {why}")


def check_dtype(dtype: str) -> None:
    """Raise `SelfspecError` if `dtype` is not one of `DTYPES`."""
    if dtype not in DTYPES:
        raise SelfspecError(f"dtype '{dtype}' is not known; known: {', '.join(DTYPES)}")


def load_model(
    name: str,
    *,
    device: str | DeviceMap = "auto",
    dtype: str = "auto",
    parallel: bool = False,
    hold: bool = False,
) -> tuple[Any, Any]:
    """Load a model and its tokenizer by name, through `from_pretrained`; return both.

    `device`: `auto` is CUDA if available, else the CPU; a `DeviceMap` spreads the model over several devices. `dtype`:
    `auto` is the checkpoint's dtype on an accelerator, and float32 on the CPU, where half precision is slower; `file`
    keeps the quantised weights of a GGUF file as they are, and all other weights in float32. `parallel`: load tensor
    parallel over the processes of `torchrun`. `hold`: lay a float32 model on the CPU out natively if its checkpoint is
    in 16 bits, without ever storing its weights in float32 (`half_storage.hold_`); other models are loaded as without.
    Raises `SelfspecError` with the reason if loading fails.
    """
    check_model_name(name)
    check_dtype(dtype)
    spread = device.options() if isinstance(device, DeviceMap) else {}
    if parallel:
        spread = _shared(name, check_parallel(device))
    where = _device("auto" if isinstance(device, DeviceMap) else device)
    keep_quantized = dtype == "file"
    if keep_quantized:
        _check_kept(name, where, spread=bool(spread))
    import torch
    from transformers import AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    missing: list[str] = []
    source, file, torch_dtype = _readable(name), gguf_file(_base(name)), _dtype(dtype, where)
    shown = logging.is_progress_bar_enabled()
    if Path(source).is_dir():
        logging.disable_progress_bar()  # nothing is downloaded
    try:
        tokenizer = _from_pretrained(AutoTokenizer, _tokenizer_source(name))
        if file is not None:
            torch_dtype = own_dtype(file) if torch_dtype == "auto" else torch_dtype
        if keep_quantized and file is not None:
            from selfspec.models.gguf_kept import load_quantized_gguf

            model = load_quantized_gguf(file)
        elif file is not None:
            model, missing = load_dequantized(file, torch_dtype, spread)
        else:
            hold = hold and not spread and where.type == "cpu" and torch_dtype == torch.float32 and _base(name) == name
            model, missing = _load_folder(source, torch_dtype, hold=hold, options=spread)
        if _base(name) != name:
            model = merged(model, Path(name))
        model = model.eval() if spread else model.eval().to(where)
        if file is not None:  # the generation config may name more end tokens than the config
            model.generation_config = GenerationConfig.from_pretrained(source)
    except Exception as error:  # a broken checkpoint can raise anything
        raise SelfspecError(f"model {name} cannot be loaded: {reason(error)}") from error
    finally:
        if shown:
            logging.enable_progress_bar()
    if missing:
        raise SelfspecError(f"model {name} cannot be loaded: {len(missing)} weights are missing, such as {missing[0]}")
    return model, tokenizer


def _load_folder(source: str, dtype: Any, *, hold: bool, options: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Load a folder or a hub id by `from_pretrained`; return the model, and the names of missing weights.

    `hold`: return what `hold_` makes of the checkpoint in its own dtype, if all its weights have that one. `options`:
    further arguments of `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM

    from selfspec.models.half_storage import SAVED_AS, hold_

    for own in (True, False) if hold else (False,):
        model, loaded = _from_pretrained(  # safetensors in their own dtype are mapped, and not read here
            AutoModelForCausalLM, source, dtype="auto" if own else dtype, output_loading_info=True, **options
        )
        missing = sorted(loaded["missing_keys"])
        if not own or (not missing and _stored_floats(source) == {SAVED_AS.get(model.dtype)} and hold_(model)):
            break
    return model, missing


def _stored_floats(source: str) -> set[str]:
    """Return the floating-point formats in a model's safetensors files, as these name them; none without such files.

    The dtype in the configuration, to which `from_pretrained` converts weights, may be another.
    """
    from safetensors import safe_open
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

    if (copy := stored(source)) is None:
        return set()
    names, index = {SAFE_WEIGHTS_NAME}, Path(copy, SAFE_WEIGHTS_INDEX_NAME)
    if kind(Path(copy, SAFE_WEIGHTS_NAME)) != "file" and kind(index) == "file":  # as `from_pretrained` chooses
        names = set(parse_json(index.read_bytes())["weight_map"].values())
    found = set[str]()
    for file in (Path(copy, name) for name in names if kind(Path(copy, name)) == "file"):
        with safe_open(str(file), "pt") as tensors:
            found |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118 (no mapping)
    return {name for name in found if "F" in name}


def check_parallel(device: str | DeviceMap) -> int:
    """Return the number of `torchrun` processes that share a model.

    Raises `SelfspecError` outside `torchrun`, and if `device` is not `auto`, as each process has its own device.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise SelfspecError(
            "tensor parallel: not started by torchrun; expected a process for each device, as in: "
            "torchrun --nproc-per-node 2 -m selfspec generate --tensor-parallel ..."
        )
    if device != "auto":
        raise SelfspecError("tensor parallel with a device or device map: expected neither; each process has its own")
    return int(os.environ["WORLD_SIZE"])


def _shared(name: str, among: int) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that shard a model over `among` tensor parallel processes.

    Raises `SelfspecError` for a GGUF file or an adapter, and as `parallel_options` does.
    """
    from selfspec.models.shards import parallel_options

    if gguf_file(_base(name)) is not None or _base(name) != name:
        raise SelfspecError(f"tensor parallel: {name} is a GGUF file or an adapter; expected a folder or a hub id")
    return parallel_options(read_identity(name), among)


def _check_kept(name: str, device: torch.device, *, spread: bool) -> None:
    """Raise `SelfspecError` unless dtype `file` is possible: the model is a GGUF file, and runs on the CPU."""
    if gguf_file(name) is None:
        raise SelfspecError(
            f"dtype 'file' keeps the weights of a GGUF file quantised: model {name} is not a GGUF file; expected auto"
        )
    if spread or device.type != "cpu":
        raise SelfspecError(
            "dtype 'file': the quantised weights of a GGUF file run on the CPU only; expected --device cpu"
        )


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a model by name. Raises `SelfspecError` with the reason if it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        check_at_hand(name)
        return _from_pretrained(AutoTokenizer, _tokenizer_source(name))
    except Exception as error:  # a broken checkpoint can raise anything
        raise SelfspecError(f"its tokenizer cannot be loaded: {reason(error)}") from error


def read_identity(name: str) -> Identity:
    """Read a model's identity (model type and sizes) from its configuration, without its weights.

    Raises `SelfspecError` if the configuration cannot be read, or is not that of a causal language model.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from selfspec.models.families import FAMILIES, find_family
    from selfspec.models.skeleton import read_identity as read

    try:
        config = _from_pretrained(AutoConfig, _readable(name))
        if config.model_type not in (*FAMILIES, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
            find_family(config, name)
        identity, rows = read(config), saved_vocabulary(Path(name)) if is_adapter(Path(name)) else 0
        return identity.model_copy(update={"vocabulary": max(rows, identity.vocabulary or 0) or None})
    except SelfspecError:
        raise
    except Exception as error:  # a broken configuration can raise anything
        raise SelfspecError(f"model {name} cannot be read: {reason(error)}") from error


def stored_config(name: str) -> str | None:
    """Return the local folder with a model's config.json, without network access; None if there is no such folder.

    Raises `SelfspecError` if `name` cannot be a model.
    """
    check_model_name(name)
    try:
        return stored(_source(name))
    except ValueError:
        raise SelfspecError(f"model {name}: neither an existing folder nor a valid hub id") from None


def read_generation_config(path: Path) -> GenerationConfig:
    """Read a `generation_config.json` from its path or its folder. Raises `SelfspecError` if that fails."""
    from transformers import GenerationConfig

    file = path / "generation_config.json" if kind(path) == "folder" else path
    if kind(file) != "file":
        raise SelfspecError(f"generation config {file}: no such file")
    try:
        return GenerationConfig.from_pretrained(str(file.parent), config_file_name=file.name)
    except Exception as error:  # a broken file can raise anything
        raise SelfspecError(f"generation config {file} cannot be read: {reason(error)}") from error


def _from_pretrained(auto: Any, source: str, **options: Any) -> Any:
    """Return what a class of `transformers` reads from a folder or a hub id, at its revision; code of it is not run."""
    name, revision = pinned(source)
    return auto.from_pretrained(name, trust_remote_code=False, **revision, **options)


def _base(name: str) -> str:
    """Return the base model's name if `name` is an adapter's folder, else `name`. Raises as `base_of` does."""
    return base_of(Path(name)) if is_adapter(Path(name)) else name


def _tokenizer_source(name: str) -> str:
    """Return where to load the tokenizer from: an adapter's folder if it has a tokenizer, else `_source(name)`."""
    has_own = is_adapter(Path(name)) and kind(Path(name) / "tokenizer_config.json") == "file"
    return name if has_own else _reachable(_source(name))


def _source(name: str) -> str:
    """Return the folder or hub id that `from_pretrained` reads a model's configuration from."""
    name = _base(name)
    if name == builtin.NAME:
        return str(builtin.model_folder())
    return name if (file := gguf_file(name)) is None else str(description(file))


def _readable(name: str) -> str:
    """Return where to read a model from, after `check_at_hand` and `check_config`. Raises as these functions do."""
    check_at_hand(name)
    check_config(name, source := _reachable(_source(name)))
    return source


def _reachable(source: str) -> str:
    """Return a hub id's copy in the cache if the hub does not answer, else `source`.

    For a hub id, `from_pretrained` would ask the hub for newer files first, and wait for each of them.
    """
    copy = stored(source)
    return source if copy is None or copy == source or unreachable() is None else copy


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError, ValueError, TypeError) as error:
        raise SelfspecError(f"device '{name}' cannot be used: {reason(error)}") from None
    if device.type == "meta":
        raise SelfspecError("device 'meta' cannot be used: it holds no values; expected cpu or cuda")
    return device


def _dtype(name: str, device: torch.device) -> Any:
    import torch

    if name == "file":
        return torch.float32
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return getattr(torch, name)
