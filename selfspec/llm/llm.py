"""The Python interface of selfspec: load or wrap a model, generate text, stream it, chat."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import parse_controller
from selfspec.drafters import LayerSkipDrafter, PlainDrafter, calibrate, make_drafter, make_guarded
from selfspec.drafters.registry import make_layer_skip
from selfspec.engine.engine import OnPrefill, decode
from selfspec.llm.adapter_switch import AdapterSwitcher
from selfspec.llm.conversation import Conversation
from selfspec.llm.default_profile import check_extra_memory, resolve_profile
from selfspec.llm.generate_many import generate_many
from selfspec.llm.keyword_hints import with_keyword_hints
from selfspec.llm.local_costs import local_payoff
from selfspec.llm.messages import render, validate_messages
from selfspec.llm.options import GenerateOptions, ManyOptions, Options, options_method
from selfspec.llm.sampling_plan import Deadline, Plan, new_tokens, plan
from selfspec.llm.stream import Generation, Stream
from selfspec.models.adapters import Adapters, load_adapters
from selfspec.models.half_storage import held_dtypes
from selfspec.models.layout import apply_layout_, check_layout, choose, layout_times, takes_native, weight_bytes
from selfspec.models.loading import DeviceMap, load_model
from selfspec.models.skeleton import identity_of
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import check_profile, named_profile, with_lookup_files
from selfspec.proposers.history import check_answers
from selfspec.proposers.store import Store
from selfspec.runtime import open_runtime
from selfspec.runtime.base import Runtime
from selfspec.speculation.drafter import Drafter
from selfspec.speculation.sampling import as_integer
from selfspec.speculation.sequence import SequenceState
from selfspec.text.detokenizer import TextStream
from selfspec.text.guided import Guide
from selfspec.text.prompt_template import Message, Prompt, is_chat, is_unicode, token_ids
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath, SkipSet, as_path
from selfspec.types.identity import UNNAMED, Identity

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessor

_log = logging.getLogger("selfspec")


def _generate(llm: LLM, prompt: Prompt, options: GenerateOptions) -> Generation:
    """Continue `prompt` as `LLM.generate` does, with the options in one object."""
    return llm.run(prompt, options, drafter=options.drafter)


def _stream(llm: LLM, prompt: Prompt, options: GenerateOptions) -> Stream:
    """Start a generation and return a `Stream` of its pieces of text, without waiting for the first piece.

    Takes the arguments of `generate`, and gives the same text.
    """
    return llm.start(prompt, options, drafter=options.drafter)


def _chat(llm: LLM, messages: Sequence[Message], options: GenerateOptions) -> Generation:
    """Answer a list of chat messages, which the tokenizer's chat template formats.

    Each message is `{"role": "system" or "user" or "assistant", "content": text}`. The options are those of `generate`.
    Raises `SelfspecError` as `generate` does, for malformed messages, and if the tokenizer has no chat template or the
    template fails on the messages.
    """
    return _generate(llm, render(llm.tokenizer, validate_messages(messages)), options)


def _chat_stream(llm: LLM, messages: Sequence[Message], options: GenerateOptions) -> Stream:
    """Answer as `chat` does, but return a `Stream` of pieces of text, as `stream` does."""
    return _stream(llm, render(llm.tokenizer, validate_messages(messages)), options)


class LLM:
    """A model, its tokenizer, and the profile that says how to draft for the model; made by `load` or `wrap`.

    Without a profile, or with a profile that drafts nothing, the model decodes without drafts (plain decoding). The
    model runs one stream at a time. `name`: the model's name in profiles; by default the name in the model's config.
    Raises `SelfspecError` if the profile is for another architecture.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str | None = None, profile: Profile | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.runtime: Runtime = open_runtime(model)
        self.adapters = Adapters(model)
        self._adapter_switcher = AdapterSwitcher(self.adapters)
        self.name = name or self.runtime.skeleton.identity.name or UNNAMED
        self.layout: str | None = None  # the weight layout that `load` applied; None after `wrap`
        self.plain_layout: str | None = None  # the weight layout that is fastest without drafts; None after `wrap`
        self.profile: Profile | None = None
        self.has_default_profile = False  # whether `load` or `wrap` found no profile for the weights
        self.drafter: Drafter = PlainDrafter()
        if profile is not None:
            self._use(profile)

    def _use(self, profile: Profile) -> None:
        check_profile(profile, self.identity)
        self.profile = profile
        if profile.drafts:
            self.drafter = self.guarded_drafter(profile)

    def __repr__(self) -> str:
        """Return one line: the model's name, its dtype and device, the runtime, and what drafts."""
        drafts = "none" if self.profile is None else self.profile.draft.summary
        source = " (no profile known)" if self.has_default_profile else ""
        dtype, device = str(self.runtime.dtype).removeprefix("torch."), self.runtime.device
        return f"LLM({self.name!r}, {dtype} on {device}, {type(self.runtime).__name__}, drafts: {drafts}{source})"

    @property
    def identity(self) -> Identity:
        """The identity of the model, as a profile records it."""
        return self.runtime.skeleton.identity.model_copy(update={"name": self.name})

    @property
    def known_profile(self) -> Profile | None:
        """The profile that was made for the model: `profile`, but None if that is the default profile."""
        return None if self.has_default_profile else self.profile

    @property
    def held(self) -> str | None:
        """The dtypes of 16 bits that hold float32 weights exactly, such as `bfloat16`; None if there are none."""
        return held_dtypes(self.model)

    @property
    def weight_bytes(self) -> int:
        """The size of the model's weights in memory, in bytes."""
        return weight_bytes(self.model)

    def layer_skip(
        self,
        path: DraftPath | SkipSet,
        controller: ControllerSpec | str | None = None,
        vocabulary: Sequence[int] | None = None,
        *,
        candidates: int = 1,
    ) -> LayerSkipDrafter:
        """Return a drafter that runs a draft path; with an empty skip set it drafts with the whole model.

        `controller`: decides when drafting stops, an object or text such as `fixed:k=4`. The default is the profile's
        controller, or the default controller of `LayerSkipSpec` without a profile. `vocabulary`: the only token ids
        that are drafted, which makes the head cheaper (None: those of `path`). `candidates`: the most tokens proposed
        for one position, including the drafted token. Raises `SelfspecError` for an invalid argument.
        """
        if isinstance(controller, str):
            controller = parse_controller(controller)
        own, path = self.profile, as_path(path)
        if controller is None:
            controller = LayerSkipSpec().controller if own is None else own.layer_skip.controller
        if vocabulary is not None:
            path = replace(path, vocabulary=tuple(vocabulary))
        known = own is not None and replace(own.path, vocabulary=path.vocabulary) == path
        base = own if own is not None and known else Profile(model=self.identity)
        confidence = base.layer_skip.confidence
        # `model_copy` does not validate `candidates`: making the drafter does
        draft = LayerSkipSpec.from_path(path, controller, confidence=confidence).model_copy(
            update={"candidates": candidates, "int4_weights": base.layer_skip.int4_weights}
        )
        return make_layer_skip(self.runtime, draft, base.model_copy(update={"draft": draft}))

    def guarded_drafter(self, profile: Profile) -> Drafter:
        """Return the profile's drafter inside a guard, which lets it draft only while the cost stays within a bound.

        Raises `SelfspecError` if the profile does not fit the model.
        """
        return make_guarded(self.runtime, profile, local_payoff)

    def guarded_drafter_on(self, profile: Profile, runtime: Runtime) -> Drafter:
        """Return the profile's drafter inside one guard on another runtime of the model, that of a batch."""
        return make_guarded(runtime, profile, together=True)

    def drafter_for(self, profile: Profile) -> Drafter:
        """Return the drafter that a profile describes, without a guard.

        Raises `SelfspecError` if the profile does not fit the model.
        """
        return make_drafter(self.runtime, profile)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids: text is tokenised by `tokenizer(prompt)`, messages by the chat template.

        Raises `SelfspecError` for an empty prompt, invalid Unicode, malformed messages, and token ids outside the
        vocabulary.
        """
        if isinstance(prompt, str) and not is_unicode(prompt):
            raise SelfspecError("the prompt is not valid Unicode text; give UTF-8")
        if self.tokenizer is None and (isinstance(prompt, str) or is_chat(prompt)):
            raise SelfspecError("the prompt is a text, and the model has no tokenizer; expected token ids")
        if is_chat(prompt):
            prompt = render(self.tokenizer, validate_messages(prompt))
        ids = list(self.tokenizer(prompt).input_ids) if isinstance(prompt, str) else token_ids(prompt)
        if not ids:
            raise SelfspecError("the prompt is empty; give at least one token")
        vocabulary = self.runtime.skeleton.identity.vocabulary or 0
        wrong = next((i for i in ids if not 0 <= i < vocabulary), None)
        if wrong is not None:
            raise SelfspecError(f"token id {wrong} is not in the model's vocabulary of {vocabulary}")
        return ids

    def check(self, prompt: Prompt, max_new_tokens: int) -> list[int]:
        """Return the prompt's token ids. Raises `SelfspecError` if prompt and new tokens exceed the context length."""
        ids = self.encode(prompt)
        self.check_context(len(ids), as_integer(max_new_tokens, "max_new_tokens", least=1))
        return ids

    @property
    def timeout(self) -> float:
        """Seconds without progress after which another thread's generation is no longer waited for (`BusyError`)."""
        return self.runtime.turn_lock.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.runtime.turn_lock.timeout = seconds

    def max_new(self, n: int) -> int:
        """Return the most new tokens that fit the context after `n` prompt tokens; the last one needs no position."""
        return self.runtime.skeleton.context - n + 1

    def check_context(self, n: int, max_new_tokens: int) -> None:
        """Raise `SelfspecError` if `n` prompt tokens and `max_new_tokens` new tokens exceed the context length."""
        s, fit = self.runtime.skeleton, self.max_new(n)
        if max_new_tokens > fit:
            fits = f"at most {fit} new token{'s fit' if fit > 1 else ' fits'}" if fit > 0 else "no new token fits"
            raise SelfspecError(
                f"a prompt of {n} tokens and {max_new_tokens} new ones outgrow {s.context_reason} "
                f"({s.context} positions): {fits} after this prompt"
            )

    def guide(self, *, regex: str | None = None, json_schema: str | Mapping[str, Any] | None = None) -> Guide:
        """Return a grammar that generated text must follow: a regular expression for the whole text, or a JSON schema.

        Raises `SelfspecError` for an invalid grammar, and if the optional package `llguidance` is not installed.
        """
        return Guide(self.tokenizer, ends=self.runtime.skeleton.ends, regex=regex, json_schema=json_schema)

    @with_keyword_hints
    def generate(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        logits_processor: Sequence[LogitsProcessor] = (),
        guide: Guide | None = None,
        rule: str | None = None,
        settings: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        probabilities: bool = False,
        drafter: Drafter | None = None,
    ) -> Generation:
        """Continue `prompt` (text or token ids), greedily by default.

        `config`: a `transformers` `GenerationConfig`; each field means what it means in `transformers`' `generate`.
        Unset fields come from the model's own `generation_config` (`llm.model.generation_config` itself may be passed),
        then from `transformers`' defaults, such as top-k 50. The other arguments override the config. Without a config,
        `temperature` is 0 (greedy), `top_k` and `top_p` are off, and only the end tokens come from the checkpoint.
        The checkpoint's end tokens also apply if a config names none. `max_new_tokens` is 128 by default.

        With a `seed`, sampling is repeatable; under rule `match` the text is the same with and without drafting. The
        text ends before the first of the `stop` strings, which are searched for in the new text without its special
        tokens. `logits_processor`: further `transformers` logits processors. Each must depend only on the tokens before
        a position; at a drafted position these include the drafted tokens. `guide`: a grammar for the text, made by
        `self.guide`. `rule`: the verification rule, a key of `rules.RULES`; the default is `greedy` at temperature 0,
        `match` with a seed, else `block`. `settings`: other fields of a `GenerationConfig`, by name. `adapter`: the
        name of one of the model's adapters, or `base` for none (None: the default of `Adapters`). `drafter` replaces
        the profile's drafter; `PlainDrafter()` decodes without drafts. With `probabilities`, the generation's `events`
        hold the target's probability of each token, before temperature and processors.

        Raises `SelfspecError` for an invalid argument, and if prompt and output exceed the context; `BusyError` while
        another stream of this model is running.
        """
        options = GenerateOptions(
            config,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop,
            logits_processor=logits_processor,
            guide=guide,
            rule=rule,
            settings=settings or {},
            adapter=adapter,
            probabilities=probabilities,
            drafter=drafter,
        )
        return _generate(self, prompt, options)

    stream = options_method(GenerateOptions, _stream)
    chat = options_method(GenerateOptions, _chat)
    chat_stream = options_method(GenerateOptions, _chat_stream)
    generate_many = options_method(ManyOptions, generate_many)

    def conversation(self, *, system: str | None = None) -> Conversation:
        """Start a chat of several turns, whose `send` and `stream` add a message and prefill only the new tokens.

        `system`: the system message (None: no system message). Raises `SelfspecError` if the tokenizer has no chat
        template, or if a system message is given and the template takes none.
        """
        return Conversation(self, system=system)

    def run(
        self, prompt: Prompt, options: Options, *, planned: Plan | None = None, drafter: Drafter | None = None
    ) -> Generation:
        """Generate as `generate` does, with the decoding options in one object; `planned` is that of `start`."""
        return self.start(prompt, options, planned=planned, drafter=drafter, pieces=False).wait()

    def start(
        self,
        prompt: Prompt,
        options: Options,
        *,
        planned: Plan | None = None,
        drafter: Drafter | None = None,
        pieces: bool = True,
        reuse: bool = False,
        ended: Callable[[str], None] | None = None,
        on_prefill: OnPrefill | None = None,
    ) -> Stream:
        """Start a generation and return its `Stream`, as `stream` does, with the decoding options in one object.

        `planned`: the result of `plan` for this prompt and these options, used for one generation only; None: `plan` is
        called here. `drafter`: replaces the profile's drafter. Without `pieces`, the stream yields all text at the end.
        `reuse`: keep the KV cache of the prefix that the prompt shares with the last sequence started with `reuse`, and
        prefill only the tokens after that prefix. `ended`: called with the whole text when the stream ends, if the
        stream emitted a token. `on_prefill`: called with the number of prompt tokens read and that of all, while a long
        prompt is read (`Engine.join`).
        """
        ids = self.encode(prompt)
        planned = planned or self.plan(ids, options)
        drafter = drafter or self.drafter
        if not hasattr(drafter, "propose"):
            raise SelfspecError(f"drafter {type(drafter).__name__}: expected a drafter, such as llm.layer_skip(...)")
        if planned.sampler.seeded:
            calibrate(drafter)
        text = TextStream(self.tokenizer, ids, planned.stops)
        seq = SequenceState(
            ids, planned.max_new_tokens, planned.sampler, planned.final_tokens, continuation=planned.continuation
        )
        stop = Deadline(text.push, planned.config.max_time)
        decoding = partial(decode, self.runtime, drafter, seq, rule=planned.rule, stop=stop, on_prefill=on_prefill)
        rounds = self._adapter_switcher.rounds(options.adapter, lambda begin: decoding(reuse=begin), reuse=reuse)
        guided = options.guide is not None
        return Stream(
            rounds,
            seq,
            text,
            pieces=pieces,
            probabilities=options.probabilities,
            guided=guided,
            stop_tokens=planned.stop_tokens,
            ended=ended,
        )

    def fit_options(self, prompt: Prompt, options: Options) -> Options:
        """Return `options` with `max_new_tokens` lowered to the number of tokens that fit the context after `prompt`.

        Options whose new tokens fit are returned unchanged. Raises `SelfspecError` if no new token fits.
        """
        self.check_context(n := len(self.encode(prompt)), 1)
        left = self.max_new(n)
        return options if new_tokens(self.model, options, n) <= left else replace(options, max_new_tokens=left)

    def check_fits(self, prompt: Prompt, options: Options) -> None:
        """Raise `SelfspecError` if the prompt and the new tokens that `options` request exceed the context length."""
        self.check_context(n := len(self.encode(prompt)), new_tokens(self.model, options, n))

    def _special_tokens(self, stops: Sequence[str]) -> frozenset[int]:
        """Return the ids of the special tokens among stop strings, which never appear in a decoded text."""
        if not stops or self.tokenizer is None:
            return frozenset()
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset(number for number, token in added.items() if token.special and str(token) in stops)

    def plan(self, prompt: Prompt, options: Options) -> Plan:
        """Resolve options for one generation. Raises `SelfspecError` for unsupported options and a too long prompt."""
        ids = self.encode(prompt)
        planned = plan(self.model, options, ids, ends=self.runtime.skeleton.ends)
        special = self._special_tokens(planned.stops)
        if special:
            planned = replace(planned, stop_tokens=special)
        self.check_context(len(ids), planned.max_new_tokens)
        return planned


