"""Export to vLLM: a `--speculative-config`, draft models as folders, heads in vLLM's or in `speculators`' format."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from selfspec.draft_modules.module_files import PartFile
from selfspec.export.exporter import ExportJob, ExportPlan, ExportResult
from selfspec.export.head_export import HeadFiles, form_of, head_files
from selfspec.export.model_folders import FolderExporter, save_head
from selfspec.export.weights import target_of
from selfspec.models.families import base_model

SPECULATORS = "0.9.0"
_NGRAM = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}


class Vllm(FolderExporter):
    """Exporter for vLLM."""

    name, title = "vllm", "vLLM"
    maps_tokens = True
    read = f"vLLM's vllm/config/speculative.py at 002e77c (2026) and its models' loaders, and speculators {SPECULATORS}"
    tried = (
        "not run by vLLM here, which needs a GPU; heads are read back by this project's own reader, and speculators' "
        "configuration by that package's parser where it is installed"
    )

    def plan_lookup(self, job: ExportJob, *, answers: bool) -> ExportPlan:
        """Return the plan for n-grams, or with `answers` for suffix decoding."""
        description = "suffixes of prompt, output and earlier answers" if answers else "n-grams of prompt and output"
        return ExportPlan(description, partial(self.serve_lookup, job, answers=answers))

    def plan_head(self, job: ExportJob, part: PartFile, places: int) -> ExportPlan:
        """Return the plan for a head of any published form."""
        form = form_of(part)
        if form == "eagle" and "layer.fc.bias" in part.tensors:
            raise self.refused("an EAGLE head with a bias in fc", "an EAGLE-3 head, by selfspec convert")
        files = head_files(part, job.llm.runtime)
        return ExportPlan(f"a head of the form {form}", partial(_head, job, files), most=places, limitations=files.lost)

    def serve_lookup(self, job: ExportJob, folder: Path, tokens: int, *, answers: bool = False) -> ExportResult:
        """Write the configuration for drafts by lookup of n-grams or suffixes; return the command that serves them."""
        method = {"method": "suffix"} if answers else {"method": "ngram", **_NGRAM}
        notes = ("Suffix decoding needs the package arctic-inference.",) if answers else ()
        return _written(job, folder, {**method, "num_speculative_tokens": tokens}, *notes)

    def serve_draft(
        self, job: ExportJob, folder: Path, tokens: int, *, quantised: bool, other_tokens: bool
    ) -> ExportResult:
        """Write the configuration for drafts by the draft model; return the command that serves them."""
        config = {"method": "draft_model", "model": str(job.out / "draft"), "num_speculative_tokens": tokens}
        quantization = {"quantization": self.quantises} if quantised else {}
        vocabulary = {"use_heterogeneous_vocab": True} if other_tokens else {}
        return _written(job, folder, config | quantization | vocabulary)


def _written(
    job: ExportJob, folder: Path, config: dict[str, Any], *notes: str, target: str | None = None
) -> ExportResult:
    """Write `config` as `speculative_config.json`; return the command that serves the target with it.

    `target`: its name for the engine, if `target_of` has been called.
    """
    text = json.dumps(config, indent=2)
    (folder / "speculative_config.json").write_text(text + "\n", encoding="utf-8")
    target = target or target_of(job.llm, folder, job.out)
    place = quote(str(job.out / "speculative_config.json"))
    return ExportResult((("serve", f'vllm serve {quote(target)} --speculative-config "$(cat {place})"'),), notes)


def _head(job: ExportJob, files: HeadFiles, folder: Path, tokens: int) -> ExportResult:
    config = dict(files.config)
    tensors = dict(files.tensors)
    notes, target = tuple[str, ...](), target_of(job.llm, folder, job.out)
    if files.form == "eagle3":
        config = speculators_config(job, files, tokens, target)
        notes = ("`head` is in `speculators`' format: `vllm serve head` alone loads the target, too.",)
    save_head(folder / "head", config, tensors)
    method = {"method": files.form, "model": str(job.out / "head"), "num_speculative_tokens": tokens}
    return _written(job, folder, method, *notes, target=target)


def speculators_config(job: ExportJob, files: HeadFiles, tokens: int, target: str) -> dict[str, Any]:
    """Return an EAGLE-3 head's configuration in the format of `speculators`; `target`: the model's name there."""
    own = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "architectures")
    layer = {name: value for name, value in files.config.items() if name not in (*own, "torch_dtype")}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {"name_or_path": target, "architectures": [type(base_model(job.llm.model)).__name__]}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": files.config["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": files.config["eagle_aux_hidden_state_layer_ids"],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "torch_dtype": "bfloat16",
    }
