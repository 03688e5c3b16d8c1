"""Export to `transformers`: a draft model for `assistant_model`, a config for prompt lookup, `custom_generate`."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

from transformers import GenerationConfig

from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.module_files import PartFile
from selfspec.export.exporter import Exporter, ExportJob, ExportPlan, ExportResult
from selfspec.export.weights import (
    describe_layers,
    in_full,
    layers_folder,
    model_folder,
    other_model,
    same_tokens,
    target_of,
)
from selfspec.integrations.custom_generate import hf
from selfspec.profile.draft_spec import LookupSpec, ProposerSpec
from selfspec.profile.drafter_specs import ModelSpec
from selfspec.profile.schema import Profile
from selfspec.types.draft_path import DraftPath

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_LOAD = """\
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

model, tokenizer = (of.from_pretrained({target!r}) for of in (AutoModelForCausalLM, AutoTokenizer))
inputs = tokenizer("PROMPT", return_tensors="pt")
"""


class Transformers(Exporter):
    """Exporter for the generate method of `transformers`.

    Drafts that `generate` lacks are run by selfspec in `custom_generate`.
    """

    name = "hf"
    read = "transformers 5.23"
    tried = "loaded by from_pretrained and run by transformers' own generate in this project's tests"

    def plan_lookup(self, job: ExportJob, *, answers: bool) -> ExportPlan:
        """Return the plan for prompt lookup."""
        return ExportPlan("n-grams of prompt and output", partial(_prompt_lookup, job))

    def plan_layers(self, job: ExportJob, path: DraftPath) -> ExportPlan:
        """Return the plan for the layers that a path keeps, as the assistant model."""
        description, lost = describe_layers(path, job.llm.identity.layers)
        if not path.runs(job.llm.identity.layers):
            return _itself(job, note=_NO_MODEL)
        if path.low_precision:
            lost = (*lost, "the draft model's quantised weights: it runs unquantised")
        return ExportPlan(description, partial(_sublayers, job, path), path=in_full(path), limitations=lost)

    def plan_model(self, job: ExportJob, spec: ModelSpec) -> ExportPlan:
        """Return the plan for a separate assistant model."""
        lost = (f"{spec.bits} weights: the draft model runs unquantised",) if spec.bits else ()
        return ExportPlan(f"the model {spec.model}", partial(_another, job, spec), limitations=lost)

    def plan_head(self, job: ExportJob, part: PartFile, places: int) -> ExportPlan:
        """Raise `SelfspecError`."""
        raise SelfspecError(
            f"transformers' generate cannot run a trained head ({part.kind}); it could run instead: "
            "selfspec.hf(profile=...) with this profile"
        )

    def plan_other(self, job: ExportJob, kind: str, instead: str) -> ExportPlan:
        """Return the plan in which `custom_generate` runs the profile; raises `SelfspecError` if it needs files."""
        return _itself(job)


_NO_MODEL = "No layer is skipped whole, so an unquantised draft model would save nothing, and none is written."


def _itself(job: ExportJob, *, note: str | None = None) -> ExportPlan:
    """Return the plan in which `custom_generate` runs the profile by selfspec; `note`: a note for the README.

    Raises `SelfspecError` for a profile that needs other files, which generate.py cannot hold.
    """
    below = getattr(job.profile.draft, "below", None)
    int4 = getattr(job.profile.draft, "int4_weights", None)
    if job.profile.draft.may_name_files or len(job.profile.parts) > (below is not None) + (int4 is not None):
        raise SelfspecError("the profile needs files beside it, which generate.py cannot hold; expected one without")
    spec = job.profile.draft
    lost = [
        f"proposers of kind '{proposer.kind}'"
        for proposer in getattr(spec, "proposers", None) or ()
        if proposer.kind != "lookup"
    ]
    if below is not None:
        lost.append("the trained head below the path")
    if int4 is not None:
        lost.append("the int4 weights of its file: weights are rounded to nearest")

    def write(folder: Path, _tokens: int) -> ExportResult:
        return ExportResult((_custom(job, folder),), () if note is None else (note,))

    return ExportPlan(f"{spec.summary}, by selfspec in custom_generate", write, limitations=tuple(lost), itself=True)


def _own(profile: Profile) -> Profile:
    """Return the profile as generate.py can hold it: without draft heads, files of weights, stores and answers."""
    spec = profile.draft
    known = type(spec).model_fields
    proposers = [proposer for proposer in getattr(spec, "proposers", None) or () if proposer.kind == "lookup"]
    update: dict[str, object] = {"below": None, "int4_weights": None, "proposers": proposers or None}
    if isinstance(spec, LookupSpec):
        update["proposers"] = proposers or [ProposerSpec()]
    changed = spec.model_copy(update={name: value for name, value in update.items() if name in known})
    return profile.model_copy(update={"draft": changed, "parts": {}})


def _custom(job: ExportJob, folder: Path) -> tuple[str, str]:
    """Write the folder `custom_generate`; return a description for the README and the Python call that uses it."""
    hf(profile=_own(job.profile)).save(folder)
    call = f"model.generate(**inputs, custom_generate={str(job.out)!r}, trust_remote_code=True)"
    return "the profile itself, where selfspec is installed", call


def _code(job: ExportJob, folder: Path, call: str) -> str:
    target = target_of(job.llm, folder, job.out)
    return _LOAD.format(target=target) + call


def _savable(config: GenerationConfig) -> GenerationConfig:
    """Return a copy without what concerns sampling alone, if it does not sample: a changed one is refused with that."""
    config = copy.deepcopy(config)
    for name in () if config.do_sample else SAMPLING:
        if hasattr(config, name):
            setattr(config, name, None)
    return config


def _settings(job: ExportJob, tokens: int) -> GenerationConfig:
    """Return a draft model's generation configuration, with a constant draft length of `tokens`."""
    config = _savable(job.llm.model.generation_config)
    config.num_assistant_tokens = tokens
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    return config


