"""Export to TensorRT-LLM: a YAML file with its `speculative_config`, draft models and EAGLE-3 heads as folders.

The YAML file is for the PyTorch backend.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from selfspec.export.exporter import (
    DraftModel,
    ExportJob,
    ExportPlan,
    ExportResult,
    LookupDraft,
    Sublayers,
    TrainedHead,
    UnsupportedDraft,
    refused,
)
from selfspec.export.head_export import HeadFiles, form_of, head_files
from selfspec.export.vllm import save_head
from selfspec.export.weights import (
    check_shorter,
    describe_layers,
    in_full,
    layers_folder,
    model_folder,
    other_model,
    same_tokens,
    target_of,
)

_NGRAM = 4  # longest n-gram that is looked up, in tokens


class TensorRtLlm:
    """Exporter for TensorRT-LLM."""

    name = "tensorrt-llm"
    read = "TensorRT-LLM's llm_args.py and docs/source/features/speculative-decoding.md at 04c8822 (2026)"
    tried = "not run by TensorRT-LLM here, which needs a GPU; heads are read back by this project's own reader"

    def plan_export(self, job: ExportJob) -> ExportPlan:
        """Return the plan of an export to TensorRT-LLM; raises `SelfspecError` for drafts that it cannot run."""
        match job.drafts:
            case LookupDraft(answers):
                empty = ("earlier answers of other runs: its n-gram pool is empty at first",) if answers else ()
                return ExportPlan("n-grams of prompts and outputs", partial(_prompt_lookup, job), limitations=empty)
            case Sublayers(path):
                description, lost = describe_layers(path, job.llm.identity.layers)
                check_shorter(
                    job,
                    job.drafts,
                    "TensorRT-LLM",
                    "it could run instead: a set of whole layers, by selfspec search --kv own",
                )
                if path.low_precision:
                    lost = (*lost, "quantised weights: the draft model runs in its own dtype")
                return ExportPlan(description, partial(_layers, job, job.drafts), path=in_full(path), limitations=lost)
            case DraftModel(spec):
                few = ("quantised weights: the draft model runs in its own dtype",) if spec.bits else ()
                return ExportPlan(f"the model {spec.model}", partial(_another, job, job.drafts), limitations=few)
            case TrainedHead(part, places):
                if (form := form_of(part)) != "eagle3":
                    raise refused(self.name, f"a head of the form {form}", "an EAGLE-3 head, by selfspec convert")
                return ExportPlan(
                    "an EAGLE-3 head", partial(_head, job, head_files(part, job.llm.runtime)), most=places
                )
            case UnsupportedDraft(kind, instead):
                raise refused(self.name, f"drafts of kind '{kind}'", instead)


def _served(job: ExportJob, folder: Path, config: dict[str, Any], *, overlap: bool = True) -> ExportResult:
    settings: dict[str, Any] = {"speculative_config": config}
    if not overlap:
        settings = {"disable_overlap_scheduler": True, **settings}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    target, _ = target_of(job.llm, folder, job.out)
    return ExportResult((("serve", f"trtllm-serve {quote(target)} --config {quote(str(job.out / 'config.yaml'))}"),))


def _prompt_lookup(job: ExportJob, folder: Path, tokens: int) -> ExportResult:
    config = {
        "decoding_type": "NGram",
        "max_draft_len": tokens,
        "max_matching_ngram_size": _NGRAM,
        "is_public_pool": True,
    }
    return _served(job, folder, config, overlap=False)


def _draft_model(job: ExportJob, tokens: int) -> dict[str, Any]:
    return {"decoding_type": "Draft_Target", "max_draft_len": tokens, "speculative_model": str(job.out / "draft")}


def _layers(job: ExportJob, drafts: Sublayers, folder: Path, tokens: int) -> ExportResult:
    layers_folder(job, drafts, folder / "draft")
    return _served(job, folder, _draft_model(job, tokens), overlap=False)


def _another(job: ExportJob, drafts: DraftModel, folder: Path, tokens: int) -> ExportResult:
    model, tokenizer = other_model(job, drafts)
    if not same_tokens(job, model):
        raise refused(
            "tensorrt-llm", "a draft model with another tokenizer", "a draft model made by selfspec train distill"
        )
    model_folder(model, tokenizer, folder / "draft")
    return _served(job, folder, _draft_model(job, tokens), overlap=False)


def _head(job: ExportJob, files: HeadFiles, folder: Path, tokens: int) -> ExportResult:
    save_head(folder / "head", dict(files.config), dict(files.tensors))
    left = [layer - 1 for layer in files.layers]  # TensorRT-LLM numbers a hidden state by the layer that outputs it
    config = {"decoding_type": "Eagle", "max_draft_len": tokens, "speculative_model": str(job.out / "head")}
    return _served(job, folder, {**config, "eagle3_layers_to_capture": left})
