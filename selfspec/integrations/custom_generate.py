"""A decoding method for `transformers`' `model.generate(..., custom_generate=...)`, and the folder that offers it."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationMixin,
    LogitsProcessor,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import make_folder, write_text
from selfspec.drafters import PlainDrafter, calibrate, make_guarded
from selfspec.drafters.batch_policy import bound_together
from selfspec.engine.engine import Engine
from selfspec.integrations.columns import Columns
from selfspec.llm.default_profile import check_extra_memory, resolve_profile
from selfspec.llm.llm import LLM, wrap
from selfspec.llm.local_costs import local_payoff
from selfspec.llm.sampling_plan import check_config
from selfspec.models.layout import apply_layout_, check_layout
from selfspec.models.shards import check_unsharded
from selfspec.models.skeleton import decoder_part, identity_of
from selfspec.models.stored_linear import StoredEmbedding
from selfspec.profile.draft_spec import proposers_of
from selfspec.profile.reading import profile_text
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import named_profile
from selfspec.runtime.base import Runtime
from selfspec.speculation.drafter import Drafter
from selfspec.speculation.rules import check_rule, find_rule
from selfspec.speculation.sampling import Sampler, reads_prefix
from selfspec.speculation.sequence import SequenceState

_SOURCE = '''"""Lossless speculative decoding for generate, by the package selfspec."""

import selfspec
{reads}{profile}
_DRAFTED = selfspec.hf({arguments})


def generate(*args, model, **kwargs):
    """Return the output of `model.generate`, decoded speculatively; takes the same arguments."""
    return _DRAFTED.generate(model, *args, **kwargs)
'''


def write_repository(folder: Path, profile: str | Profile, arguments: Mapping[str, str | float | None]) -> None:
    """Write `custom_generate/generate.py` and `custom_generate/requirements.txt` to `folder`.

    `profile`: the profile to decode with, or a name that `hf` accepts. `arguments`: further keyword arguments of `hf`;
    None values are left out. Raises `SelfspecError` for a profile that needs other files, which `transformers` would
    not download, and if the folder cannot be written.
    """
    further = "".join(f", {name}={value!r}" for name, value in arguments.items() if value is not None)
    reads = text = ""
    named = repr(profile)
    if isinstance(profile, Profile):
        kinds = {proposer.kind for leaf in profile.leaf_specs for proposer in proposers_of(leaf)}
        if profile.parts or kinds & {"store", "answers"} or any(leaf.may_name_files for leaf in profile.leaf_specs):
            raise SelfspecError(
                "the profile needs files beside it, which generate.py cannot hold; expected one without"
            )
        reads = "from selfspec.profile.reading import parse_profile\n"
        text = f"\n_PROFILE = {_literal(profile_text(profile))}\n"
        named = 'parse_profile(_PROFILE, source="custom_generate/generate.py")'
    source = _SOURCE.format(reads=reads, profile=text, arguments=named + further)
    place = folder / "custom_generate"
    make_folder(place)
    write_text(place / "generate.py", source)
    write_text(place / "requirements.txt", "selfspec\n")


def _literal(text: str) -> str:
    """Return the Python source of a string literal for `text`, with one source line for each line of the text."""
    lines = "".join(f"    {line!r}\n" for line in text.splitlines(keepends=True))
    return f"(\n{lines})"


_READ = ("attention_mask", "position_ids")  # model arguments that this method handles
_IDLE = ("use_cache", "logits_to_keep", "cache_position")  # arguments of generate's decode loop, ignored here
_SEEDS = 2**62


def hf(
    profile: str | Path | Profile = "auto",
    *,
    method: str | None = None,
    rule: str | None = None,
    streamer: Any = None,
    layout: str | None = None,
    extra_memory: float | None = None,
) -> CustomGenerate:
    """Return a decoding method for `model.generate(..., custom_generate=...)` that decodes speculatively.

    Greedy texts equal the texts of the same call without `custom_generate`; sampled texts have the same distribution.
    Sampling draws from torch's generator, so that `set_seed` makes it reproducible. All other arguments of the call
    keep their meaning: generation config, logits processors, stopping criteria, several prompts padded on the left,
    several returned sequences. `transformers` does not pass the `tokenizer` to a custom method: to use `stop_strings`,
    call `hf(...).generate(model, ...)`, which takes the same arguments.

    `profile`, `method` and `extra_memory`: as in `load`. `rule`: the verification rule of sampled texts, by name
    (None: `match`). `streamer`: a streamer to use instead of the call's (None: the call's), which gets the prompt
    first, too. `layout`: the weight layout to which the model is converted, in place, at the first call (see
    `layout.apply_layout_`); `auto` is the choice of `load`, much faster on a CPU; None keeps the weights unchanged.
    Reuse the returned object: it caches the prepared model.

    Raises `SelfspecError` for an unknown profile, rule or layout. A call raises it for unsupported arguments.
    """
    return CustomGenerate(
        named_profile(profile), method=method, rule=rule, streamer=streamer, layout=layout, extra_memory=extra_memory
    )


class CustomGenerate:
    """A decoding method for `transformers`' generate, made by `hf`; it caches the model that it prepared last."""

    def __init__(
        self,
        profile: str | Profile,
        *,
        method: str | None = None,
        rule: str | None = None,
        streamer: Any = None,
        layout: str | None = None,
        extra_memory: float | None = None,
    ) -> None:
        check_extra_memory(extra_memory)
        if rule is not None:
            check_rule(rule)
        if layout is not None:
            check_layout(layout)
        self.layout, self.extra_memory = layout, extra_memory
        self.profile, self.method, self.rule, self.streamer = profile, method, rule, streamer
        self._llm: LLM | None = None
        self._weights: object = None
        self._several: tuple[Runtime, Drafter] | None = None

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[LogitsProcessor],
        stopping_criteria: Sequence[StoppingCriteria],
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode the prompts `input_ids` `[B, n]`, as `transformers`' generate calls a custom method.

        Returns the sequences `[B, n + m]`, padded on the right, or with `return_dict_in_generate` generate's output
        object. Raises `SelfspecError` for unsupported arguments.
        """
        _check(generation_config, model_kwargs, decoder_part(model.config).vocab_size)
        prompts = _prompts(input_ids, model_kwargs)
        longest, ends, other_criteria = _limits(stopping_criteria, input_ids.shape[1])
        llm = self._prepared(model)
        for prompt in prompts:
            llm.check_context(len(prompt), 1)
        if longest > (fit := llm.max_new(max(map(len, prompts)))):
            warnings.warn(
                f"max_new_tokens {longest} exceeds the context of {llm.runtime.skeleton.context} positions: at most "
                f"{fit} new tokens are generated after the longest prompt",
                stacklevel=2,
            )
        runtime, drafter = self._with_rows(llm, len(prompts))
        samplers = self._samplers(logits_processor, input_ids, prompts, sampled=bool(generation_config.do_sample))
        seqs = [
            SequenceState(
                prompt,
                min(longest, llm.max_new(len(prompt))),
                sampler,
                ends,
                rule=find_rule(None if sampler.greedy else self.rule, sampler),
            )
            for prompt, sampler in zip(prompts, samplers, strict=True)
        ]
        if not samplers[0].greedy:
            calibrate(drafter)
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())  # as generate does with its own
        as_object = bool(generation_config.return_dict_in_generate)
        columns = Columns(
            input_ids,
            seqs,
            pad=_pad(generation_config, ends),
            criteria=StoppingCriteriaList(other_criteria),
            streamer=self.streamer or _streamer_of(inspect.currentframe()),
            scores=as_object and bool(generation_config.output_scores),
            logits=as_object and bool(generation_config.output_logits),
        )
        with Engine(runtime, drafter) as engine:
            for seq in seqs:
                engine.join(seq)
            while columns.open:
                columns.take(engine.step())
                for seq in columns.settle():
                    if seq in engine.running:
                        engine.leave(seq)
        return columns.result(as_object=as_object)

    def generate(self, model: Any, *args: Any, **kwargs: Any) -> Tensor | GenerateDecoderOnlyOutput:
        """Call `model.generate(*args, **kwargs)` with this decoding method; `stop_strings` are supported, too."""
        tokenizer, stops = kwargs.get("tokenizer"), kwargs.get("stop_strings")
        config = kwargs.get("generation_config")
        if stops is None and config is not None:
            stops = config.stop_strings
        if tokenizer is not None and stops:
            criteria = [*(kwargs.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, stops)]
            kwargs |= {"stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)}
            if config is not None:
                kwargs["generation_config"] = config = copy.deepcopy(config)
                config.stop_strings = None
        output: Tensor | GenerateDecoderOnlyOutput = type(model).generate(
            model, *args, **{**kwargs, "custom_generate": self}
        )
        return output

    def save(self, folder: str | Path) -> None:
        """Write this decoding method to `custom_generate/generate.py` in `folder`, as model repositories ship it.

        `model.generate(..., custom_generate=folder, trust_remote_code=True)` then decodes with this method. If `folder`
        holds the model itself, so does every generate of the model loaded with `trust_remote_code=True`. The profile is
        written into the file. Raises `SelfspecError` for a profile that needs other files, such as trained parts, and
        if the folder cannot be written.
        """
        named = ("method", "rule", "layout", "extra_memory")
        write_repository(Path(folder), self.profile, {name: getattr(self, name) for name in named})

    def _prepared(self, model: Any) -> LLM:
        """Return the model wrapped as an `LLM`; cached until it is moved, cast, reloaded, trained or adapted."""
        if self._llm is None or self._weights != _where(model):
            check_unsharded(model, "selfspec.hf")
            self._lay_out(model)
            self._llm = wrap(model, None, profile=self.profile, method=self.method, extra_memory=self.extra_memory)
            self._weights, self._several = _where(model), None
        return self._llm

    def _lay_out(self, model: Any) -> None:
        """Convert the model's weights, in place, to `self.layout`; do nothing if that is None."""
        if self.layout is None:
            return
        chosen, _ = resolve_profile(
            self.profile, model, identity_of(model), method=self.method, extra_memory=self.extra_memory
        )
        drafts = [] if chosen is None or not chosen.drafts else chosen.alternatives
        quantized_drafts = any(alternative.path.low_precision for alternative in drafts)
        apply_layout_(model, self.layout, drafting=bool(drafts), quantized_drafts=quantized_drafts)

    def _with_rows(self, llm: LLM, rows: int) -> tuple[Runtime, Drafter]:
        """Return a runtime whose KV cache holds at least `rows` sequences, and a drafter on that runtime."""
        if rows == 1:
            return llm.runtime, llm.drafter
        if self._several is None or self._several[0].rows < rows:
            runtime = llm.runtime.with_new_cache(rows=rows)
            drafter: Drafter = PlainDrafter()
            if (own := llm.profile) is not None and own.drafts:
                together = self.rule in (None, "match")  # whose texts do not depend on drafts
                drafter = make_guarded(runtime, own, local_payoff, together=together)
                if together:
                    bound_together(drafter)
            self._several = runtime, drafter
        return self._several

    def _samplers(
        self, processors: Sequence[LogitsProcessor], ids: Tensor, prompts: Sequence[list[int]], *, sampled: bool
    ) -> list[Sampler]:
        """Return a sampler for each sequence, seeded by torch's generator.

        The logits processors see each sequence in its row of the padded batch `ids` `[B, n]`, as in `transformers`.
        """
        rows, width = ids.shape
        samplers = []
        for row, prompt in enumerate(prompts):
            pads = ids[row, : width - len(prompt)]
            alone = rows == 1 and not len(pads)
            own = [
                processor if alone or not reads_prefix(processor) else _of_row(processor, row, rows, pads)
                for processor in processors
            ]
            seed = int(torch.randint(_SEEDS, ())) if sampled else None
            tied = self.rule in (None, "match")
            samplers.append(Sampler(temperature=float(sampled), seed=seed, tied=tied, processors=own))
        return samplers