def _assisted(job: ExportJob, folder: Path, *, more: str = "") -> tuple[str, str]:
    load = f"draft = AutoModelForCausalLM.from_pretrained({str(job.out / 'draft')!r})\n"
    call = f"ids = model.generate(**inputs, max_new_tokens=128, do_sample=False, assistant_model=draft{more})"
    return "assisted generation", _code(job, folder, load + call)


def _prompt_lookup(job: ExportJob, folder: Path, tokens: int) -> ExportResult:
    config = _savable(job.llm.model.generation_config)
    config.prompt_lookup_num_tokens, config.max_matching_ngram_size = tokens, 3
    config.save_pretrained(folder)
    load = f"config = GenerationConfig.from_pretrained({str(job.out)!r})\n"
    lookup = ("prompt lookup", _code(job, folder, load + "ids = model.generate(**inputs, generation_config=config)"))
    return ExportResult((lookup, _custom(job, folder)))


def _sublayers(job: ExportJob, path: DraftPath, folder: Path, tokens: int) -> ExportResult:
    layers_folder(job, path, folder / "draft", _settings(job, tokens))
    return ExportResult((_assisted(job, folder), _custom(job, folder)))


def _another(job: ExportJob, spec: ModelSpec, folder: Path, tokens: int) -> ExportResult:
    model, tokenizer = other_model(job, spec)
    model_folder(model, tokenizer, folder / "draft", _settings(job, tokens))
    if same_tokens(job, model):
        return ExportResult((_assisted(job, folder),))
    draft = repr(str(job.out / "draft"))
    more = f", tokenizer=tokenizer, assistant_tokenizer=AutoTokenizer.from_pretrained({draft})"
    return ExportResult((_assisted(job, folder, more=more),), ("The draft model has a different tokenizer.",))
