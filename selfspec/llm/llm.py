"""selfspec from Python: load or wrap a model, generate, stream."""

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
from selfspec.llm.messages import checked, render
from selfspec.llm.options import GenerateOptions, ManyOptions, Options
from selfspec.llm.sampling_plan import Plan, new_tokens, plan, timed
from selfspec.llm.signature import takes
from selfspec.llm.stream import Generation, Stream
from selfspec.models.adapters import Adapters, beside
from selfspec.models.layout import check_layout, choose, lay_out_, layout_times, weight_bytes
from selfspec.models.loading import DeviceMap, load_model
from selfspec.models.skeleton import identity_of
from selfspec.profile.choosing import check_profile, choose_profile, guessing, named_profile
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.schema import Profile
from selfspec.proposers.history import check_answers
from selfspec.proposers.store import Store
from selfspec.runtime.factory import open_runtime
from selfspec.runtime.forward import Runtime
from selfspec.speculation.drafter import Drafter
from selfspec.speculation.sampling import whole
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
    """Continue `prompt` as `LLM.generate` does, with its options in one object."""
    return llm.run(prompt, options, drafter=options.drafter, probabilities=options.probabilities)


def _stream(llm: LLM, prompt: Prompt, options: GenerateOptions) -> Stream:
    """Return at once a `Stream` of pieces of text, with the arguments of `generate`.

    The first round drafts nothing, so that the first token comes as soon as plain decoding's. With a seed and rule
    `token` or `block`, which draw in the order of the rounds, the text is therefore not `generate`'s.
    """
    return llm.start(prompt, options, drafter=options.drafter, probabilities=options.probabilities)


def _chat(llm: LLM, messages: Sequence[Message], options: GenerateOptions) -> Generation:
    """Answer the last of `messages`, by the tokenizer's chat template; options as in `generate`.

    Each message is `{"role": "system" or "user" or "assistant", "content": text}`; the last one is the user's. Raises
    `SelfspecError` as `generate` does, for messages that are none, and where there is no template or it fails on them.
    """
    return _generate(llm, render(llm.tokenizer, checked(messages)), options)


def _chat_stream(llm: LLM, messages: Sequence[Message], options: GenerateOptions) -> Stream:
    """Like `chat`, but returns at once; iterate over the pieces of text as they come, as with `stream`."""
    return _stream(llm, render(llm.tokenizer, checked(messages)), options)


