"""The Python interface of selfspec: load or wrap a model, generate text, stream it, chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import parse_controller
from selfspec.drafters import LayerSkipDrafter, PlainDrafter, calibrate, make_drafter, make_guarded
from selfspec.drafters.registry import make_layer_skip
from selfspec.engine.loop import decode
from selfspec.llm.adapter_switch import AdapterSwitcher
from selfspec.llm.conversation import Conversation
from selfspec.llm.generate_many import generate_many
from selfspec.llm.local_costs import local_payoff
from selfspec.llm.messages import render, validate_messages
from selfspec.llm.options import GenerateOptions, ManyOptions, Options
from selfspec.llm.sampling_plan import Plan, new_tokens, plan, with_deadline
from selfspec.llm.signature import options_method
from selfspec.llm.stream import Generation, Stream
from selfspec.models.adapters import Adapters, load_adapters
from selfspec.models.layout import apply_layout_, check_layout, choose, layout_times, weight_bytes
from selfspec.models.loading import DeviceMap, load_model
from selfspec.models.skeleton import identity_of
from selfspec.profile.choosing import check_profile, choose_profile, named_profile, with_lookup_files
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.schema import Profile
from selfspec.proposers.history import check_answers
from selfspec.proposers.store import Store
from selfspec.runtime.factory import open_runtime
from selfspec.runtime.forward import Runtime
from selfspec.speculation.drafter import Drafter
from selfspec.speculation.sampling import as_integer
from selfspec.speculation.sequence import SequenceState
from selfspec.text.detokenizer import TextStream
from selfspec.text.guided import Guide
from selfspec.text.prompt import Message, Prompt, is_chat, is_unicode, token_ids
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath, as_path
from selfspec.types.identity import Identity
from selfspec.types.skip import SkipSet

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessor


def _generate(llm: LLM, prompt: Prompt, options: GenerateOptions) -> Generation:
    """Continue `prompt` as `LLM.generate` does, with the options in one object."""
    return llm.run(prompt, options, drafter=options.drafter, probabilities=options.probabilities)


def _stream(llm: LLM, prompt: Prompt, options: GenerateOptions) -> Stream:
    """Return a `Stream` of pieces of text without waiting for the first; takes the arguments of `generate`.

    The first round drafts nothing, so the first token is as fast as in plain decoding. The rules `token` and `block`
    draw in the order of the rounds, so with a seed their text therefore differs from the text of `generate`.
    """
    return llm.start(prompt, options, drafter=options.drafter, probabilities=options.probabilities)


def _chat(llm: LLM, messages: Sequence[Message], options: GenerateOptions) -> Generation:
    """Answer the last of `messages`, formatted by the tokenizer's chat template; options as in `generate`.

    Each message is `{"role": "system" or "user" or "assistant", "content": text}`; the last one is the user's. Raises
    `SelfspecError` as `generate` does, for malformed messages, and if the template is missing or fails on the messages.
    """
    return _generate(llm, render(llm.tokenizer, validate_messages(messages)), options)


def _chat_stream(llm: LLM, messages: Sequence[Message], options: GenerateOptions) -> Stream:
    """Answer as `chat` does, but return a `Stream` of pieces of text, as `stream` does."""
    return _stream(llm, render(llm.tokenizer, validate_messages(messages)), options)


class LLM:
    """A model, its tokenizer, and the profile that drafts for it; made by `load` or `wrap`.

    Without a profile, or with a profile that drafts nothing, decoding is plain. One stream runs at a time.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str | None = None, profile: Profile | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.runtime: Runtime = open_runtime(model)
        self.adapters = Adapters(model)
        self._adapter_switcher = AdapterSwitcher(self.adapters)
        self.name = name or self.runtime.skeleton.identity.name or "unnamed"
        self.layout: str | None = None  # the layout that `load` chose; `plain_layout`: for plain decoding
        self.plain_layout: str | None = None
        self.profile: Profile | None = None
        self.drafter: Drafter = PlainDrafter()
        if profile is not None:
            self._use(profile)

    def _use(self, profile: Profile) -> None:
        check_profile(profile, self.identity)
        self.profile = profile
        if profile.drafts:
            self.drafter = self.guarded_drafter(profile)

    @property
    def identity(self) -> Identity:
        """The identity of the model, as a profile records it."""
        return self.runtime.skeleton.identity.model_copy(update={"name": self.name})

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
        """Return a drafter that runs a draft path, or the whole model without a skip set.

        `controller`: an object, or text such as `fixed:k=4`; the profile's by default, without a profile the adaptive
        one. `vocabulary`: the only tokens that are drafted, for a cheaper head. `candidates`: the most tokens proposed
        for a position, the drafted one included. Raises `SelfspecError`.
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
            update={"candidates": candidates}
        )
        return make_layer_skip(self.runtime, draft, base.model_copy(update={"draft": draft}))

    def guarded_drafter(self, profile: Profile) -> Drafter:
        """Return the profile's drafter, wrapped by the guard that bounds its cost. Raises as `make_guarded` does."""
        return make_guarded(self.runtime, profile, local_payoff)

    def drafter_for(self, profile: Profile) -> Drafter:
        """Return the drafter that a profile describes. Raises `SelfspecError` if it does not fit the model."""
        return make_drafter(self.runtime, profile)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return token ids, of text by `tokenizer(prompt)`, of messages by the template. Raises `SelfspecError`."""
        if isinstance(prompt, str) and not is_unicode(prompt):
            raise SelfspecError("the prompt is not valid Unicode text; give UTF-8")
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
        """Return the prompt's token ids; raises `SelfspecError` if prompt and new tokens exceed the context."""
        ids = self.encode(prompt)
        self.check_context(len(ids), as_integer(max_new_tokens, "max_new_tokens", least=1))
        return ids

    def check_context(self, n: int, max_new_tokens: int) -> None:
        """Raise `SelfspecError` if `n` prompt tokens and `max_new_tokens` new ones exceed the context."""
        s = self.runtime.skeleton
        if n + max_new_tokens > s.context:
            fits = f"at most {s.context - n} new tokens fit" if n < s.context else "no new token fits"
            raise SelfspecError(
                f"a prompt of {n} tokens and {max_new_tokens} new ones outgrow {s.context_reason} "
                f"({s.context} positions): {fits} after this prompt"
            )

    def guide(self, *, regex: str | None = None, json_schema: str | Mapping[str, Any] | None = None) -> Guide:
        """Return a grammar that generated text must follow: a regular expression for the whole text, or a JSON schema.

        Needs the optional package `llguidance`. Raises `SelfspecError`.
        """
        return Guide(self.tokenizer, ends=self.runtime.skeleton.ends, regex=regex, json_schema=json_schema)

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
        drafter: Drafter | None = None,
        probabilities: bool = False,
    ) -> Generation:
        """Continue `prompt` (text or token ids), greedily by default.

        `config`: a `transformers` `GenerationConfig`, with its semantics in `transformers`' generate. Unset fields come
        from the model's own `generation_config` (`llm.model.generation_config` itself may be passed), then from
        `transformers`' defaults, such as top-k 50. The other arguments override the config. Without a config,
        `temperature` is 0 (greedy), `top_k` and `top_p` are off, and only the end tokens come from the checkpoint.
        The checkpoint's end tokens also apply if a config names none. `max_new_tokens` is 128 by default.

        With a `seed`, sampling is repeatable; under rule `match` the text is the same with and without drafting. The
        text ends before the first of the `stop` strings, which are searched for in the new text without its special
        tokens. `logits_processor`: further `transformers` logits processors, each a function of the tokens before a
        position; a drafted position gets the drafted tokens before it. `guide`: a grammar for the text, from
        `self.guide`. `rule`: the verification rule, one of `rules.RULES`; by default greedy, match with a seed, else
        block. `settings`: other fields of a `GenerationConfig`. `adapter`: the name of one of the model's adapters, or
        `base`. `drafter` replaces the profile's drafter; `PlainDrafter()` decodes plainly. With `probabilities`, the
        events of the generation hold the target's probability of each token, before temperature and processors.

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
            drafter=drafter,
            probabilities=probabilities,
        )
        return _generate(self, prompt, options)

    stream = options_method(GenerateOptions, _stream)
    chat = options_method(GenerateOptions, _chat)
    chat_stream = options_method(GenerateOptions, _chat_stream)
    generate_many = options_method(ManyOptions, generate_many)

    def conversation(self, *, system: str | None = None) -> Conversation:
        """Start a chat of several turns: `send` and `stream` add a message, and prefill only the new tokens.

        `system`: the system message. Raises `SelfspecError` if the tokenizer has no chat template, or if its template
        takes no system message.
        """
        return Conversation(self, system=system)

    def run(
        self,
        prompt: Prompt,
        options: Options,
        *,
        planned: Plan | None = None,
        drafter: Drafter | None = None,
        probabilities: bool = False,
    ) -> Generation:
        """Generate as `generate` does, with the options in one object; `planned` as in `start`."""
        stream = self.start(
            prompt,
            options,
            planned=planned,
            drafter=drafter,
            first_plain=False,
            pieces=False,
            probabilities=probabilities,
        )
        for _ in stream:
            pass
        return stream.result

    def start(
        self,
        prompt: Prompt,
        options: Options,
        *,
        planned: Plan | None = None,
        drafter: Drafter | None = None,
        first_plain: bool = True,
        pieces: bool = True,
        probabilities: bool = False,
        reuse: bool = False,
        ended: Callable[[str], None] | None = None,
    ) -> Stream:
        """Stream as `stream` does, with the options in one object.

        `planned`: the plan of this prompt and these options, for one generation; by default it is made here.
        `first_plain`: the first round drafts nothing. Without `pieces` all text comes at the end. `reuse`: keep the KV
        cache of the prefix that the prompt shares with the last sequence started with `reuse`, and prefill the rest.
        `ended` is called with the text when the stream ends, if it emitted a token.
        """
        ids = self.encode(prompt)
        planned = planned or self.plan(ids, options)
        drafter = drafter or self.drafter
        if planned.sampler.seeded:
            calibrate(drafter)
        text = TextStream(self.tokenizer, ids, planned.stops)
        seq = SequenceState(ids, planned.max_new_tokens, planned.sampler, planned.ends)
        stop = with_deadline(text.push, planned.config.max_time)
        decoding = partial(decode, self.runtime, drafter, seq, rule=planned.rule, stop=stop, first_plain=first_plain)
        rounds = self._adapter_switcher.rounds(options.adapter, lambda reuse: decoding(reuse=reuse), reuse=reuse)
        guided = options.guide is not None
        return Stream(rounds, seq, text, pieces=pieces, probabilities=probabilities, guided=guided, ended=ended)

    def fit_options(self, prompt: Prompt, options: Options) -> Options:
        """Return `options` with new tokens limited to the free context. Raises `SelfspecError` if no token fits."""
        self.check_context(n := len(self.encode(prompt)), 1)
        left = self.runtime.skeleton.context - n
        return options if new_tokens(self.model, options, n) <= left else replace(options, max_new_tokens=left)

    def check_fits(self, prompt: Prompt, options: Options) -> None:
        """Raise `SelfspecError` if the prompt and its new tokens exceed the context."""
        self.check_context(n := len(self.encode(prompt)), new_tokens(self.model, options, n))

    def plan(self, prompt: Prompt, options: Options) -> Plan:
        """Resolve options for one generation. Raises `SelfspecError` for unsupported options and too long a prompt."""
        ids = self.encode(prompt)
        planned = plan(self.model, options, ids, ends=self.runtime.skeleton.ends)
        self.check_context(len(ids), planned.max_new_tokens)
        return planned


def load(
    model: str = "builtin",
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
) -> LLM:
    """Load a model (folder, GGUF file, hub id, `smollm2-135m` or `builtin`) with the profile that drafts for it.

    `profile`: `auto` (a shipped profile measured on the same weights, unless it was slower), `none`, a file, the name
    of a shipped profile, or a `Profile`. `device`: one device, or a `DeviceMap` for a model larger than one device.
    `dtype`: `auto` is float32 on a CPU, else the checkpoint's. `layout`: the weight layout, see `layout.apply_layout_`;
    `auto` is the layout measured as fastest on this machine, for drafting or for plain decoding. `drafting` selects
    which, and `quantized_drafts` whether drafts are quantised; both follow the profile by default. `store`: a retrieval
    store, made by `selfspec index`. `answers`: a file of earlier answers to look up, to which new answers are added.
    `method`: another draft method than the profile's (`profile.methods`). `tensor_parallel`: split the model over the
    processes of `torchrun`; only the first process returns. `adapters`: PEFT folders by name; a request selects one by
    `adapter`. Raises `SelfspecError`.
    """
    check_layout(layout)
    if store is not None:
        Store(store)
    if answers is not None:
        check_answers(answers)
    named = named_profile(profile)
    loaded, tokenizer = load_model(model, device=device, dtype=dtype, parallel=tensor_parallel)
    loaded = load_adapters(loaded, adapters) if adapters else loaded
    identity = identity_of(loaded).model_copy(update={"name": model})
    chosen = choose_profile(identity, named, method)
    drafting = (chosen is not None and chosen.drafts) if drafting is None else drafting
    low = chosen is not None and any(alternative.path.low_precision for alternative in chosen.alternatives)
    plain = choose(layout_times(loaded), drafting=False) if layout == "auto" else layout
    layout = apply_layout_(
        loaded, layout, drafting=drafting, quantized_drafts=low if quantized_drafts is None else quantized_drafts
    )
    llm = LLM(loaded, tokenizer, name=model, profile=with_lookup_files(chosen, identity, store, answers))
    llm.layout, llm.plain_layout = layout, plain
    return llm


def wrap(
    model: Any,
    tokenizer: Any,
    *,
    profile: str | Path | Profile = "auto",
    name: str | None = None,
    store: str | Path | None = None,
    answers: str | Path | None = None,
    method: str | None = None,
) -> LLM:
    """Wrap a model that `transformers` has loaded; the model is not changed, and can still be used as before.

    Attach adapters, and hooks on leaf modules, before wrapping; wrap again after moving, casting or replacing
    weights. `profile`, `store`, `answers` and `method` are as in `load`. Raises `SelfspecError`.
    """
    named = named_profile(profile)
    llm = LLM(model, tokenizer, name=name)
    if (
        chosen := with_lookup_files(choose_profile(llm.identity, named, method), llm.identity, store, answers)
    ) is not None:
        llm._use(chosen)
    return llm