@with_keyword_hints
def load(
    model: str,
    *,
    profile: str | Path | Profile = "auto",
    device: str | DeviceMap = "auto",
    dtype: str = "auto",
    layout: str = "auto",
    drafting: bool | None = None,
    quantized_drafts: bool | None = None,
    store: str | Path | None = None,
    answers: str | Path | None = None,
    method: str | None = None,
    tensor_parallel: bool = False,
    adapters: Mapping[str, str | Path] | None = None,
    extra_memory: float | None = None,
) -> LLM:
    """Load a model (folder, GGUF file, hub id, `smollm2-135m` or `builtin`) with the profile that drafts for it.

    `profile`: `auto` (a shipped profile measured on the same weights, unless decoding with it was slower than without
    drafts; the `default_profile` if none was measured), `none`, a file, the name of a shipped profile, or a `Profile`.
    `extra_memory`: the largest memory of the default profile's draft weights, as a share of the model's bytes; 0: no
    draft weights. The int8 copies of keys and values that quantised drafts read have what the weights leave of it: for
    longer texts drafts read the full cache. `device`: one device, or a `DeviceMap` for a model larger than one device.
    `dtype`: `auto` is float32 on a CPU, else the checkpoint's dtype.

    `layout`: the weight layout, see `layout.apply_layout_`; `auto` is the layout measured as fastest on this machine.
    `drafting`: whether `auto` chooses the fastest layout for drafting or for decoding without drafts;
    `quantized_drafts`: whether it counts on quantised drafts. Both follow the profile by default.

    `store`: a retrieval store, made by `selfspec index`. `answers`: a file of earlier answers to look up, to which new
    answers are added. `method`: a draft method that replaces the profile's method (see `profile.methods`).
    `tensor_parallel`: split the model over the processes of `torchrun`; `load` returns in the first process only.
    `adapters`: folders of PEFT adapters by name; each generation selects an adapter by its option `adapter`.

    Raises `SelfspecError` if the model, the profile, an adapter or a file cannot be loaded, or if they do not fit.
    """
    check_layout(layout)
    check_extra_memory(extra_memory)
    if store is not None:
        Store(store)
    if answers is not None:
        check_answers(answers)
    named = named_profile(profile)
    hold = not adapters and (layout == "native" or (layout == "auto" and takes_native()))
    loaded, tokenizer = load_model(model, device=device, dtype=dtype, parallel=tensor_parallel, hold=hold)
    loaded = load_adapters(loaded, adapters) if adapters else loaded
    identity = identity_of(loaded).model_copy(update={"name": model})
    chosen, default = resolve_profile(named, loaded, identity, method=method, extra_memory=extra_memory)
    bound = extra_memory * weight_bytes(loaded) if default and extra_memory is not None else None
    drafting = (chosen is not None and chosen.drafts) if drafting is None else drafting
    low = chosen is not None and any(alternative.path.low_precision for alternative in chosen.alternatives)
    if hold and held_dtypes(loaded) is not None:
        plain = layout = "native"
    else:
        plain = choose(layout_times(loaded), drafting=False) if layout == "auto" else layout
        quantized = low if quantized_drafts is None else quantized_drafts
        layout = apply_layout_(loaded, layout, drafting=drafting, quantized_drafts=quantized)
    llm = LLM(loaded, tokenizer, name=model, profile=with_lookup_files(chosen, identity, store, answers))
    llm.layout, llm.plain_layout, llm.has_default_profile = layout, plain, default
    _bound_copies(llm, bound)
    draft = "none" if llm.profile is None else llm.profile.draft.summary
    _log.info("%s: layout %s, dtype %s, drafts: %s", llm.name, layout, llm.runtime.dtype, draft)
    return llm


