"""Base of the exporters to engines that load draft models and heads from folders: SGLang, TensorRT-LLM and vLLM."""

from __future__ import annotations

import json
from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import save_file

from selfspec.basics.errors import SelfspecError
from selfspec.export.exporter import Exporter, ExportJob, ExportPlan, ExportResult
from selfspec.export.weights import describe_layers, in_full, layers_folder, model_folder, other_model, same_tokens
from selfspec.profile.drafter_specs import ModelSpec
from selfspec.types.draft_path import DraftPath


class FolderExporter(Exporter):
    """Base of the exporters that write a draft model, or the layers that a path keeps, to the folder `draft`.

    `title`: the name of the engine as its makers write it. `forgets`: the limitation of its n-grams for profiles that
    look up earlier answers. `quantises`: the type to which the engine quantises a draft model's weights when it loads
    them; None if it cannot. `maps_tokens`: whether a draft model may have another tokenizer than the target.
    """

    title: ClassVar[str]
    forgets: ClassVar[str] = ""
    quantises: ClassVar[str | None] = "fp8"
    maps_tokens: ClassVar[bool] = False

    def plan_lookup(self, job: ExportJob, *, answers: bool) -> ExportPlan:
        """Return the plan for the engine's own n-grams, which it has of its own texts only."""
        lost = (self.forgets,) if answers else ()
        return ExportPlan("n-grams of prompts and outputs", partial(self.serve_lookup, job), limitations=lost)

    def plan_layers(self, job: ExportJob, path: DraftPath) -> ExportPlan:
        """Return the plan for the layers that a path keeps, as a separate model."""
        description, lost = describe_layers(path, job.llm.identity.layers)
        write = partial(self._write_layers, job, path)
        if path.low_precision:
            lost = (*lost, self._quantization_limitation("int4" if len(path.int4) else "int8"))
        if path.low_precision and self.quantises:
            return ExportPlan(f"{description}, in {self.quantises}", write, path=path, limitations=lost)
        self._check_shorter(path, job.llm.identity.layers)
        return ExportPlan(description, write, path=in_full(path), limitations=lost)

    def plan_model(self, job: ExportJob, spec: ModelSpec) -> ExportPlan:
        """Return the plan for a separate draft model."""
        lost = (self._quantization_limitation(spec.bits),) if spec.bits else ()
        return ExportPlan(f"the model {spec.model}", partial(self._write_model, job, spec), limitations=lost)

    @abstractmethod
    def serve_lookup(self, job: ExportJob, folder: Path, tokens: int) -> ExportResult:
        """Write the settings for drafts of `tokens` tokens by n-gram lookup to `folder`; return the commands to run."""

    @abstractmethod
    def serve_draft(
        self, job: ExportJob, folder: Path, tokens: int, *, quantised: bool, other_tokens: bool
    ) -> ExportResult:
        """Write the settings for drafts of `tokens` tokens by the draft model in `draft`; return the commands to run.

        The settings are written to `folder`. `quantised`: whether the engine quantises the draft model when it loads
        it. `other_tokens`: whether the draft model's tokenizer differs from the target's.
        """

    def _quantization_limitation(self, bits: str) -> str:
        """Return the limitation for weights in int8 or int4."""
        if self.quantises is None:
            return "quantised weights: the draft model runs unquantised"
        return (
            f"weights in {bits.removeprefix('int')} bits: all weights of the draft model become {self.quantises} "
            "(e4m3) when it is loaded"
        )

    def _check_shorter(self, path: DraftPath, layers: int) -> None:
        """Raise `SelfspecError` unless the path skips a whole layer: drafts would take as long as decoding."""
        if not path.runs(layers):
            what = "no layer is skipped whole, and" if len(path.skip) else "all sub-layers run, and"
            raise SelfspecError(
                f"{what} {self.title} runs drafts in the model's own precision: as a draft model they would take as "
                "long as decoding; it could run instead: a set of whole layers, by selfspec search --kv own"
            )

    def _write_layers(self, job: ExportJob, path: DraftPath, folder: Path, tokens: int) -> ExportResult:
        layers_folder(job, path, folder / "draft")
        quantised = path.low_precision and self.quantises is not None
        return self.serve_draft(job, folder, tokens, quantised=quantised, other_tokens=False)

    def _write_model(self, job: ExportJob, spec: ModelSpec, folder: Path, tokens: int) -> ExportResult:
        model, tokenizer = other_model(job, spec)
        same = same_tokens(job, model)
        if not same and not self.maps_tokens:
            raise self.refused("a draft model with another tokenizer", "a draft model made by selfspec train distill")
        model_folder(model, tokenizer, folder / "draft")
        quantised = spec.bits is not None and self.quantises is not None
        return self.serve_draft(job, folder, tokens, quantised=quantised, other_tokens=not same)


def save_head(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Write the configuration and the weights of a draft head to a new folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