class LLM:
    """A model, its tokenizer, and the profile it drafts with; made by `load` or `wrap`.

    Without a profile, or with one that drafts nothing, it decodes plainly. One stream at a time.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str | None = None, profile: Profile | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.runtime: Runtime = open_runtime(model)
        self.adapters = Adapters(model)
        self._turns = AdapterSwitcher(self.adapters)
        self.name = name or self.runtime.skeleton.identity.name or "unnamed"
        self.layout: str | None = None  # how `load` laid the weights out, and would have for plain decoding
        self.plain_layout: str | None = None
        self.profile: Profile | None = None
        self.drafter: Drafter = PlainDrafter()
        if profile is not None:
            self._use(profile)

    def _use(self, profile: Profile) -> None:
        check_profile(profile, self.identity)
        self.profile = profile
        if profile.drafts:
            self.drafter = self.guarded(profile)

    @property
    def identity(self) -> Identity:
        """Which model this is, as a profile records it."""
        return self.runtime.skeleton.identity.model_copy(update={"name": self.name})

    @property
    def weight_bytes(self) -> int:
        """Memory that the model's weights take."""
        return weight_bytes(self.model)

    def layer_skip(
        self,
        path: DraftPath | SkipSet,
        controller: ControllerSpec | str | None = None,
        vocabulary: Sequence[int] | None = None,
        *,
        candidates: int = 1,
    ) -> LayerSkipDrafter:
        """A drafter along a path, or that bypasses a skip set; without a controller, the profile's, else the adaptive.

        A controller may be given as text, such as `fixed:k=4`. `vocabulary`: the only tokens that are drafted, for a
        cheaper head. `candidates`: tokens proposed for each place at most, the drafted one counted. Raises
        `SelfspecError`.
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
        # made without checks: the drafter makes them
        draft = LayerSkipSpec.of(path, controller, confidence=confidence).model_copy(update={"candidates": candidates})
        return make_layer_skip(self.runtime, draft, base.model_copy(update={"draft": draft}))

    def guarded(self, profile: Profile) -> Drafter:
        """The drafter that a profile describes, kept from costing more than the guard's bound. Raises as that does."""
        return make_guarded(self.runtime, profile, local_payoff)

    def drafts_with(self, profile: Profile) -> Drafter:
        """The drafter that a profile describes. Raises `SelfspecError` where it does not fit the model."""
        return make_drafter(self.runtime, profile)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids, a text's as `tokenizer(prompt)` gives them, messages' by its template. Raises `SelfspecError`."""
        if isinstance(prompt, str) and not is_unicode(prompt):
            raise SelfspecError("the prompt is not valid Unicode text; give UTF-8")
        if is_chat(prompt):
            prompt = render(self.tokenizer, checked(prompt))
        ids = list(self.tokenizer(prompt).input_ids) if isinstance(prompt, str) else token_ids(prompt)
        if not ids:
            raise SelfspecError("the prompt is empty; give at least one token")
        vocabulary = self.runtime.skeleton.identity.vocabulary or 0
        wrong = next((i for i in ids if not 0 <= i < vocabulary), None)
        if wrong is not None:
            raise SelfspecError(f"token id {wrong} is not in the model's vocabulary of {vocabulary}")
        return ids

    def check(self, prompt: Prompt, max_new_tokens: int) -> list[int]:
        """The token ids of a prompt that leaves room for the new tokens; raises `SelfspecError` otherwise."""
        ids = self.encode(prompt)
        self.check_room(len(ids), whole(max_new_tokens, "max_new_tokens", least=1))
        return ids

    def check_room(self, n: int, max_new_tokens: int) -> None:
        """Raise `SelfspecError` where a prompt of `n` tokens and so many new ones outgrow the context."""
        s = self.runtime.skeleton
        if n + max_new_tokens > s.context:
            fits = f"at most {s.context - n} new tokens fit" if n < s.context else "no new token fits"
            raise SelfspecError(
                f"a prompt of {n} tokens and {max_new_tokens} new ones outgrow {s.limit} ({s.context} positions): "
                f"{fits} after this prompt"
            )

    def guide(self, *, regex: str | None = None, json_schema: str | Mapping[str, Any] | None = None) -> Guide:
        """A grammar that generated text must follow: a regular expression of the whole of it, or a JSON schema.

        Needs the optional `llguidance`. Raises `SelfspecError`.
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

        `config` is a `transformers` `GenerationConfig`, with the meaning that it has in `transformers`' generate. A
        field that it leaves open comes from the model's own `generation_config` (`llm.model.generation_config` itself
        may be passed), then from `transformers`' defaults, such as top-k 50. The other arguments override it. Without a
        config, `temperature` is 0 (greedy), `top_k` and `top_p` are off, and the checkpoint gives the end tokens
        alone; its end tokens also serve a config that names none. At most `max_new_tokens` tokens are generated, 128
        by default.

        With a `seed`, sampling is repeatable; under rule `match` the text is the same with and without drafting. The
        text ends before the first of the `stop` strings, which are searched for in the new text without its special
        tokens. `logits_processor`: further `transformers` processors, each a function of the tokens before a position;
        drafted positions get the right ones. `guide`: a grammar for the text, from `self.guide`. `rule`: the
        verification rule, one of `rules.RULES`; by default greedy, match with a seed, else block. `settings`: other
        fields of a `GenerationConfig`. `adapter`: the name of one of the model's adapters, or `base`. `drafter`
        replaces the profile's; `PlainDrafter()` decodes plainly. With `probabilities`, the generation's events hold
        the target's probability of each token, before temperature and processors.

        Raises `SelfspecError` for a wrong argument, and when prompt and output outgrow the context; `BusyError` while
        a stream of this model has not ended.
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

    stream = takes(GenerateOptions, _stream)
    chat = takes(GenerateOptions, _chat)
    chat_stream = takes(GenerateOptions, _chat_stream)
    generate_many = takes(ManyOptions, generate_many)

    def conversation(self, *, system: str | None = None) -> Conversation:
        """A chat that goes on: `send` and `stream` say something, and read only what is new since the last answer.

        `system`: a message that comes first. Raises `SelfspecError` where the tokenizer has no chat template, or one
        that takes no system message.
        """
        return Conversation(self, system=system)

    def run(
        self, prompt: Prompt, options: Options, *, drafter: Drafter | None = None, probabilities: bool = False
    ) -> Generation:
        """`generate`, with its options in one object."""
        stream = self.start(
            prompt, options, drafter=drafter, first_plain=False, pieces=False, probabilities=probabilities
        )
        for _ in stream:
            pass
        return stream.result

    def start(
        self,
        prompt: Prompt,
        options: Options,
        *,
        drafter: Drafter | None = None,
        first_plain: bool = True,
        pieces: bool = True,
        probabilities: bool = False,
        reuse: bool = False,
        ended: Callable[[str], None] | None = None,
    ) -> Stream:
        """`stream`, with its options in one object.

        `first_plain`: the first round drafts nothing. Without `pieces` all text comes at the end. With `reuse` only
        what follows of the beginning that the prompt shares with the last one of those that reused is read. `ended`
        is told the text when it is over, if there is any token of it.
        """
        ids = self.encode(prompt)
        planned = self.plan(ids, options)
        drafter = drafter or self.drafter
        if planned.sampler.seeded:
            calibrate(drafter)
        text = TextStream(self.tokenizer, ids, planned.stops)
        seq = SequenceState(ids, planned.max_new_tokens, planned.sampler, planned.ends)
        stop = timed(text.push, planned.config.max_time)
        decoding = partial(decode, self.runtime, drafter, seq, rule=planned.rule, stop=stop, first_plain=first_plain)
        rounds = self._turns.rounds(options.adapter, lambda reuse: decoding(reuse=reuse), reuse=reuse)
        guided = options.guide is not None
        return Stream(rounds, seq, text, pieces=pieces, probabilities=probabilities, guided=guided, ended=ended)

    def fitted(self, prompt: Prompt, options: Options) -> Options:
        """`options`, with fewer new tokens where no more fit after the prompt. Raises `SelfspecError` where none do."""
        self.check_room(n := len(self.encode(prompt)), 1)
        left = self.runtime.skeleton.context - n
        return options if new_tokens(self.model, options, n) <= left else replace(options, max_new_tokens=left)

    def plan(self, prompt: Prompt, options: Options) -> Plan:
        """What options come to for a prompt. Raises `SelfspecError` for what cannot be done."""
        ids = self.encode(prompt)
        planned = plan(self.model, options, ids, ends=self.runtime.skeleton.ends)
        self.check_room(len(ids), planned.max_new_tokens)
        return planned