@with_keyword_hints
def wrap(
    model: Any,
    tokenizer: Any,
    *,
    profile: str | Path | Profile = "auto",
    name: str | None = None,
    store: str | Path | None = None,
    answers: str | Path | None = None,
    method: str | None = None,
    extra_memory: float | None = None,
) -> LLM:
    """Wrap a model that `transformers` has loaded; the model is not changed, and can still be used as before.

    Attach adapters, and hooks on leaf modules, before wrapping; wrap again after moving, casting, replacing or training
    weights. `profile`, `store`, `answers`, `method` and `extra_memory` are as in `load`. `name`: the model's name in
    profiles; by default the name in the model's config. Raises `SelfspecError` if the model is not supported, or if the
    profile or a file does not fit it.
    """
    named = named_profile(profile)
    check_extra_memory(extra_memory)
    llm = LLM(model, tokenizer, name=name)
    chosen, default = resolve_profile(named, model, llm.identity, method=method, extra_memory=extra_memory)
    if (chosen := with_lookup_files(chosen, llm.identity, store, answers)) is not None:
        llm._use(chosen)
    llm.has_default_profile = default
    _bound_copies(llm, extra_memory * weight_bytes(model) if default and extra_memory is not None else None)
    return llm


def _bound_copies(llm: LLM, bound: float | None) -> None:
    """Limit the draft weights and the int8 copies of keys and values together to `bound` bytes; None: no limit."""
    if bound is not None and llm.profile is not None:
        llm.runtime.max_copy_bytes = bound - llm.runtime.extra_bytes(llm.profile.path)
