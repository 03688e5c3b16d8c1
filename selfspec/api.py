"""selfspec from Python: load or wrap a model, generate, stream."""

from __future__ import annotations

import operator
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LogitsProcessor

from selfspec.controllers import make_controller, parse_controller
from selfspec.decode import decode
from selfspec.drafters import Drafter, LayerSkipDrafter, PlainDrafter
from selfspec.drafts import Outcome, SequenceState
from selfspec.errors import SelfspecError
from selfspec.loading import load_model
from selfspec.profile import ControllerSpec, Identity, Profile, find_profile_file, shipped_profiles
from selfspec.runtime import Runtime
from selfspec.sampling import Sampler
from selfspec.skip import SkipSet
from selfspec.stats import Stats
from selfspec.text import Prompt, TextStream, is_unicode
from selfspec.verify import find_rule


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished (or interrupted) generation: the new text, the new token ids, and what they cost."""

    text: str
    tokens: list[int]
    stats: Stats


class Stream:
    """A generation under way: iterate over its pieces of text; `result` is the `Generation` so far.

    `close()` ends it early and frees the model; leaving the iteration and dropping the stream does so too.
    """

    def __init__(self, rounds: Generator[Outcome], text: TextStream) -> None:
        self._text = text
        self._tokens: list[int] = []
        self._stats = Stats()
        # The generator knows nothing of this object, so that dropping the stream ends it at once.
        self._pieces = _pieces(rounds, text, self._tokens, self._stats)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def result(self) -> Generation:
        """Text, tokens and stats so far; final once the iteration has ended."""
        return Generation(self._text.text, list(self._tokens), self._stats)

    def close(self) -> None:
        """End the generation now; what was emitted stays in `result`."""
        self._pieces.close()


def _pieces(rounds: Generator[Outcome], text: TextStream, tokens: list[int], stats: Stats) -> Generator[str]:
    """Pieces of text as the rounds bring them; `tokens` and `stats` are filled along the way."""
    start = time.perf_counter()
    try:
        for outcome in rounds:
            stats.rounds += 1
            stats.drafted += outcome.draft.depth
            stats.nodes += len(outcome.draft)
            stats.accepted += outcome.accepted
            stats.tokens += len(outcome.tokens)
            tokens += outcome.tokens
            stats.seconds += time.perf_counter() - start
            if piece := text.take():
                yield piece
            start = time.perf_counter()  # what the reader does in between is not ours
    finally:
        rounds.close()
        text.finish()
    if piece := text.take():
        yield piece


class LLM:
    """A model, its tokenizer, and the profile it drafts with; made by `load` or `wrap`.

    Without a profile, or with one that skips nothing, it decodes plainly. One stream at a time.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str | None = None, profile: Profile | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.runtime = Runtime(model)
        self.name = name or self.runtime.skeleton.identity.name or "unnamed"
        self.profile: Profile | None = None
        self.drafter: Drafter = PlainDrafter()
        if profile is not None:
            self._use(profile)

    def _use(self, profile: Profile) -> None:
        check_profile(profile, self.identity)
        self.profile = profile
        if len(profile.skip_set):
            self.drafter = self.layer_skip(profile.skip_set, profile.controller)

    @property
    def identity(self) -> Identity:
        """Which model this is, as a profile records it."""
        return self.runtime.skeleton.identity.model_copy(update={"name": self.name})

    def layer_skip(self, skip: SkipSet, controller: ControllerSpec | str | None = None) -> LayerSkipDrafter:
        """A drafter that bypasses `skip`; without a controller, the profile's, else the adaptive threshold.

        A controller may be given as text, such as `fixed:k=4`. Raises `SelfspecError`.
        """
        if isinstance(controller, str):
            controller = parse_controller(controller)
        if controller is None:
            controller = self.profile.controller if self.profile else ControllerSpec(name="adaptive")
        return LayerSkipDrafter(self.runtime, skip, make_controller(controller))

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, as `tokenizer(prompt)` gives them. Raises `SelfspecError` when empty or wrong."""
        if isinstance(prompt, str) and not is_unicode(prompt):
            raise SelfspecError("the prompt is not valid Unicode text; give UTF-8")
        ids = list(self.tokenizer(prompt).input_ids) if isinstance(prompt, str) else _token_ids(prompt)
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
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise SelfspecError(f"max_new_tokens {max_new_tokens}: want a whole number of at least 1")
        s, n = self.runtime.skeleton, len(ids)
        if n + max_new_tokens > s.context:
            fits = f"at most {s.context - n} new tokens fit" if n < s.context else "no new token fits"
            raise SelfspecError(
                f"a prompt of {n} tokens and {max_new_tokens} new ones outgrow {s.limit} ({s.context} positions): "
                f"{fits} after this prompt"
            )
        return ids

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        logits_processor: Sequence[LogitsProcessor] = (),
        drafter: Drafter | None = None,
    ) -> Generation:
        """Continue `prompt` (text or token ids) by at most `max_new_tokens` tokens.

        `temperature` 0 is greedy; `top_k` and `top_p` are off when None; `seed` makes sampling repeatable. The text
        ends before the first of the `stop` strings. `logits_processor`: further `transformers` processors, each of
        which sees the right prefix at every drafted position. `drafter` replaces the profile's; `PlainDrafter()`
        decodes plainly.

        Raises `SelfspecError` for a wrong option, or when prompt and output outgrow the context; `BusyError` while
        a stream of this model has not ended.
        """
        sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, processors=logits_processor)
        stream = self._stream(prompt, max_new_tokens, sampler, stop, drafter, first_plain=False)
        for _ in stream:
            pass
        return stream.result

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        logits_processor: Sequence[LogitsProcessor] = (),
        drafter: Drafter | None = None,
    ) -> Stream:
        """Like `generate`, but returns at once; iterate over the pieces of text as they come.

        The first token comes as soon as plain decoding's, unless a seeded sample must equal `generate`'s.
        """
        sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, processors=logits_processor)
        first_plain = sampler.greedy or not sampler.seeded
        return self._stream(prompt, max_new_tokens, sampler, stop, drafter, first_plain=first_plain)

    def _stream(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        sampler: Sampler,
        stop: str | Sequence[str],
        drafter: Drafter | None,
        *,
        first_plain: bool,
    ) -> Stream:
        ids = self.check(prompt, max_new_tokens)
        stops = [stop] if isinstance(stop, str) else list(stop)
        if not all(isinstance(stop, str) and stop and is_unicode(stop) for stop in stops):
            raise SelfspecError("a stop string is empty or no text; want at least one character")
        text = TextStream(self.tokenizer, ids, stops)
        seq = SequenceState(ids, max_new_tokens, sampler, self.runtime.skeleton.ends)
        rounds = decode(
            self.runtime,
            drafter or self.drafter,
            seq,
            rule=find_rule(None, sampler),
            stop=text.push,
            first_plain=first_plain,
        )
        return Stream(rounds, text)


def load(
    model: str = "builtin", *, profile: str | Path | Profile = "auto", device: str = "auto", dtype: str = "auto"
) -> LLM:
    """Load `builtin`, a folder, or a hub id, with the profile to draft with.

    `profile`: `auto` (a shipped one made for these very weights, unless it was measured to be slower), `none`, a
    file, the name of a shipped profile, or a `Profile`. `dtype` `auto`: float32 on a CPU, else the checkpoint's.
    Raises `SelfspecError`.
    """
    named = profile if profile in ("auto", "none") or isinstance(profile, Profile) else find_profile_file(profile)
    loaded, tokenizer = load_model(model, device=device, dtype=dtype)
    return wrap(loaded, tokenizer, profile=named, name=model)


def wrap(model: Any, tokenizer: Any, *, profile: str | Path | Profile = "auto", name: str | None = None) -> LLM:
    """Use a model that `transformers` has loaded; it is not changed, and can still be used as before.

    Adapters, and hooks on leaf modules, should be in place already; wrap again after moving, casting or replacing
    weights. `profile` as in `load`. Raises `SelfspecError`.
    """
    if isinstance(profile, Profile):
        return LLM(model, tokenizer, name=name, profile=profile)
    if profile == "none":
        return LLM(model, tokenizer, name=name)
    if profile != "auto":
        return LLM(model, tokenizer, name=name, profile=find_profile_file(profile))
    llm = LLM(model, tokenizer, name=name)
    mine = [p for p in shipped_profiles().values() if _made_for(p, llm.identity) and not p.slower]
    if mine:
        llm._use(mine[0])
    return llm


def _token_ids(prompt: Any) -> list[int]:
    """Token ids from any sequence of whole numbers, a tensor or an array `[n]` or `[1, n]` among them."""
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(ids, (list, tuple)) and len(ids) == 1 and isinstance(ids[0], (list, tuple)):
        ids = ids[0]
    if not isinstance(ids, Sequence) or isinstance(ids, (bytes, bytearray)) or any(isinstance(i, bool) for i in ids):
        raise SelfspecError(f"a prompt is a text or token ids; got {type(prompt).__name__}")
    try:
        return [operator.index(i) for i in ids]
    except TypeError:
        raise SelfspecError("a prompt's token ids are whole numbers; got something else among them") from None


def check_profile(profile: Profile, identity: Identity) -> None:
    """Raise `SelfspecError` when a profile is of another architecture; warn when of other weights."""
    if difference := profile.model.mismatch(identity):
        raise SelfspecError(f"the profile is of another model: {difference}; search one with: selfspec search")
    if profile.model.other_weights(identity):
        warnings.warn(
            "the profile was made for other weights of this architecture; it is lossless all the same, but may be slow",
            stacklevel=2,
        )


def _made_for(profile: Profile, identity: Identity) -> bool:
    if profile.model.mismatch(identity):
        return False
    if profile.model.fingerprint and identity.fingerprint:
        return not profile.model.other_weights(identity)
    return profile.model.name is not None and profile.model.name == identity.name
