"""Resolution of decoding options for one prompt: selfspec's options and `transformers`' `GenerationConfig`.

Each field of a `GenerationConfig` means what it means in `transformers`. selfspec decodes one sequence, greedily or by
sampling; a field that asks for anything else, such as beam search, raises an error that names the field.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor
from transformers.generation.configuration_utils import WatermarkingConfig

from selfspec.basics.errors import SelfspecError
from selfspec.llm.options import DEFAULT_NEW_TOKENS, Options, stop_texts
from selfspec.models.dispatch import device_of
from selfspec.models.skeleton import decoder_part, end_tokens
from selfspec.speculation.rules import Rule, find_rule
from selfspec.speculation.sampling import Sampler, as_integer
from selfspec.speculation.sequence import Continuation

_ALONE = {  # unsupported fields (beam search, guidance, contrastive search, ...), and the values that disable each
    "num_beams": (None, 1),
    "guidance_scale": (None, 1),
    "token_healing": (None, False),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "is_assistant": (None, False),
}
_TOKENS = (  # fields that hold token ids
    "eos_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
)


_REAL = (  # fields that hold one real number
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "top_h",
    "repetition_penalty",
    "encoder_repetition_penalty",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Options resolved for one prompt.

    `config`: a `GenerationConfig` with every default filled in, independent of the model's `generation_config`.
    `ends`: the end-of-sequence tokens. `stops`: the stop strings; `stop_tokens`: the special tokens among them.
    `continuation`: the proposer of the guide; None without a guide.
    """

    config: GenerationConfig
    max_new_tokens: int
    sampler: Sampler
    rule: Rule
    ends: frozenset[int]
    stops: tuple[str, ...]
    stop_tokens: frozenset[int] = frozenset()
    continuation: Continuation | None = None

    @property
    def final_tokens(self) -> frozenset[int]:
        """The tokens that end the text."""
        return self.ends | self.stop_tokens


def plan(model: Any, options: Options, prompt: Sequence[int], *, ends: frozenset[int]) -> Plan:
    """Resolve `options` for a model and a prompt (token ids). Raises `SelfspecError` for unsupported options.

    `ends`: the model's end-of-sequence tokens, which apply if the configuration names none.
    """
    options.check()
    try:
        return _plan(model, options, prompt, ends)
    except SelfspecError:
        raise
    except Exception as error:  # a field of the wrong kind can raise anything, anywhere in transformers
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise SelfspecError(f"generation config: {kind}{error}") from error


def _plan(model: Any, options: Options, prompt: Sequence[int], ends: frozenset[int]) -> Plan:
    config = _complete(model, options, len(prompt), ends)
    end_ids = end_tokens(config.eos_token_id)
    device = device_of(model.get_input_embeddings())  # `model.device` is "meta" if weights are offloaded
    ids = torch.tensor([list(prompt)], device=device)
    processors: list[LogitsProcessor] = [*options.logits_processor]
    if options.guide is not None:
        processors.append(options.guide.processor(len(prompt), end_ids))
    ready = copy.copy(config)  # special tensors make a config unsaveable, so only the copy gets them
    model._prepare_special_tokens(ready, device=device)
    if isinstance(size := ready.encoder_no_repeat_ngram_size, int) and size > len(prompt):
        ready.encoder_no_repeat_ngram_size = None  # no n-gram can repeat; transformers would build a list of that size
    processors = model._get_logits_processor(
        ready,
        input_ids_seq_length=len(prompt),
        encoder_input_ids=ids,
        logits_processor=processors,
        device=device,
    )
    rule, seed = options.rule, options.seed
    tied = rule == "match" if rule is not None else seed is not None
    sampler = Sampler(temperature=float(bool(config.do_sample)), seed=seed, tied=tied, processors=processors)
    # Run transformers' processors once, so that an unusable field fails before any work is done.
    scores = torch.zeros((1, decoder_part(model.config).vocab_size), device=device)
    for processor in processors:
        scores = scores if processor in options.logits_processor else processor(ids, scores)
    assert config.max_new_tokens is not None
    stops = stop_texts(config.stop_strings)
    continuation = None if options.guide is None else options.guide.continuation(len(prompt), end_ids)
    return Plan(
        config, config.max_new_tokens, sampler, find_rule(rule, sampler), end_ids, stops, continuation=continuation
    )


