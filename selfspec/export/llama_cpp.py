"""Export to llama.cpp: GGUF files of target and draft model, and the commands of its speculative programs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from shlex import quote
from typing import Any

from gguf import GGMLQuantizationType as Type

from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.module_files import PartFile
from selfspec.export.exporter import Exporter, ExportJob, ExportPlan, ExportResult
from selfspec.export.gguf_files import fake_quantize, type_of, write_eagle_3, write_model
from selfspec.export.gguf_tokenizer import Key, tokenizer_keys, tokenizer_keys_of_file
from selfspec.export.head_export import INSTEAD, form_of, head_files
from selfspec.export.weights import (
    Weights,
    describe_layers,
    model_of,
    other_model,
    path_weights,
    same_tokens,
    weights_of,
)
from selfspec.llm.llm import LLM
from selfspec.models.loading import gguf_file
from selfspec.profile.drafter_specs import ModelSpec
from selfspec.types.draft_path import DraftPath, Mode

NGRAM = 2  # length in tokens of the n-gram that prompt lookup matches
_LOW: dict[Mode, Type] = {"int8": Type.Q8_0, "int4": Type.Q4_0}
_SCALES = {
    Type.Q8_0: "int8 becomes Q8_0: a scale for 32 weights instead of a scale for a row",
    Type.Q4_0: "int4 becomes Q4_0: a scale for 32 weights instead of a scale and a zero point for 64",
}


Load = Callable[[], tuple[Any, Any]]


class LlamaCpp(Exporter):
    """Exporter for llama.cpp."""

    name = "llama.cpp"
    read = "llama.cpp at 0c1e570 (October 2026), as vendored by llama-cpp-python 0.3.36, and gguf 0.19"
    tried = "such files were run here by llama-speculative-simple of that version: see the project's docs/export.md"

    def plan_lookup(self, job: ExportJob, *, answers: bool) -> ExportPlan:
        """Return the plan for llama.cpp's n-grams."""
        lost = ("earlier answers: llama.cpp's ngram-cache keeps its own",) if answers else ()
        return ExportPlan("n-grams of prompt and output", partial(_prompt_lookup, job), limitations=lost)

    def plan_layers(self, job: ExportJob, path: DraftPath) -> ExportPlan:
        """Return the plan for the layers that a path keeps, as a GGUF file with the path's types."""
        description, lost = describe_layers(path, job.llm.identity.layers)
        if not path.cheaper or (not path.low_precision and not path.runs(job.llm.identity.layers)):
            raise SelfspecError(
                "no layer is skipped whole and none runs quantised, so llama.cpp's draft model would take as long as "
                "decoding; it could run instead: a path with --modes full,int8,skip, or whole layers by --kv own"
            )
        scales = tuple(
            _SCALES[_LOW[mode]] for mode in ("int8", "int4") if path.head == mode or len(getattr(path, mode))
        )
        few = f", {path.summary}" if path.low_precision else ""
        draft = partial(_as_written, job, path) if path.low_precision else None
        return ExportPlan(
            f"{description}{few}", partial(_path, job, path), path=path, draft=draft, limitations=(*lost, *scales)
        )

    def plan_model(self, job: ExportJob, spec: ModelSpec) -> ExportPlan:
        """Return the plan for a separate draft model, as a GGUF file."""
        bits = f" in {spec.bits}" if spec.bits else ""
        load = cache(partial(self._load, job, spec))
        draft = partial(_other_as_written, job, spec, load)
        return ExportPlan(f"the model {spec.model}{bits}", partial(_another, job, spec, load), draft=draft)

    def plan_head(self, job: ExportJob, part: PartFile, places: int) -> ExportPlan:
        """Return the plan for an EAGLE-3 head, as a GGUF file."""
        if (form := form_of(part)) != "eagle3":
            raise self.refused(f"a head of the form {form}", "an EAGLE-3 head, by selfspec convert")
        if max(part.settings["layers"]) >= job.llm.identity.layers:  # llama.cpp's hidden states differ there
            raise self.refused("a head that reads the output of the last layer", INSTEAD)
        return ExportPlan("an EAGLE-3 head", partial(_eagle_3, job, part), most=places)

    def _load(self, job: ExportJob, spec: ModelSpec) -> tuple[Any, Any]:
        """Return the draft model and its tokenizer; raises `SelfspecError` for another vocabulary size."""
        model, tokenizer = other_model(job, spec)
        if not same_tokens(job, model):
            raise self.refused("a draft model with another tokenizer", "a draft model made by selfspec train distill")
        return model, tokenizer


def words(llm: LLM) -> list[Key]:
    """Return the tokenizer as GGUF keys: copied from the model's GGUF file, else made from its tokenizer.

    Raises `SelfspecError` for a tokenizer that cannot be written as GGUF.
    """
    file = gguf_file(llm.name)
    if file is not None:
        return tokenizer_keys_of_file(file)
    return tokenizer_keys(llm.tokenizer, llm.model.generation_config, llm.identity.vocabulary or 0)


def _target(job: ExportJob, folder: Path, keys: list[Key]) -> Weights:
    weights = weights_of(job.llm.model)
    kind = type_of(job.type_name, job.llm.runtime.dtype)
    context = job.llm.runtime.skeleton.context
    write_model(folder / "target.gguf", weights, keys, lambda module: kind, context=context, name=job.llm.name)
    return weights


