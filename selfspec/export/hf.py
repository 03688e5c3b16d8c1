"""transformers: a draft model for `assistant_model`, prompt lookup as a generation configuration, `custom_generate`."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

from transformers import GenerationConfig

from selfspec.basics.errors import SelfspecError
from selfspec.export.drafts import Another, Guesses, OnlyHere, Sublayers, TrainedHead
from selfspec.export.engine import Job, Offer, Written, refused
from selfspec.export.model_drafts import in_full, layers_folder, model_folder, other_model, said_of, same_tokens
from selfspec.export.weights import target_of
from selfspec.integrations.custom_generate import hf
from selfspec.profile.draft import GuessesSpec, ProposerSpec
from selfspec.profile.schema import Profile

_LOAD = """\
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

model, tokenizer = (of.from_pretrained({target!r}) for of in (AutoModelForCausalLM, AutoTokenizer))
inputs = tokenizer("PROMPT", return_tensors="pt")
"""


class Transformers:
    """`transformers`' own generate."""

    name = "hf"
    read = "transformers 5.23"
    tried = "loaded by from_pretrained and run by transformers' own generate in this project's tests"

    def offer(self, job: Job) -> Offer:
        """What it can run. Raises `SelfspecError`."""
        match job.drafts:
            case Guesses():
                return Offer("n-grams of prompt and output", partial(_guesses, job))
            case Sublayers(path):
                said, lost = said_of(path, job.llm.identity.layers)
                whole = bool(path.runs(job.llm.identity.layers))
                if path.low_precision:
                    lost = (*lost, "weights in few bits, of the draft model: it runs in its own dtype")
                said = said if whole else "the profile itself, by selfspec in custom_generate"
                return Offer(
                    said, partial(_sublayers, job, job.drafts), path=in_full(path) if whole else path, lost=lost
                )
            case Another(spec):
                lost = (f"its {spec.bits.removeprefix('int')} bits: it runs in its own dtype",) if spec.bits else ()
                return Offer(f"the model {spec.model}", partial(_another, job, job.drafts), lost=lost)
            case TrainedHead(part):
                raise refused(
                    "transformers' generate",
                    f"a trained head ({part.kind})",
                    "selfspec.hf(profile=...) with this profile",
                )
            case OnlyHere(kind):
                return Offer(f"drafts of kind '{kind}', by selfspec in custom_generate", partial(_only_here, job))


def _own(profile: Profile) -> Profile:
    """The profile as it can travel in generate.py: without parts, stores and answers."""
    spec = profile.draft
    known = type(spec).model_fields
    kept = [of for of in getattr(spec, "proposers", None) or () if of.kind == "lookup"]
    update: dict[str, object] = {"below": None, "proposers": kept or None}
    if isinstance(spec, GuessesSpec):
        update["proposers"] = kept or [ProposerSpec()]
    changed = spec.model_copy(update={name: value for name, value in update.items() if name in known})
    return profile.model_copy(update={"draft": changed, "parts": {}})


def _custom(job: Job, folder: Path) -> tuple[str, str]:
    """Write `custom_generate`, and say how it is used."""
    hf(profile=_own(job.profile)).save(folder)
    call = f"model.generate(**inputs, custom_generate={str(job.out)!r}, trust_remote_code=True)"
    return "the profile as it is, where selfspec is installed", call


def _code(job: Job, folder: Path, call: str) -> str:
    target, _ = target_of(job.llm, folder, job.out)
    return _LOAD.format(target=target) + call


def _settings(job: Job, tokens: int) -> GenerationConfig:
    """What a draft model's folder says of how many tokens it drafts."""
    config = copy.deepcopy(job.llm.model.generation_config)
    config.num_assistant_tokens = tokens
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    return config


def _assisted(job: Job, folder: Path, *, more: str = "") -> tuple[str, str]:
    load = f"draft = AutoModelForCausalLM.from_pretrained({str(job.out / 'draft')!r})\n"
    call = f"ids = model.generate(**inputs, max_new_tokens=128, do_sample=False, assistant_model=draft{more})"
    return "assisted generation", _code(job, folder, load + call)


def _guesses(job: Job, folder: Path, tokens: int) -> Written:
    config = copy.deepcopy(job.llm.model.generation_config)
    config.prompt_lookup_num_tokens, config.max_matching_ngram_size = tokens, 3
    config.save_pretrained(folder)
    load = f"config = GenerationConfig.from_pretrained({str(job.out)!r})\n"
    lookup = ("prompt lookup", _code(job, folder, load + "ids = model.generate(**inputs, generation_config=config)"))
    return Written((lookup, _custom(job, folder)))


def _sublayers(job: Job, drafts: Sublayers, folder: Path, tokens: int) -> Written:
    if not drafts.path.runs(job.llm.identity.layers):
        note = "No layer is bypassed whole, so in its own dtype no draft model would be cheaper: none is written."
        return Written((_custom(job, folder),), (note,))
    layers_folder(job, drafts, folder / "draft", _settings(job, tokens))
    return Written((_assisted(job, folder), _custom(job, folder)))


def _another(job: Job, drafts: Another, folder: Path, tokens: int) -> Written:
    model, tokenizer = other_model(job, drafts)
    model_folder(model, tokenizer, folder / "draft", _settings(job, tokens))
    if same_tokens(job, model):
        return Written((_assisted(job, folder),))
    draft = repr(str(job.out / "draft"))
    more = f", tokenizer=tokenizer, assistant_tokenizer=AutoTokenizer.from_pretrained({draft})"
    return Written((_assisted(job, folder, more=more),), ("The draft model has a tokenizer of its own.",))


def _only_here(job: Job, folder: Path, _tokens: int) -> Written:
    if job.profile.parts or job.profile.draft.beside:
        raise SelfspecError("the profile has files beside it, which cannot travel in generate.py; want one without")
    return Written((_custom(job, folder),))
