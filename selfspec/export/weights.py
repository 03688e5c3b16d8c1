"""The weights of a model for export, all or some of its layers, and draft models for engines that load a folder."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from selfspec import builtin
from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import kind
from selfspec.export.exporter import ExportJob
from selfspec.llm.llm import LLM
from selfspec.models.loading import load_model
from selfspec.profile.drafter_specs import ModelSpec
from selfspec.types.draft_path import DraftPath

FAMILIES = ("llama", "mistral", "qwen2")
"""Families (`model_type`) in which a sub-layer whose last matrix is zero adds nothing to the residual stream."""

_LAYERS = "model.layers."
_LAST = {"attention": "self_attn.o_proj", "mlp": "mlp.down_proj"}


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a model: `tensors` by `transformers`' names, with the `transformers` configuration.

    `layers`: the indices, in the model that was exported, of the layers that the tensors hold, in order. `zeroed`: the
    names of modules whose weights were set to zero because the draft path skips their sub-layer.
    """

    config: Any
    tensors: Mapping[str, Tensor]
    layers: tuple[int, ...]
    zeroed: frozenset[str] = frozenset()


def weights_of(model: Any) -> Weights:
    """Return all weights of a model, with a copy of its configuration that names its class, as engines ask for it.

    Raises `SelfspecError` unless all weights are unquantised floats in memory in layout `rows`, and for models whose
    type is not among `FAMILIES`.
    """
    config, tensors = copy.deepcopy(model.config), dict(model.state_dict())
    config.architectures = [type(model).__name__]  # a model that was read from a GGUF file has none
    if getattr(config, "tie_word_embeddings", False):
        tensors.pop("lm_head.weight", None)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.is_meta or "lora_" in name:
            raise SelfspecError(
                f"the model's weights are not unquantised floats in memory ({name}); expected a model without "
                "quantisation, adapters and offloading to disk"
            )
    if config.model_type not in FAMILIES:
        raise SelfspecError(f"models of type '{config.model_type}' are not exported; known: {', '.join(FAMILIES)}")
    for name in ("model.embed_tokens.weight", f"{_LAYERS}0.self_attn.q_proj.weight"):
        if name not in tensors:
            raise SelfspecError(
                f"the model's weights have another layout than rows ({name} is missing); load it with layout='rows'"
            )
    return Weights(config, tensors, tuple(range(config.num_hidden_layers)))


def path_weights(weights: Weights, path: DraftPath) -> Weights:
    """Return the unquantised weights of the layers that a draft path keeps: layers not skipped as a whole.

    If the path skips only one sub-layer of a layer, the layer is kept and the last matrix of that sub-layer is set to
    zero: the model computes what the path computes, but saves no time. Raises `SelfspecError` if no layer is left.
    """
    attention, mlp = set(path.skip.attention), set(path.skip.mlp)
    layers = tuple(i for i in weights.layers if i not in attention & mlp)
    if not layers:
        raise SelfspecError("the path skips every layer; expected a path that keeps at least one layer")
    places = {layer: place for place, layer in enumerate(layers)}
    halves = [
        (_LAST[part], layer)
        for part, skipped in (("attention", attention), ("mlp", mlp))
        for layer in skipped
        if layer in places
    ]
    zeroed = frozenset(f"{_LAYERS}{places[layer]}.{name}" for name, layer in halves)
    tensors = {}
    for name, tensor in weights.tensors.items():
        if name.startswith(_LAYERS):
            number, _, rest = name.removeprefix(_LAYERS).partition(".")
            if int(number) not in places:
                continue
            name = f"{_LAYERS}{places[int(number)]}.{rest}"
        tensors[name] = torch.zeros_like(tensor) if name.rpartition(".")[0] in zeroed else tensor
    return Weights(_cut(weights.config, layers), tensors, layers, zeroed)


