"""Export to SGLang: the flags of its server, draft models as folders, and EAGLE heads in SGLang's format."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from shlex import join
from typing import Any

import torch

from selfspec.draft_modules.module_files import PartFile
from selfspec.export.exporter import ExportJob, ExportPlan, ExportResult
from selfspec.export.head_export import INSTEAD, HeadFiles, head_files
from selfspec.export.model_folders import FolderExporter, save_head
from selfspec.export.weights import target_of

_ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3"}
_ARCHITECTURES = {"eagle": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}


class Sglang(FolderExporter):
    """Exporter for SGLang."""

    name, title = "sglang", "SGLang"
    forgets = "earlier answers of other runs: SGLang starts with an empty n-gram cache"
    read = "sglang 0.5.23: its flags of speculative decoding, and the loaders of its EAGLE models"
    tried = "not run by SGLang here, which needs a GPU; heads are read back by this project's own reader"

    def plan_head(self, job: ExportJob, part: PartFile, places: int) -> ExportPlan:
        """Return the plan for an EAGLE or EAGLE-3 head."""
        files = head_files(part, job.llm.runtime)
        if files.form not in _ALGORITHMS:
            raise self.refused(f"a head of the form {files.form}", "EAGLE or EAGLE-3, by selfspec convert")
        if files.form == "eagle3" and max(files.layers) >= job.llm.identity.layers:
            raise self.refused("a head that reads the output of the last layer", INSTEAD)
        return ExportPlan(f"a head of the form {files.form}", partial(_write_head, job, files), most=places)

    def serve_lookup(self, job: ExportJob, folder: Path, tokens: int) -> ExportResult:
        """Write the server's flags for drafts by lookup of n-grams; return the command that serves them."""
        flags = ("--speculative-num-draft-tokens", str(tokens + 1), "--speculative-ngram-max-bfs-breadth", "1")
        return _served(job, folder, "NGRAM", *flags)

    def serve_draft(
        self, job: ExportJob, folder: Path, tokens: int, *, quantised: bool, other_tokens: bool
    ) -> ExportResult:
        """Write the server's flags for drafts by the draft model; return the command that serves them."""
        few = ("--speculative-draft-model-quantization", "fp8") if quantised else ()
        flags = ("--speculative-draft-model-path", str(job.out / "draft"), *_chain(tokens), *few)
        return _served(job, folder, "STANDALONE", *flags)


def _served(job: ExportJob, folder: Path, algorithm: str, *flags: str) -> ExportResult:
    target = target_of(job.llm, folder, job.out)
    command = ["python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", algorithm]
    (folder / "launch.sh").write_text(f'exec {join([*command, *flags])} "$@"\n', encoding="utf-8")
    return ExportResult((("serve", join([*command, *flags])),))


def _chain(tokens: int) -> tuple[str, ...]:
    """Return the flags for drafts of `tokens` tokens in a sequence, not a tree."""
    steps, wide = "--speculative-num-steps", "--speculative-eagle-topk"
    return (steps, str(tokens), wide, "1", "--speculative-num-draft-tokens", str(tokens + 1))


def _write_head(job: ExportJob, files: HeadFiles, folder: Path, tokens: int) -> ExportResult:
    config: dict[str, Any] = {**files.config, "architectures": [_ARCHITECTURES[files.form]]}
    tensors = dict(files.tensors)
    if files.form == "eagle3":  # SGLang numbers a hidden state by the layer that outputs it
        left = [layer - 1 for layer in files.layers]
        config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": left}
    elif "fc.bias" not in tensors:
        tensors["fc.bias"] = torch.zeros(len(tensors["fc.weight"]), dtype=tensors["fc.weight"].dtype)
    save_head(folder / "head", config, tensors)
    flags = ("--speculative-draft-model-path", str(job.out / "head"), *_chain(tokens))
    return _served(job, folder, _ALGORITHMS[files.form], *flags)
