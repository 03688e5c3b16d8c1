"""Draft models for engines that load a model folder: some of the target's layers, or a separate model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from selfspec.basics.errors import SelfspecError
from selfspec.export.draft_export import DraftModel, Sublayers
from selfspec.export.exporter import ExportJob
from selfspec.export.weights import Weights, path_weights, save, weights_of
from selfspec.models.loading import load_model
from selfspec.types.draft_path import DraftPath


def in_full(path: DraftPath) -> DraftPath:
    """Return the path without quantisation: it has the same skip set and runs all other sub-layers in full."""
    return DraftPath(path.skip)


def check_shorter(job: ExportJob, drafts: Sublayers, engine: str, instead: str) -> None:
    """Raise `SelfspecError` unless the path skips a whole layer.

    Otherwise an unquantised draft model would cost as much as decoding. `engine`: the name of the engine. `instead`:
    the alternative that the message names.
    """
    path, layers = drafts.path, job.llm.identity.layers
    if path.runs(layers):
        return
    what = "no layer is skipped whole, and" if len(path.skip) else "all sub-layers run, and"
    raise SelfspecError(
        f"{what} {engine} runs drafts in the model's own precision: as a draft model they would take as long as "
        f"decoding; {instead}"
    )


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


def layers_folder(
    job: ExportJob, drafts: Sublayers, folder: Path, generation: GenerationConfig | None = None
) -> Weights:
    """Write the layers that a path keeps as a model folder; return the weights that were written.

    `generation`: the generation config to write (None: the target's).
    """
    weights = path_weights(weights_of(job.llm.model), drafts.path)
    config = generation or job.llm.model.generation_config
    save(folder, weights, job.llm.tokenizer, config)
    return weights


def other_model(job: ExportJob, drafts: DraftModel) -> tuple[Any, Any]:
    """Return the draft model that a profile names and its tokenizer, loaded on the CPU.

    A folder beside the profile takes precedence over other names. Raises `SelfspecError` if loading fails.
    """
    local_folder = None if job.profile.folder is None else job.profile.folder / drafts.spec.model
    name = str(local_folder) if local_folder is not None and local_folder.is_dir() else drafts.spec.model
    return load_model(name, device="cpu", dtype=drafts.spec.dtype)


def same_tokens(job: ExportJob, model: Any) -> bool:
    """Return whether the draft model's vocabulary has the same size as the target's, as a sign of equal tokenizers."""
    return bool(model.config.vocab_size == job.llm.identity.vocabulary)


def model_folder(model: Any, tokenizer: Any, folder: Path, generation: GenerationConfig | None = None) -> None:
    """Write a model and its tokenizer as a model folder; `generation`: the generation config (None: the model's)."""
    save(folder, weights_of(model), tokenizer, generation or copy.deepcopy(model.generation_config))