def load(
    model: str = "builtin",
    *,
    profile: str | Path | Profile = "auto",
    device: str | DeviceMap = "auto",
    dtype: str = "auto",
    layout: str = "auto",
    drafting: bool | None = None,
    few_bits: bool | None = None,
    store: str | Path | None = None,
    answers: str | Path | None = None,
    method: str | None = None,
    tensor_parallel: bool = False,
    adapters: Mapping[str, str | Path] | None = None,
) -> LLM:
    """Load a folder, a GGUF file, a hub id, `smollm2-135m` or `builtin`, with the profile to draft with.

    `profile`: `auto` (a shipped one measured on these very weights, unless it was slower), `none`, a file, the name of
    a shipped profile, or a `Profile`. `device`: one, or a `DeviceMap` for a model larger than one. `dtype` `auto`:
    float32 on a CPU, else the checkpoint's. `layout`: how the weights lie in memory, see `layout.lay_out_`; `auto` is
    what was measured to be fastest here, for drafting or for plain decoding. `drafting` says for which, and `few_bits`
    whether drafts run in few bits; left out, as the profile does. `store`: a file of texts to guess from, which
    `selfspec index` made; `answers`: one of earlier answers to guess from, to which new ones are added.
    `method`: another way to draft than the profile's (`profile.methods`). `tensor_parallel`: the processes of
    `torchrun` share it; only the first comes back. `adapters`: PEFT folders by name, of which requests choose by
    `adapter`. Raises `SelfspecError`.
    """
    check_layout(layout)
    if store is not None:
        Store(store)
    if answers is not None:
        check_answers(answers)
    named = named_profile(profile)
    loaded, tokenizer = load_model(model, device=device, dtype=dtype, parallel=tensor_parallel)
    loaded = beside(loaded, adapters) if adapters else loaded
    identity = identity_of(loaded).model_copy(update={"name": model})
    chosen = choose_profile(identity, named, method)
    drafting = (chosen is not None and chosen.drafts) if drafting is None else drafting
    low = chosen is not None and any(one.path.low_precision for one in chosen.alternatives)
    plain = choose(layout_times(loaded), drafting=False) if layout == "auto" else layout
    layout = lay_out_(loaded, layout, drafting=drafting, few_bits=low if few_bits is None else few_bits)
    llm = LLM(loaded, tokenizer, name=model, profile=guessing(chosen, identity, store, answers))
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
    """Use a model that `transformers` has loaded; it is not changed, and can still be used as before.

    Adapters, and hooks on leaf modules, should be in place already; wrap again after moving, casting or replacing
    weights. `profile`, `store`, `answers` and `method` as in `load`. Raises `SelfspecError`.
    """
    named = named_profile(profile)
    llm = LLM(model, tokenizer, name=name)
    if (chosen := guessing(choose_profile(llm.identity, named, method), llm.identity, store, answers)) is not None:
        llm._use(chosen)
    return llm
