"""Conversion of a request's body to prompts as token ids, and to the decoding options of each requested text."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from selfspec.basics.errors import SelfspecError
from selfspec.server.protocol import Settings
from selfspec.server.request_schemas import ApiError, BaseRequest, ChatBody, CompletionBody, wrong
from selfspec.text.prompt_template import Message

if TYPE_CHECKING:
    from selfspec.llm.llm import LLM
    from selfspec.llm.options import Options
    from selfspec.llm.sampling_plan import Plan
    from selfspec.text.guided import Guide
    from selfspec.text.prompt_template import Prompt


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_READ = ("role", "content", "name")  # a name is accepted, but not passed to the template
_NOTHING: tuple[Any, ...] = (None, [], "", {})


def read_messages(messages: list[Any]) -> list[Message]:
    """Return the messages, the parts of each content joined. Raises `ApiError`, which names the wrong message."""
    if not messages:
        raise wrong("messages: the list is empty; expected at least one message of the user", "messages")
    return [_message(entry, f"messages[{number}]") for number, entry in enumerate(messages)]


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, Mapping):
        raise wrong(f"{where}: expected an object with role and content", where)
    role = entry.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role: expected one of {', '.join(_ROLES)}", f"{where}.role")
    for name, value in entry.items():
        if name not in _READ and value not in _NOTHING:
            raise wrong(f"{where}.{name[:60]}: is not served", f"{where}.{name[:60]}")
    return {"role": _ROLES[role], "content": _content(entry.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise wrong(f"{where}: expected a text, or parts of type 'text'", where)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise wrong(f"{where}: expected parts of type 'text', each with a text; other types are not served", where)
    return "".join(part["text"] for part in content)


class Penalties(LogitsProcessor):  # type: ignore[misc]
    """Logits processor that penalises tokens which the new text contains already.

    It subtracts `frequency` for each occurrence of a token, and `presence` once if the token occurs. The result depends
    only on the tokens so far, as it must for every processor. `prompt`: the number of tokens before the new text.
    """

    def __init__(self, prompt: int, *, presence: float, frequency: float) -> None:
        self._prompt, self._presence, self._frequency = prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the penalised scores. `input_ids`: `[B, n]`, `scores`: `[B, V]`."""
        new = input_ids[:, self._prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


CHARACTERS = 32  # maximum characters of a prompt for each token that fits; longer prompts are not tokenised
_GUIDES = 32  # maximum number of JSON schemas whose guides are cached


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One requested text: its prompt (token ids), its decoding options, and its plan if that has been made already."""

    prompt: tuple[int, ...]
    options: Options
    planned: Plan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A parsed request, as far as the worker pool and the responses need it.

    `texts`: `n` texts for each prompt, in the prompts' order. `shown`: for each text, the prompt's text if the request
    asks to `echo` it, else "". `prompt_tokens`: the tokens of all prompts, each prompt counted once. `echo`: the
    response begins with the prompt, and `top` includes its tokens. `prompt_only`: no new token is asked for. `top`: the
    number of top log probabilities per token, as in `Batch.add`. `stream`: stream the response. `usage`: report the
    usage in a stream. `sources`: report the origin of each piece of text.
    """

    model: str
    texts: tuple[TextRequest, ...]
    shown: tuple[str, ...]
    prompt_tokens: int
    top: int | None = None
    echo: bool = False
    prompt_only: bool = False
    stream: bool = False
    usage: bool = False
    sources: bool = False


class RequestParser:
    """Parser of requests for one model.

    `chat` and `completion` are slow for long prompts, and `guide` for new schemas. Each is to be called from one thread
    at a time; `guide` can have a thread of its own.

    `longest`: the most tokens of one sequence that the KV cache of every replica holds.
    """

    def __init__(self, llm: LLM, settings: Settings, *, longest: int) -> None:
        self._llm, self._settings, self._longest = llm, settings, longest
        self._guides: OrderedDict[str, Guide] = OrderedDict()

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its new text: what the context, the KV cache and `max_model_len` allow."""
        positions = min(int(self._llm.runtime.skeleton.context), self._longest)
        return min(positions + 1, self._settings.max_model_len or positions + 1)  # the last token needs no position

    @property
    def has_chat_template(self) -> bool:
        """Whether the model's tokenizer has a chat template."""
        return bool(getattr(self._llm.tokenizer, "chat_template", None))

    def check_model(self, name: str) -> None:
        """Raise `ApiError` if no served model has this name."""
        if name not in self._settings.names:
            served = ", ".join(self._settings.names)
            raise ApiError(
                404, f"the model '{name[:200]}' does not exist; served: {served}", param="model", code="model_not_found"
            )

    def guide(self, body: BaseRequest) -> Guide | None:
        """Return the guide of a request's response format; None: any text is allowed. Raises `ApiError`."""
        schema = None if body.response_format is None else body.response_format.schema_text
        if schema is None:
            return None
        key = json.dumps(schema)
        if key not in self._guides:
            try:
                self._guides[key] = self._llm.guide(json_schema=schema)
            except SelfspecError as error:
                raise wrong(str(error), "response_format") from None
            if len(self._guides) > _GUIDES:
                self._guides.popitem(last=False)
        self._guides.move_to_end(key)
        return self._guides[key]

    def chat(self, body: ChatBody, guide: Guide | None) -> ParsedRequest:
        """Parse a chat request; `guide` is that of `self.guide`. Raises `ApiError`."""
        messages = read_messages(body.messages)
        self._check_length(sum(len(entry["content"]) for entry in messages), "messages")
        prompts = [("messages", self._encode(messages, "messages"))]
        return self._parse(body, body.top, prompts, guide, echo=False)

    def completion(self, body: CompletionBody, guide: Guide | None) -> ParsedRequest:
        """Parse a completion request; `guide` is that of `self.guide`. Raises `ApiError`."""
        for prompt in body.prompts:
            self._check_length(len(prompt), "prompt")
        prompts = [("prompt", self._encode(prompt, "prompt")) for prompt in body.prompts]
        return self._parse(body, body.top, prompts, guide, echo=body.echo)

    def _check_length(self, length: int, param: str) -> None:
        """Raise `ApiError` for a prompt of more characters, or token ids, than can fit."""
        most = CHARACTERS * self.max_model_len
        if length > most:
            message = f"the prompt has {length} characters or token ids; expected at most {most}"
            raise wrong(message, param, "context_length_exceeded")

    def _parse(
        self,
        body: BaseRequest,
        top: int | None,
        prompts: Sequence[tuple[str, list[int]]],
        guide: Guide | None,
        *,
        echo: bool,
    ) -> ParsedRequest:
        if body.stream_options is not None and not body.stream:
            raise wrong("stream_options: given without stream; expected stream: true", "stream_options")
        base_options = replace(
            self._options(body, guide), adapter=body.model if body.model in self._llm.adapters.names else None
        )
        texts, shown = [], []
        for param, ids in prompts:
            options = self._fitted(body, base_options, ids, param)
            planned = self._plan(ids, options)
            before = str(self._llm.tokenizer.decode(ids, skip_special_tokens=True)) if echo else ""
            prompt = tuple(ids)
            for number in range(body.n):
                seed = None if body.seed is None else body.seed + number
                texts.append(TextRequest(prompt, replace(options, seed=seed), None if number else planned))
                shown.append(before)
        stream_options = body.stream_options
        return ParsedRequest(
            model=body.model,
            texts=tuple(texts),
            shown=tuple(shown),
            prompt_tokens=sum(len(ids) for _, ids in prompts),
            top=top,
            echo=echo,
            prompt_only=body.limit == 0,
            stream=body.stream,
            usage=stream_options is not None and stream_options.include_usage,
            sources=stream_options is not None and stream_options.selfspec,
        )

    def _encode(self, prompt: Prompt, param: str) -> list[int]:
        try:
            return list(self._llm.encode(prompt))
        except SelfspecError as error:
            raise wrong(str(error), param) from None

    def _options(self, body: BaseRequest, guide: Guide | None) -> Options:
        """Return the decoding options that do not depend on the prompt."""
        from selfspec.llm.options import Options

        settings: dict[str, Any] = {}
        if body.min_p:
            settings["min_p"] = body.min_p
        if body.repetition_penalty != 1:
            settings["repetition_penalty"] = body.repetition_penalty
        if body.logit_bias:
            vocabulary = self._llm.runtime.skeleton.identity.vocabulary or 0
            if unknown := next((token for token in body.biases if not 0 <= token < vocabulary), None):
                raise wrong(f"token {str(unknown)[:20]} is not in the vocabulary of {vocabulary}", "logit_bias")
            settings["sequence_bias"] = [[[token], bias] for token, bias in body.biases.items()]
        sampled = body.temperature > 0
        return Options(
            temperature=body.temperature,
            top_k=body.top_k if body.top_k > 0 and sampled else None,
            top_p=body.top_p if body.top_p < 1 and sampled else None,
            stop=body.stops,
            guide=guide,
            settings=settings,
        )

    def _fitted(self, body: BaseRequest, base_options: Options, ids: Sequence[int], param: str) -> Options:
        """Return `base_options` with the options that depend on the prompt: new tokens, penalties and seed.

        `ids`: the prompt. `param`: the request field to name in errors about the prompt. Raises `ApiError` if prompt
        and new tokens are too many.
        """
        most, left = self._settings.max_tokens, self.max_model_len - len(ids)
        if most is not None and body.limit is not None and body.limit > most:
            raise wrong(f"expected at most {most} new tokens, got {body.limit}", "max_tokens")
        if left < 1:
            too_long = f"the prompt has {len(ids)} tokens; expected at most {self.max_model_len - 1}"
            raise wrong(too_long, param, "context_length_exceeded")
        new = body.limit if body.limit is not None else min(left, most or left)
        if new > left:
            message = (
                f"the prompt's {len(ids)} tokens and {new} new ones exceed the {self.max_model_len} tokens that fit; "
                f"expected at most {left} new ones"
            )
            raise wrong(message, "max_tokens", "context_length_exceeded")
        penalties = []
        if body.presence_penalty or body.frequency_penalty:
            penalties.append(Penalties(len(ids), presence=body.presence_penalty, frequency=body.frequency_penalty))
        return replace(base_options, max_new_tokens=max(new, 1), logits_processor=penalties, seed=body.seed)

    def _plan(self, ids: Sequence[int], options: Options) -> Plan:
        try:
            return self._llm.plan(ids, options)
        except SelfspecError as error:
            raise wrong(str(error)) from None