def _prompt_lookup(job: ExportJob, folder: Path, tokens: int) -> ExportResult:
    _target(job, folder, words(job.llm))
    target = quote(str(job.out / "target.gguf"))
    simple = f"--spec-type ngram-simple --spec-ngram-simple-size-n {NGRAM} --spec-ngram-simple-size-m {tokens}"
    return ExportResult(
        (
            ("serve", f"llama-server -m {target} {simple}"),
            (
                "one prompt, with a cache of n-grams",
                f"llama-lookup -m {target} --spec-draft-n-max {tokens} -p 'PROMPT'",
            ),
        )
    )


def _commands(job: ExportJob, tokens: int, kind: str) -> tuple[tuple[str, str], ...]:
    files = f"-m {quote(str(job.out / 'target.gguf'))} -md {quote(str(job.out / 'draft.gguf'))}"
    how = f"{files} --spec-type {kind} --spec-draft-n-max {tokens}"
    return (
        ("one prompt, greedy, with its acceptance", f"llama-speculative-simple {how} --temp 0 -n 128 -p 'PROMPT'"),
        ("serve", f"llama-server {how}"),
    )


_OLDER = "llama.cpp before 2026 has --draft-max instead of --spec-draft-n-max, and no --spec-type."


def draft_types(path: DraftPath, weights: Weights, full: Type, *, layers: int) -> dict[str, Type]:
    """Return the GGUF type of each module by name, such that the model `weights` runs as the draft path says.

    `layers`: the number of the target's layers. `full`: the type of matrices that are not quantised. Modules that the
    result does not list have type `full`; modules set to zero have the smallest type.
    """
    modes, types = path.modes(layers), dict[str, Type]()
    for name in weights.tensors:
        module = name.rpartition(".")[0]
        if module in weights.zeroed:
            types[module] = Type.Q4_0
        elif module.startswith("model.layers.") and module.endswith("_proj"):
            layer = weights.layers[int(module.split(".")[2])]
            types[module] = _LOW.get(modes[layer if ".self_attn." in module else layers + layer], full)
    if path.head != "full":
        types["lm_head"] = _LOW[path.head]
    return types


def _drafting(job: ExportJob, path: DraftPath) -> tuple[Weights, Callable[[str], Type]]:
    """Return the weights of the draft model for a path, and a function from a module's name to its GGUF type."""
    weights, full = path_weights(weights_of(job.llm.model), path), type_of(job.type_name, job.llm.runtime.dtype)
    if path.head != "full" and "lm_head.weight" not in weights.tensors:  # tied: a quantised head is a separate tensor
        config = copy.deepcopy(weights.config)
        config.tie_word_embeddings = False
        tensors = {**weights.tensors, "lm_head.weight": weights.tensors["model.embed_tokens.weight"]}
        weights = Weights(config, tensors, weights.layers, weights.zeroed)
    kinds = draft_types(path, weights, full, layers=job.llm.identity.layers)
    return weights, lambda module: kinds.get(module, full)


def _as_written(job: ExportJob, path: DraftPath) -> Any:
    """Return the draft model for a path with the weights as the GGUF file stores them: quantised and dequantised."""
    weights, types = _drafting(job, path)
    return model_of(fake_quantize(weights, types))


def _path(job: ExportJob, path: DraftPath, folder: Path, tokens: int) -> ExportResult:
    keys = words(job.llm)
    _target(job, folder, keys)
    weights, types = _drafting(job, path)
    context = job.llm.runtime.skeleton.context
    f16_modules = write_model(folder / "draft.gguf", weights, keys, types, context=context, name="draft")
    notes = [_OLDER]
    if f16_modules:
        notes.append(f"{len(f16_modules)} matrices are stored as F16, because their row length is not divisible by 32.")
    return ExportResult(_commands(job, tokens, "draft-simple"), tuple(notes))


def _other(job: ExportJob, spec: ModelSpec, load: Load) -> tuple[Weights, Type]:
    """Return the weights of a separate draft model, and their GGUF type."""
    own = weights_of(load()[0])
    dtype = own.tensors["model.embed_tokens.weight"].dtype
    return own, type_of(job.type_name, dtype) if spec.bits is None else _LOW[spec.bits]


def _other_as_written(job: ExportJob, spec: ModelSpec, load: Load) -> Any:
    own, kind = _other(job, spec, load)
    return model_of(fake_quantize(own, lambda module: kind))


def _another(job: ExportJob, spec: ModelSpec, load: Load, folder: Path, tokens: int) -> ExportResult:
    own, kind = _other(job, spec, load)
    (model, tokenizer), file = load(), gguf_file(spec.model)
    _target(job, folder, words(job.llm))
    keys = (
        tokenizer_keys(tokenizer, model.generation_config, model.config.vocab_size)
        if file is None
        else tokenizer_keys_of_file(file)
    )
    context = int(model.config.max_position_embeddings)
    write_model(folder / "draft.gguf", own, keys, lambda module: kind, context=context, name="draft")
    return ExportResult(_commands(job, tokens, "draft-simple"), (_OLDER,))


def _eagle_3(job: ExportJob, part: PartFile, folder: Path, tokens: int) -> ExportResult:
    head, keys = head_files(part, job.llm.runtime), words(job.llm)
    _target(job, folder, keys)
    write_eagle_3(folder / "draft.gguf", head, keys, width=job.llm.runtime.skeleton.sizes.hidden)
    return ExportResult(_commands(job, tokens, "draft-eagle3"))
