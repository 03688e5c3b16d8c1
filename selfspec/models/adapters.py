"""PEFT adapters: folders with low-rank changes to a base model's weights.

An adapter that is loaded as the model is merged into the base model's weights. Adapters that are loaded by name stay
unmerged, and each request chooses an adapter (`Adapters`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from selfspec.basics.errors import SelfspecError, reason
from selfspec.basics.files import kind, parse_json, read_text

CONFIG = "adapter_config.json"
PROMPT_METHODS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT")  # change no weights

_VOCABULARY = re.compile(r"\b(embed_tokens|lm_head|wte|embed_in|embed_out)\.([a-z_.]+\.)?weight$")  # not lora_A.weight


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds a PEFT adapter and no full model (no config.json)."""
    return kind(folder / "config.json") != "file" and kind(folder / CONFIG) == "file"


def base_of(folder: Path) -> str:
    """Return an adapter's base model: a folder, relative to the working or the adapter's folder, or a hub id.

    Raises `SelfspecError` as `check_adapter` does, and if the adapter's configuration names no model.
    """
    base = check_adapter(folder)
    if base is None:
        raise SelfspecError(f"{folder / CONFIG}: 'base_model_name_or_path' names no model; expected the adapter's base")
    return base


def check_adapter(folder: Path) -> str | None:
    """Return an adapter's base model as `base_of` does, None if its configuration names none.

    Raises `SelfspecError` for an adapter of another adapter, for one that adds tokens to the prompt instead of changing
    weights, and without `peft`.
    """
    if find_spec("peft") is None:
        raise SelfspecError(f"model {folder} is a PEFT adapter; pip install peft to merge it into its model")
    try:
        config = parse_json(read_text(folder / CONFIG))
    except ValueError as error:
        raise SelfspecError(f"{folder / CONFIG}: not valid JSON: {error}") from None
    config = config if isinstance(config, dict) else {}
    if (method := config.get("peft_type")) in PROMPT_METHODS:
        raise SelfspecError(
            f"{folder / CONFIG}: {method} adds tokens to the prompt; expected an adapter of weights, such as LORA"
        )
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        return None
    local_base = folder / base
    base_model = str(local_base) if kind(Path(base)) == "missing" and kind(local_base) == "folder" else base
    if is_adapter(Path(base_model)):
        raise SelfspecError(
            f"model {folder} is an adapter of an adapter, {base_model}; merge one of them into its model first"
        )
    return base_model


def merged(model: Any, folder: Path) -> Any:
    """Return the model with the adapter merged into its weights, which costs no speed. Raises what `peft` raises."""
    from peft import PeftModel

    if (rows := saved_vocabulary(folder)) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows, mean_resizing=False)
    model = PeftModel.from_pretrained(model, str(folder))
    _untie(model)
    return model.merge_and_unload()


def saved_vocabulary(folder: Path) -> int:
    """Return the rows of the embeddings or the output head that an adapter's folder holds, 0 if it holds neither.

    They are more than the base model's if tokens were added for the adapter.
    """
    from safetensors import safe_open

    file = folder / "adapter_model.safetensors"
    if kind(file) != "file":
        return 0
    with safe_open(str(file), "pt") as tensors:
        names = [name for name in tensors.keys() if _VOCABULARY.search(name)]  # noqa: SIM118 (no mapping)
        return max((int(tensors.get_slice(name).get_shape()[0]) for name in names), default=0)


def _untie(model: Any) -> None:
    """Give the output head weights of its own if an adapter changes the head or the embeddings, but not both alike.

    Merging a change into weights that both share would apply it to both.
    """
    layers = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings, head = (getattr(layer, "base_layer", layer) for layer in layers)
    if layers == (embeddings, head) or getattr(head, "weight", None) is not getattr(embeddings, "weight", None):
        return
    head.weight = type(head.weight)(head.weight.detach().clone(), requires_grad=False)
    model.config.tie_word_embeddings = False


BASE = "base"  # the name in requests of the model without an adapter


