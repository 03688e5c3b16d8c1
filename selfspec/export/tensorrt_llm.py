"""Export to TensorRT-LLM: a YAML file with its `speculative_config`, draft models and EAGLE-3 heads as folders.

The YAML file is for the PyTorch backend.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from selfspec.draft_modules.module_files import PartFile
from selfspec.export.exporter import ExportJob, ExportPlan, ExportResult
from selfspec.export.head_export import HeadFiles, form_of, head_files
from selfspec.export.model_folders import FolderExporter, save_head
from selfspec.export.weights import target_of

_NGRAM = 4  # longest n-gram that is looked up, in tokens


class TensorRtLlm(FolderExporter):
    """Exporter for TensorRT-LLM."""

    name, title = "tensorrt-llm", "TensorRT-LLM"
    quantises = None
    forgets = "earlier answers of other runs: its n-gram pool is empty at first"
    read = "TensorRT-LLM's llm_args.py and docs/source/features/speculative-decoding.md at 04c8822 (2026)"
    tried = "not run by TensorRT-LLM here, which needs a GPU; heads are read back by this project's own reader"

    def plan_head(self, job: ExportJob, part: PartFile, places: int) -> ExportPlan:
        """Return the plan for an EAGLE-3 head."""
        if (form := form_of(part)) != "eagle3":
            raise self.refused(f"a head of the form {form}", "an EAGLE-3 head, by selfspec convert")
        return ExportPlan("an EAGLE-3 head", partial(_head, job, head_files(part, job.llm.runtime)), most=places)

    def serve_lookup(self, job: ExportJob, folder: Path, tokens: int) -> ExportResult:
        """Write the configuration file for drafts by lookup of n-grams; return the command that serves them."""
        sizes = {"max_draft_len": tokens, "max_matching_ngram_size": _NGRAM}
        return _served(job, folder, {"decoding_type": "NGram", **sizes, "is_public_pool": True}, overlap=False)

    def serve_draft(
        self, job: ExportJob, folder: Path, tokens: int, *, quantised: bool, other_tokens: bool
    ) -> ExportResult:
        """Write the configuration file for drafts by the draft model; return the command that serves them."""
        draft = str(job.out / "draft")
        config = {"decoding_type": "Draft_Target", "max_draft_len": tokens, "speculative_model": draft}
        return _served(job, folder, config, overlap=False)


def _served(job: ExportJob, folder: Path, config: dict[str, Any], *, overlap: bool = True) -> ExportResult:
    settings: dict[str, Any] = {"speculative_config": config}
    if not overlap:
        settings = {"disable_overlap_scheduler": True, **settings}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    target = target_of(job.llm, folder, job.out)
    return ExportResult((("serve", f"trtllm-serve {quote(target)} --config {quote(str(job.out / 'config.yaml'))}"),))


def _head(job: ExportJob, files: HeadFiles, folder: Path, tokens: int) -> ExportResult:
    save_head(folder / "head", dict(files.config), dict(files.tensors))
    left = [layer - 1 for layer in files.layers]  # TensorRT-LLM numbers a hidden state by the layer that outputs it
    config = {"decoding_type": "Eagle", "max_draft_len": tokens, "speculative_model": str(job.out / "head")}
    return _served(job, folder, {**config, "eagle3_layers_to_capture": left})