def _of_row(processor: LogitsProcessor, row: int, rows: int, pads: Tensor) -> LogitsProcessor:
    """Return a batch's `processor` for the sequence of row `row`, of `rows`, with `pads` before its prompt."""
    if type(processor) is not PrefixConstrainedLogitsProcessor:
        return _RowProcessor(processor, row, rows, pads)
    allowed = processor._prefix_allowed_tokens_fn  # called for each row, which other rows' sequences may not fit
    return _RowProcessor(PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1), 0, 1, pads)


class _RowProcessor(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that applies a batch's `processor` to one sequence.

    `transformers`' processors may depend on the row of a sequence in the batch and on the length of the padded prompt.
    Therefore the sequence is padded with `pads` and repeated in all `rows` rows, and the result of row `row` is used.
    """

    def __init__(self, processor: LogitsProcessor, row: int, rows: int, pads: Tensor) -> None:
        self.processor, self.row, self.rows, self.pads = processor, row, rows, pads

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Process `scores` `[1, V]` after this sequence's tokens `input_ids` `[1, n]`."""
        ids = torch.cat([self.pads.to(input_ids.device), input_ids[0]]).expand(self.rows, -1)
        processed: Tensor = self.processor(ids, scores.expand(self.rows, -1).clone())
        return processed[self.row : self.row + 1]


def _where(model: Any) -> object:
    """Return a value, comparable by `==`, that changes when a model is moved, cast, reloaded, trained or adapted."""
    embedding = model.get_input_embeddings()
    table = embedding.blocks.values if isinstance(embedding, StoredEmbedding) else embedding.weight
    version = None if table.is_inference() else table._version
    modules = tuple(map(id, model.modules()))  # adapters exchange some
    return id(model), modules, table.device, table.dtype, table.data_ptr(), version


def _check(config: GenerationConfig, model_kwargs: dict[str, Any], vocabulary: int) -> None:
    check_config(config, vocabulary)
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None) and config.return_dict_in_generate:
            raise SelfspecError(f"generation config: {name} is not served; verification passes include rejected tokens")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
        raise SelfspecError("past_key_values is not served: selfspec uses its own KV cache; leave it out")
    for name, value in model_kwargs.items():
        if value is not None and name not in (*_READ, *_IDLE, "past_key_values"):
            raise SelfspecError(f"model argument {name} is not served; expected token ids, mask and positions only")


