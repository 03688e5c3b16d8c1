"""Export to SGLang: the flags of its server, draft models as folders, and EAGLE heads in SGLang's format."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from shlex import join
from typing import Any

import torch

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
from selfspec.export.head_export import INSTEAD, HeadFiles, head_files
from selfspec.export.vllm import quantization_limitation, save_head
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
from selfspec.types.draft_path import DraftPath

_ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3"}
_ARCHITECTURES = {"eagle": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}


class Sglang:
    """Exporter for SGLang."""

    name = "sglang"
    read = "sglang 0.5.23: its flags of speculative decoding, and the loaders of its EAGLE models"
    tried = "not run by SGLang here, which needs a GPU; heads are read back by this project's own reader"

    def plan_export(self, job: ExportJob) -> ExportPlan:
        """Return the plan of an export to SGLang; raises `SelfspecError` for drafts that SGLang cannot run."""
        match job.drafts:
            case LookupDraft(answers):
                lost = ("earlier answers of other runs: SGLang starts with an empty n-gram cache",) if answers else ()
                return ExportPlan("n-grams of prompts and outputs", partial(_prompt_lookup, job), limitations=lost)
            case Sublayers(path):
                return _sublayers(job, job.drafts, path)
            case DraftModel(spec):
                lost = (quantization_limitation(spec.bits),) if spec.bits else ()
                return ExportPlan(f"the model {spec.model}", partial(_another, job, job.drafts), limitations=lost)
            case TrainedHead(part, places):
                return self._head(job, head_files(part, job.llm.runtime), places)
            case UnsupportedDraft(kind, instead):
                raise refused(self.name, f"drafts of kind '{kind}'", instead)

    def _head(self, job: ExportJob, files: HeadFiles, places: int) -> ExportPlan:
        if files.form not in _ALGORITHMS:
            raise refused(self.name, f"a head of the form {files.form}", "EAGLE or EAGLE-3, by selfspec convert")
        if files.form == "eagle3" and max(files.layers) >= job.llm.identity.layers:
            raise refused(self.name, "a head that reads the output of the last layer", INSTEAD)
        return ExportPlan(f"a head of the form {files.form}", partial(_write_head, job, files), most=places)


def _served(job: ExportJob, folder: Path, algorithm: str, *flags: str, notes: tuple[str, ...] = ()) -> ExportResult:
    target, _ = target_of(job.llm, folder, job.out)
    command = ["python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", algorithm]
    (folder / "launch.sh").write_text(f'exec {join([*command, *flags])} "$@"\n', encoding="utf-8")
    return ExportResult((("serve", join([*command, *flags])),), notes)


def _chain(tokens: int) -> tuple[str, ...]:
    """Return the flags for drafts of `tokens` tokens in a sequence, not a tree."""
    steps, wide = "--speculative-num-steps", "--speculative-eagle-topk"
    return (steps, str(tokens), wide, "1", "--speculative-num-draft-tokens", str(tokens + 1))


def _prompt_lookup(job: ExportJob, folder: Path, tokens: int) -> ExportResult:
    flags = ("--speculative-num-draft-tokens", str(tokens + 1), "--speculative-ngram-max-bfs-breadth", "1")
    return _served(job, folder, "NGRAM", *flags)


def _sublayers(job: ExportJob, drafts: Sublayers, path: DraftPath) -> ExportPlan:
    description, lost = describe_layers(path, job.llm.identity.layers)
    if not path.low_precision:
        check_shorter(job, drafts, "SGLang", "it could run instead: a set of whole layers, by selfspec search --kv own")
        return ExportPlan(description, partial(_layers, job, drafts), path=in_full(path), limitations=lost)
    lost = (*lost, quantization_limitation("int4" if len(path.int4) else "int8"))
    return ExportPlan(f"{description}, in fp8", partial(_layers, job, drafts), path=path, limitations=lost)


def _standalone(job: ExportJob, folder: Path, tokens: int, *, few: bool) -> ExportResult:
    flags = ("--speculative-draft-model-path", str(job.out / "draft"), *_chain(tokens))
    return _served(
        job, folder, "STANDALONE", *flags, *(("--speculative-draft-model-quantization", "fp8") if few else ())
    )


def _layers(job: ExportJob, drafts: Sublayers, folder: Path, tokens: int) -> ExportResult:
    layers_folder(job, drafts, folder / "draft")
    return _standalone(job, folder, tokens, few=drafts.path.low_precision)


def _another(job: ExportJob, drafts: DraftModel, folder: Path, tokens: int) -> ExportResult:
    model, tokenizer = other_model(job, drafts)
    if not same_tokens(job, model):
        raise refused(
            "sglang", "a draft model with another tokenizer", "a draft model that selfspec train distill makes"
        )
    model_folder(model, tokenizer, folder / "draft")
    return _standalone(job, folder, tokens, few=drafts.spec.bits is not None)


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
