"""The target's own continuations of the calibration prompts, made once and kept on disk by what they depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from transformers import LogitsProcessor

from selfspec.basics.files import cache_folder, read_cached, write_cached
from selfspec.drafters import PlainDrafter
from selfspec.llm.llm import LLM
from selfspec.llm.options import Options
from selfspec.speculation.rules import find_rule
from selfspec.speculation.sampling import Sampler

from .target_text import Text


@dataclass(frozen=True, slots=True)
class Decoding:
    """How tokens are chosen, and sampled drafts verified: as `LLM.generate` takes it."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    logits_processor: tuple[LogitsProcessor, ...] = ()
    rule: str | None = None

    def check(self) -> None:
        """Raise `SelfspecError` for a value out of range, and for a rule that does not fit."""
        find_rule(self.rule, Sampler(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self._seed))

    @property
    def _seed(self) -> int | None:
        """Rule `match` needs one."""
        return 0 if self.rule == "match" else None

    @property
    def verified_by(self) -> str:
        """The rule, where none is named the default without a seed."""
        return self.rule or ("greedy" if self.temperature == 0 else "block")

    def sampler(self) -> Sampler:
        """A sampler of this kind. Raises `SelfspecError` for a value out of range."""
        return Sampler(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, processors=self.logits_processor
        )

    def options(self, *, seed: int | None = None) -> Options:
        """As `LLM.run` takes it."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return Options(**named, seed=self._seed if seed is None else seed)


def continue_prompts(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    seed: int = 0,
    on_prompt: Callable[[int], None] | None = None,
) -> list[Text]:
    """Decode every prompt (token ids) plainly, or read back what was decoded before.

    `on_prompt` is told how many are done. The first prompt is always decoded, to see that the others are of this very
    model. A cache that cannot be written is done without; one that cannot be read is made again. What further
    processors do cannot be told by content: with them nothing is kept.
    """
    seeds = [None if decoding.temperature == 0 else seed * 65_537 + number for number in range(len(prompts))]

    def decode(number: int) -> list[int]:
        if on_prompt is not None:
            on_prompt(number)
        options = replace(decoding, rule=None).options(seed=seeds[number])
        return llm.run(prompts[number], options, drafter=PlainDrafter()).tokens

    path = None if decoding.logits_processor else _path(llm, prompts, decoding, seed)
    first = decode(0)
    done = None if path is None else _read(path, len(prompts), decoding)
    if done is None or done[0] != first:  # the fingerprint does not see every weight
        done = [first, *(decode(number) for number in range(1, len(prompts)))]
        if path is not None:
            write_cached(path, done)
    if on_prompt is not None:
        on_prompt(len(prompts))
    return [
        Text((*prompt, *new), len(prompt), decoding.max_new_tokens, own)
        for prompt, new, own in zip(prompts, done, seeds, strict=True)
    ]


def _path(llm: LLM, prompts: Sequence[Sequence[int]], decoding: Decoding, seed: int) -> Path:
    what = {
        "version": 2,
        "model": llm.runtime.skeleton.identity.model_dump(mode="json", exclude={"name"}),
        "ends": sorted(llm.runtime.skeleton.ends),
        "dtype": str(llm.runtime.dtype),
        "device": llm.runtime.device.type,
        "decoding": [decoding.max_new_tokens, decoding.temperature, decoding.top_k, decoding.top_p],
        "seed": seed,
        "prompts": [list(prompt) for prompt in prompts],
    }
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "continuations" / f"{digest}.json"


def _read(path: Path, prompts: int, decoding: Decoding) -> list[list[int]] | None:
    data = read_cached(path)
    sound = isinstance(data, list) and len(data) == prompts
    if not sound or not all(isinstance(new, list) and 1 <= len(new) <= decoding.max_new_tokens for new in data):
        return None
    return data if all(type(token) is int for new in data for token in new) else None