def _prompts(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[list[int]]:
    """Return the token ids of each prompt without padding.

    Raises `SelfspecError` for an empty prompt, padding that is not on the left, and position ids that do not follow
    from the padding.
    """
    width = input_ids.shape[1]
    mask = model_kwargs.get("attention_mask")
    real = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device).ne(0).long()
    lengths = real.sum(1)
    if not width or not bool(lengths.all()):
        raise SelfspecError("a prompt is empty; expected at least one token in each prompt")
    places = torch.arange(width, device=input_ids.device)
    if not torch.equal(real.bool(), places >= (width - lengths).unsqueeze(1)):
        raise SelfspecError("padding must come before the prompts; expected a tokenizer with padding_side='left'")
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        usual = real.cumsum(1) - 1
        if positions.shape[-1] != width or not bool((positions.to(usual.device) == usual)[real.bool()].all()):
            raise SelfspecError("position_ids: expected 0, 1, .. from the first token after the padding, or none")
    return [ids[width - n :] for ids, n in zip(input_ids.tolist(), lengths.tolist(), strict=True)]


def _limits(criteria: Sequence[StoppingCriteria], width: int) -> tuple[int, frozenset[int], list[StoppingCriteria]]:
    """Return the maximum number of new tokens, the end-of-sequence tokens, and the other stopping criteria.

    `width`: the length of the padded prompts.
    """
    lengths = [criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)]
    ends = [criterion.eos_token_id.tolist() for criterion in criteria if isinstance(criterion, EosTokenCriteria)]
    other_criteria = [
        criterion for criterion in criteria if not isinstance(criterion, MaxLengthCriteria | EosTokenCriteria)
    ]
    return max(1, min(lengths) - width), frozenset().union(*ends), other_criteria


def _pad(config: GenerationConfig, ends: frozenset[int]) -> int:
    """Return the token id that pads ended sequences: `pad_token_id`, else the smallest end token, else 0."""
    pad_token_id = config.pad_token_id
    return int(pad_token_id) if pad_token_id is not None else min(ends, default=0)


def _streamer_of(frame: FrameType | None) -> Any:
    """Return the streamer of the nearest call of `transformers`' generate around `frame`; None if there is none.

    `transformers`' generate does not pass its streamer to a custom method, but has already put the prompt into it, so
    that a consumer of the streamer would wait forever if no token followed. Functions that wrap the custom method stand
    between it and generate.
    """
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_globals.get("__name__") == GenerationMixin.__module__:
            return frame.f_locals.get("streamer")
        frame = frame.f_back
    return None
