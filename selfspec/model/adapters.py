"""PEFT adapters: folders with the changes to a base model's weights, which are merged into them when it is loaded."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import kind, read_text

CONFIG = "adapter_config.json"


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, and no model of its own."""
    return kind(folder / "config.json") != "file" and kind(folder / CONFIG) == "file"


def base_of(folder: Path) -> str:
    """The model that an adapter changes: a folder, seen from here or from the adapter's, or a hub id.

    Raises `SelfspecError` where the adapter's configuration does not say, and without `peft`.
    """
    if find_spec("peft") is None:
        raise SelfspecError(
            f"model {folder} is a PEFT adapter; pip install 'selfspec[peft]' to merge it into its model"
        )
    try:
        config = json.loads(read_text(folder / CONFIG))
    except ValueError as error:
        raise SelfspecError(f"{folder / CONFIG}: not valid JSON: {error}") from None
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not isinstance(base, str) or not base:
        raise SelfspecError(f"{folder / CONFIG}: 'base_model_name_or_path' names no model; want the adapter's base")
    beside = folder / base
    found = str(beside) if kind(Path(base)) == "missing" and kind(beside) == "folder" else base
    if is_adapter(Path(found)):
        raise SelfspecError(
            f"model {folder} is an adapter of an adapter, {found}; merge one of them into its model first"
        )
    return found


def merged(model: Any, folder: Path) -> Any:
    """The model with the adapter's changes made to its weights: as fast as without them. Raises what `peft` raises."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