def model_of(weights: Weights) -> Any:
    """Return a `transformers` model whose parameters are the tensors of `weights`, without copies."""
    config = copy.deepcopy(weights.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(dict(weights.tensors), strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def _cut(config: Any, layers: tuple[int, ...]) -> Any:
    """Return a copy of a `transformers` configuration for a model of only these layers."""
    cut, before = copy.deepcopy(config), config.num_hidden_layers
    cut.num_hidden_layers = len(layers)
    if isinstance(kinds := getattr(config, "layer_types", None), list) and len(kinds) == before:
        cut.layer_types = [kinds[layer] for layer in layers]
    if getattr(config, "max_window_layers", None) is not None:
        cut.max_window_layers = min(config.max_window_layers, len(layers))
    return cut


def save(folder: Path, weights: Weights, tokenizer: Any, generation: Any) -> None:
    """Write a new model folder that `from_pretrained` loads; a tokenizer or generation config of None is left out."""
    folder.mkdir(parents=True)
    config = copy.deepcopy(weights.config)
    config.dtype = weights.tensors["model.embed_tokens.weight"].dtype
    config.save_pretrained(folder)
    tensors = {name: _alone(tensor.detach().cpu()) for name, tensor in weights.tensors.items()}
    save_torch_state_dict(tensors, folder, metadata={"format": "pt"})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if generation is not None:
        generation.save_pretrained(folder)


def _alone(tensor: Tensor) -> Tensor:
    """Return the tensor, copied unless contiguous and alone in its storage: safetensors cannot save views."""
    owns_storage = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if owns_storage else tensor.clone(memory_format=torch.contiguous_format)


def target_of(llm: LLM, folder: Path, out: Path) -> str:
    """Return the folder or hub id by which an engine can load the target.

    If the target has no such name, as with a GGUF file, an adapter, a revision or an unnamed model, its weights are
    written to `folder / "target"`. The returned path is then `out / "target"`, as `folder` is later moved to `out`.
    """
    name = llm.name
    if name == builtin.NAME:
        return str(builtin.model_folder())
    if kind(Path(name)) == "folder" and kind(Path(name) / "config.json") == "file":
        return name
    if "/" in name and "@" not in name and kind(Path(name)) == "missing" and not name.endswith(".gguf"):
        return name
    save(folder / "target", weights_of(llm.model), llm.tokenizer, llm.model.generation_config)
    return str(out / "target")


def in_full(path: DraftPath) -> DraftPath:
    """Return the path without quantisation: it has the same skip set and runs all other sub-layers in full."""
    return DraftPath(path.skip)


def describe_layers(path: DraftPath, layers: int) -> tuple[str, tuple[str, ...]]:
    """Return a description of the draft model that a path keeps of a target with `layers` layers, and its limitations.

    There is a limitation if the path skips only one of the two sub-layers of a layer.
    """
    attention, mlp = set(path.skip.attention), set(path.skip.mlp)
    left = layers - len(attention & mlp)
    description = f"{left} of the model's {layers} layers, as a separate model"
    if left == layers:
        description = "the model itself, as a draft model"
    if not (halves := len(attention ^ mlp)):
        return description, ()
    return description, (
        f"the time of {halves} sub-layer(s) skipped in layers that are kept: their last matrix is zero, which "
        "gives the same drafts and saves no time",
    )


def layers_folder(job: ExportJob, path: DraftPath, folder: Path, generation: GenerationConfig | None = None) -> None:
    """Write the layers that a path keeps as a model folder, with `generation` or the target's generation config."""
    weights = path_weights(weights_of(job.llm.model), path)
    save(folder, weights, job.llm.tokenizer, generation or job.llm.model.generation_config)


def other_model(job: ExportJob, spec: ModelSpec) -> tuple[Any, Any]:
    """Return the draft model that a profile names and its tokenizer, loaded on the CPU.

    Its dtype is the profile's; where that is `auto`, the target's. A folder beside the profile takes precedence over
    other names. Raises `SelfspecError` if loading fails.
    """
    local_folder = None if job.profile.folder is None else job.profile.folder / spec.model
    name = str(local_folder) if local_folder is not None and local_folder.is_dir() else spec.model
    dtype = str(job.llm.runtime.dtype).removeprefix("torch.") if spec.dtype == "auto" else spec.dtype
    return load_model(name, device="cpu", dtype=dtype)


def same_tokens(job: ExportJob, model: Any) -> bool:
    """Return whether the draft model's vocabulary has the same size as the target's, as a sign of equal tokenizers."""
    return bool(model.config.vocab_size == job.llm.identity.vocabulary)


def model_folder(model: Any, tokenizer: Any, folder: Path, generation: GenerationConfig | None = None) -> None:
    """Write a model and its tokenizer as a model folder; `generation`: the generation config (None: the model's)."""
    save(folder, weights_of(model), tokenizer, generation or copy.deepcopy(model.generation_config))