def load_adapters(model: Any, adapters: Mapping[str, str | Path]) -> Any:
    """Return the model with the adapters in folders `adapters`, by name, added: unmerged, and all disabled.

    Raises `SelfspecError` for an invalid name, and for a folder that cannot be loaded.
    """
    for name, folder in adapters.items():
        if not name or name == BASE or "." in name:
            raise SelfspecError(
                f"adapter name '{name}': expected a name without dots, and not '{BASE}', the name for no adapter"
            )
        if not is_adapter(Path(folder)):
            raise SelfspecError(f"adapter {folder}: no folder with an {CONFIG}; expected a folder saved by PEFT")
        check_adapter(Path(folder))
    from peft import PeftModel

    for name, folder in adapters.items():
        try:
            if hasattr(model, "peft_config"):
                model.load_adapter(str(folder), adapter_name=name)
            else:
                model = PeftModel.from_pretrained(model, str(folder), adapter_name=name)
        except Exception as error:  # a broken or foreign adapter can raise anything
            if "size mismatch" in str(error) and saved_vocabulary(Path(folder)):
                raise SelfspecError(
                    f"adapter {folder} has embeddings of another size than the model's; expected it as the model, by "
                    "its folder"
                ) from error
            raise SelfspecError(f"adapter {folder} cannot be loaded: {reason(error)}") from error
    if adapters:
        model.base_model.disable_adapter_layers()
    return model.eval()


class Adapters:
    """A model's unmerged adapters, of which at most one is active at a time.

    They belong to the model as a whole: PEFT wraps it, or has put its layers into it (`inject_adapter_in_model`, also
    `transformers`' `load_adapter`). So a thread that decodes with one makes others wait (`active`).

    `names` are the adapters' names, empty for a model without adapters. `own` is the name of the default adapter: the
    active adapter of a model that came with adapters, or `BASE` (no adapter) if `load_adapters` loaded the adapters.
    """

    def __init__(self, model: Any) -> None:
        self.names: tuple[str, ...] = tuple(getattr(model, "peft_config", None) or ())
        self._wrapped = hasattr(model, "get_base_model")
        self._layers = [m for m in model.modules() if isinstance(getattr(m, "disable_adapters", None), bool)]
        off = any(layer.disable_adapters for layer in self._layers)
        self.own = self._acting(model) if self.names and not off else BASE
        self._model, self._acts = model, self.own
        self._lock = threading.RLock()

    def named(self, name: str | None) -> str:
        """Return the name of the adapter to use (None: the default `own`). Raises `SelfspecError` if it is unknown."""
        if name is not None and name not in (*self.names, BASE):
            raise SelfspecError(f"adapter '{name}' is not loaded; known: {', '.join((*self.names, BASE))}")
        return self.own if name is None else name

    def use(self, name: str) -> None:
        """Activate an adapter by a name that `named` returned. Switches made directly through `peft` go unnoticed."""
        if name == self._acts:
            return
        if not self._wrapped:
            self._use_in_place(name)
        elif name == BASE:
            self._model.base_model.disable_adapter_layers()
        else:
            self._model.base_model.enable_adapter_layers()
            self._model.set_adapter(name, inference_mode=True)
        self._acts = name

    def _use_in_place(self, name: str) -> None:
        """Activate an adapter whose layers were put into the model."""
        from peft.functional import set_adapter

        for layer in self._layers:
            layer.enable_adapters(name != BASE)
        if name != BASE:
            set_adapter(self._model, name, inference_mode=True)

    @contextmanager
    def active(self, name: str) -> Iterator[None]:
        """Activate an adapter as `use` does until the context ends, before which no other thread can switch it."""
        if not self.names:
            yield
            return
        with self._lock:
            self.use(name)
            yield

    def _acting(self, model: Any) -> str:
        """Return the name of the active adapter, the first if there are several."""
        acting = model.active_adapter if self._wrapped else self._layers[0].active_adapter
        return str(acting if isinstance(acting, str) else acting[0])
