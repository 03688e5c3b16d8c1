"""Export to vLLM: a `--speculative-config`, draft models as folders, heads in vLLM's or in `speculators`' format."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from safetensors.torch import save_file

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

SPECULATORS = "0.9.0"
_ONLINE = "fp8"  # the type to which vLLM quantises weights on loading
_NGRAM = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}


class Vllm:
    """Exporter for vLLM."""

    name = "vllm"
    read = f"vLLM's vllm/config/speculative.py at 002e77c (2026) and its models' loaders, and speculators {SPECULATORS}"
    tried = (
        "not run by vLLM here, which needs a GPU; heads are read back by this project's own reader, and speculators' "
        "configuration by that package's parser where it is installed"
    )

    def plan_export(self, job: ExportJob) -> ExportPlan:
        """Return the plan of an export to vLLM; raises `SelfspecError` for drafts that vLLM cannot run."""
        match job.drafts:
            case LookupDraft(answers):
                description = (
                    "suffixes of prompt, output and earlier answers" if answers else "n-grams of prompt and output"
                )
                return ExportPlan(description, partial(_prompt_lookup, job, answers))
            case Sublayers(path):
                return _sublayers(job, job.drafts, path)
            case DraftModel(spec):
                lost = (quantization_limitation(spec.bits),) if spec.bits else ()
                return ExportPlan(f"the model {spec.model}", partial(_another, job, job.drafts), limitations=lost)
            case TrainedHead(part, places):
                form = form_of(part)
                if form == "eagle" and "layer.fc.bias" in part.tensors:
                    raise refused(self.name, "an EAGLE head with a bias in fc", "an EAGLE-3 head, by selfspec convert")
                files = head_files(part, job.llm.runtime)
                return ExportPlan(
                    f"a head of the form {form}", partial(_head, job, files), most=places, limitations=files.lost
                )
            case UnsupportedDraft(kind, instead):
                raise refused(self.name, f"drafts of kind '{kind}'", instead)


def quantization_limitation(bits: str | None) -> str:
    """Return the limitation for weights in int8 or int4: the engine quantises the draft model to fp8 instead."""
    num_bits = (bits or "few").removeprefix("int")
    return f"weights in {num_bits} bits: all weights of the draft model become {_ONLINE} (e4m3) when it is loaded"


def _written(job: ExportJob, folder: Path, config: dict[str, Any], *notes: str) -> ExportResult:
    """Write `config` as `speculative_config.json`, and the target if needed; return the command that serves them."""
    text = json.dumps(config, indent=2)
    (folder / "speculative_config.json").write_text(text + "\n", encoding="utf-8")
    target, _ = target_of(job.llm, folder, job.out)
    place = quote(str(job.out / "speculative_config.json"))
    return ExportResult((("serve", f'vllm serve {quote(target)} --speculative-config "$(cat {place})"'),), notes)


def _prompt_lookup(job: ExportJob, answers: bool, folder: Path, tokens: int) -> ExportResult:
    method = {"method": "suffix"} if answers else {"method": "ngram", **_NGRAM}
    notes = ("Suffix decoding needs the package arctic-inference.",) if answers else ()
    return _written(job, folder, {**method, "num_speculative_tokens": tokens}, *notes)


def _sublayers(job: ExportJob, drafts: Sublayers, path: DraftPath) -> ExportPlan:
    description, lost = describe_layers(path, job.llm.identity.layers)
    if not path.low_precision:
        check_shorter(job, drafts, "vLLM", "it could run instead: a set of whole layers, by selfspec search --kv own")
        return ExportPlan(description, partial(_layers, job, drafts), path=in_full(path), limitations=lost)
    lost = (*lost, quantization_limitation("int4" if len(path.int4) else "int8"))
    return ExportPlan(f"{description}, in {_ONLINE}", partial(_layers, job, drafts), path=path, limitations=lost)


def _layers(job: ExportJob, drafts: Sublayers, folder: Path, tokens: int) -> ExportResult:
    layers_folder(job, drafts, folder / "draft")
    few = {"quantization": _ONLINE} if drafts.path.low_precision else {}
    return _written(job, folder, _draft_model(job, tokens) | few)


def _draft_model(job: ExportJob, tokens: int) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(job.out / "draft"), "num_speculative_tokens": tokens}


def _another(job: ExportJob, drafts: DraftModel, folder: Path, tokens: int) -> ExportResult:
    model, tokenizer = other_model(job, drafts)
    model_folder(model, tokenizer, folder / "draft")
    config = _draft_model(job, tokens)
    if drafts.spec.bits is not None:
        config["quantization"] = _ONLINE
    if not same_tokens(job, model):
        config["use_heterogeneous_vocab"] = True
    return _written(job, folder, config)


def _head(job: ExportJob, files: HeadFiles, folder: Path, tokens: int) -> ExportResult:
    config = dict(files.config)
    tensors = dict(files.tensors)
    notes: tuple[str, ...] = ()
    if files.form == "eagle3":
        config = speculators_config(job, files, tokens)
        notes = ("`head` is in `speculators`' format: `vllm serve head` alone loads the target, too.",)
    save_head(folder / "head", config, tensors)
    method = {"method": files.form, "model": str(job.out / "head"), "num_speculative_tokens": tokens}
    return _written(job, folder, method, *notes)


def save_head(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Write the configuration and the weights of a draft head to a new folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def speculators_config(job: ExportJob, files: HeadFiles, tokens: int) -> dict[str, Any]:
    """Return an EAGLE-3 head's configuration in the format of `speculators`."""
    own = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "architectures")
    layer = {name: value for name, value in files.config.items() if name not in (*own, "torch_dtype")}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {"name_or_path": job.llm.name, "architectures": list(job.llm.model.config.architectures or [])}
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