def _complete(model: Any, options: Options, prompt: int, ends: frozenset[int]) -> GenerationConfig:
    """Return a configuration with all defaults filled in and all fields validated."""
    base_config = options.config
    if base_config is None:
        config = GenerationConfig(eos_token_id=sorted(ends) or None, pad_token_id=min(ends, default=None))
        config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
        sampled = options.temperature or options.settings.get("do_sample")
        config.top_k = 0 if sampled else config.top_k  # greedy decoding ignores top_k
    else:
        config, _ = model._prepare_generation_config(base_config)
    for name, value in options.settings.items():
        is_watermark = name == "watermarking_config" and isinstance(value, Mapping)
        setattr(config, name, WatermarkingConfig.from_dict(dict(value)) if is_watermark else value)
    if options.temperature is not None:
        config.do_sample = options.temperature > 0
        config.temperature = options.temperature or 1.0
    config.top_k = config.top_k if options.top_k is None else options.top_k
    config.top_p = config.top_p if options.top_p is None else options.top_p
    config.max_new_tokens = new_tokens(model, options, prompt)
    config.max_length = prompt + config.max_new_tokens
    config.stop_strings = (
        list(stop_texts(options.stop) or stop_texts(config.stop_strings, "generation config: ")) or None
    )
    config.return_dict_in_generate = config.output_scores = config.output_logits = False
    if config.min_new_tokens is not None:
        config.min_length = prompt + as_integer(config.min_new_tokens, "min_new_tokens", least=0)
    if config.eos_token_id is None:
        config.eos_token_id = sorted(ends) or None
    if (several := config.num_return_sequences) not in (None, 1):
        raise SelfspecError(f"generation config: num_return_sequences {several} is not served; ask once for each")
    check_config(config, decoder_part(model.config).vocab_size)
    return config


def new_tokens(model: Any, options: Options, prompt: int) -> int:
    """Return the maximum number of new tokens after a prompt of `prompt` tokens, by the rules of `transformers`.

    `max_new_tokens` takes precedence over `max_length`, wherever either is set. Raises `SelfspecError` for an
    invalid value, and if `max_length` leaves no room for a new token.
    """
    if options.max_new_tokens is not None:
        return as_integer(options.max_new_tokens, "max_new_tokens", least=1)
    sources = [options.settings]
    if options.config is not None:
        sources += [vars(options.config), vars(model.generation_config)]
    new, length = (
        next((source[name] for source in sources if source.get(name) is not None), None)
        for name in ("max_new_tokens", "max_length")
    )
    if new is not None:
        return as_integer(new, "max_new_tokens", least=1)
    if length is None:
        return DEFAULT_NEW_TOKENS
    if as_integer(length, "max_length", least=1) <= prompt:
        raise SelfspecError(
            f"max_length {length} leaves no room after a prompt of {prompt} tokens; expected more, or max_new_tokens"
        )
    return int(length) - prompt


def check_config(config: GenerationConfig, vocabulary: int) -> None:
    """Raise `SelfspecError` for unsupported fields, and for values that would fail late or silently.

    `vocabulary`: the number of token ids of the model.
    """
    for name, harmless in _ALONE.items():
        value = getattr(config, name, None)
        if value not in harmless:
            raise SelfspecError(
                f"generation config: {name} {value} is not served; selfspec decodes one sequence, greedily or sampled"
            )
    if not isinstance(config.do_sample, bool | None):
        raise SelfspecError(f"generation config: do_sample {config.do_sample}: expected true or false")
    if not isinstance(config.max_time, int | float | None):
        raise SelfspecError(f"generation config: max_time {config.max_time}: expected seconds")
    for name in _REAL:
        value = getattr(config, name, None)
        real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if value is not None and not real:
            raise SelfspecError(f"generation config: {name} {value}: expected a number")
    decay = config.exponential_decay_length_penalty
    if decay is not None and not (len(decay) == 2 and all(isinstance(number, int | float) for number in decay)):
        raise SelfspecError(
            f"generation config: exponential_decay_length_penalty {decay}: expected a start index and a factor"
        )
    for name in _TOKENS:
        for token in _numbers(getattr(config, name)):
            if not isinstance(token, int) or isinstance(token, bool) or not -1 <= token < vocabulary:
                raise SelfspecError(
                    f"generation config: {name}: token {token} is not in the vocabulary of {vocabulary}"
                )
    watermark = config.watermarking_config
    if watermark is not None and not isinstance(watermark, WatermarkingConfig):
        raise SelfspecError(
            f"generation config: {type(watermark).__name__} keeps a state from token to token, which drafts would "
            "disturb; expected WatermarkingConfig"
        )


def _numbers(value: Any) -> list[Any]:
    """Return the token ids of a field, which holds one id, several ids or nested lists, as a flat list."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple | set):
        return [number for part in value for number in _numbers(part)]
    return [] if value is None else [value]


class Deadline:
    """A function that calls `push(token)`, and returns True (stop) if `push` does or `seconds` have passed.

    The time starts when the object is made or restarted. None for `seconds`: no time limit.
    """

    def __init__(self, push: Callable[[int], bool], seconds: float | None) -> None:
        self._push, self._seconds = push, math.inf if seconds is None else seconds
        self.restart()

    def restart(self) -> None:
        """Let the time begin anew."""
        self._begun = time.perf_counter()

    def __call__(self, token: int) -> bool:
        """Add a token; return whether the text ends with it."""
        return self._push(token) or time.perf_counter() > self._begun + self._seconds
