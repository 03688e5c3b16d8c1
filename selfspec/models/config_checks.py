"""Checks of a model's config.json, before `transformers` makes anything of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from selfspec.basics.errors import SelfspecError, short
from selfspec.models.hub_names import pinned
from selfspec.types.limits import MOST_LAYERS

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
