"""PEFT adapters: folders with low-rank changes to a base model's weights.

An adapter loaded as a model is merged into the weights. Several adapters stay unmerged, and each request chooses one
(`Adapters`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from selfspec.basics.errors import SelfspecError, reason
from selfspec.basics.files import kind, read_text

CONFIG = "adapter_config.json"


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter and no model of its own."""
    return kind(folder / "config.json") != "file" and kind(folder / CONFIG) == "file"


def base_of(folder: Path) -> str:
    """Return an adapter's base model: a folder, relative to the working or the adapter's folder, or a hub id.

    Raises `SelfspecError` if the adapter's configuration names none, and without `peft`.
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
        raise SelfspecError(f"{folder / CONFIG}: 'base_model_name_or_path' names no model; expected the adapter's base")
    local_base = folder / base
    base_model = str(local_base) if kind(Path(base)) == "missing" and kind(local_base) == "folder" else base
    if is_adapter(Path(base_model)):
        raise SelfspecError(
            f"model {folder} is an adapter of an adapter, {base_model}; merge one of them into its model first"
        )
    return base_model


def merged(model: Any, folder: Path) -> Any:
    """Merge the adapter into the model's weights, which costs no speed. Raises what `peft` raises."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(folder)).merge_and_unload()


BASE = "base"  # the name in requests of the model without an adapter


def load_adapters(model: Any, adapters: Mapping[str, str | Path]) -> Any:
    """Load adapters by name, unmerged, and leave all of them disabled. Raises `SelfspecError`."""
    for name, folder in adapters.items():
        if not name or name == BASE or "." in name:
            raise SelfspecError(
                f"adapter name '{name}': expected one without dots, and not '{BASE}', which is none of them"
            )
        if not is_adapter(Path(folder)):
            raise SelfspecError(f"adapter {folder}: no folder with an {CONFIG}; expected one that PEFT saved")
        _ = base_of(Path(folder))
    from peft import PeftModel

    for name, folder in adapters.items():
        try:
            if hasattr(model, "peft_config"):
                model.load_adapter(str(folder), adapter_name=name)
            else:
                model = PeftModel.from_pretrained(model, str(folder), adapter_name=name)
        except Exception as error:  # a broken or foreign adapter can raise anything
            raise SelfspecError(f"adapter {folder} cannot be loaded: {reason(error)}") from error
    if adapters:
        model.base_model.disable_adapter_layers()
    return model.eval()


class Adapters:
    """A model's unmerged adapters, of which at most one is active at a time.

    `own` is the default: `BASE` if `load_adapters` loaded the adapters; for a model that came with adapters, the active
    one. A model without adapters has no `names`.
    """

    def __init__(self, model: Any) -> None:
        self.names: tuple[str, ...] = tuple(getattr(model, "peft_config", None) or ())
        off = any(getattr(module, "disable_adapters", None) is True for module in model.modules())
        self.own = str(model.active_adapter) if self.names and not off else BASE
        self._model, self._acts = model, self.own

    def named(self, name: str | None) -> str:
        """Return the adapter that a request names, or the default. Raises `SelfspecError` for an unknown name."""
        if name is not None and name not in (*self.names, BASE):
            raise SelfspecError(f"adapter '{name}' is not there; known: {', '.join((*self.names, BASE))}")
        return self.own if name is None else name

    def use(self, name: str) -> None:
        """Activate an adapter by its name from `named`. Switches made through `peft` itself go unnoticed."""
        if name == self._acts:
            return
        if name == BASE:
            self._model.base_model.disable_adapter_layers()
        else:
            self._model.base_model.enable_adapter_layers()
            self._model.set_adapter(name, inference_mode=True)
        self._acts = name
