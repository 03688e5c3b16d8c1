"""The target's own continuations of the calibration prompts, made once and kept on disk by what they depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from transformers import LogitsProcessor

from selfspec.basics.files import cached_file, read_cached, write_cached
from selfspec.drafters import PlainDrafter
from selfspec.engine.engine import Engine
from selfspec.llm.llm import LLM
from selfspec.llm.options import Options
from selfspec.measure.timing import same_length
from selfspec.speculation.rules import find_rule
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState

from .budget import Deadline, never
from .target_text import TargetText

FEWEST = 8  # tokens that continue each prompt, however little time there is


@dataclass(frozen=True, slots=True)
class DecodingSettings:
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

    def timed(self) -> Options:
        """The same for texts whose speeds are compared."""
        return same_length(self.options())


def continue_prompts(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    decoding: DecodingSettings,
    *,
    seed: int = 0,
    on_token: Callable[[int], None] = lambda done: None,
    deadline: Deadline | None = None,
) -> list[TargetText]:
    """Decode every prompt (token ids) plainly, or read back what was decoded before.

    The first prompt is always decoded, to see that the others are of this very model; the others are decoded together.
    `on_token` is told how many tokens of each are done, of the first prompt and then of the others: twice as many as
    `decoding` allows in the end. At the `deadline` texts end, all after as many tokens, but not before `FEWEST`.
    A cache that cannot be written is done without; one that cannot be read is made again. What further processors do
    cannot be told by content: with them nothing is kept.
    """
    deadline, most = deadline or never(), decoding.max_new_tokens
    seeds = [None if decoding.temperature == 0 else seed * 65_537 + number for number in range(len(prompts))]
    options = [replace(decoding, rule=None).options(seed=own) for own in seeds]

    def kept(room: int) -> Path | None:
        return None if decoding.logits_processor else _path(llm, prompts, replace(decoding, max_new_tokens=room), seed)

    half = deadline.part(0.5 if len(prompts) > 1 else 1.0)
    (first,), room = _decode(llm, prompts[:1], options[:1], most, half, on_token)
    path = kept(room)
    done = None if path is None else _read(path, len(prompts), room)
    if done is None or done[0] != first:  # the fingerprint does not see every weight
        others, room = _decode(llm, prompts[1:], options[1:], room, deadline, lambda tokens: on_token(most + tokens))
        done = [new[:room] for new in (first, *others)]
        if (path := kept(room)) is not None:
            write_cached(path, done)
    on_token(2 * most)
    return [
        TargetText((*prompt, *new), len(prompt), room, own)
        for prompt, new, own in zip(prompts, done, seeds, strict=True)
    ]


def _decode(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    options: Sequence[Options],
    room: int,
    deadline: Deadline,
    on_token: Callable[[int], None],
) -> tuple[list[list[int]], int]:
    """At most `room` tokens after each prompt, all decoded together, and how many there was time for."""
    seqs = []
    for prompt, how in zip(prompts, options, strict=True):
        planned = llm.plan(prompt, how)
        seqs.append(SequenceState([*prompt], room, planned.sampler, planned.ends, rule=planned.rule))
    if seqs:
        with Engine(llm.runtime.with_new_cache(rows=len(seqs)), PlainDrafter()) as engine:
            for seq in seqs:
                engine.join(seq)
            done = 0
            while engine.running and (done < FEWEST or deadline.allows()):
                engine.step()
                on_token(done := done + 1)
            room = done if engine.running else room
    return [seq.tokens[len(prompt) :] for seq, prompt in zip(seqs, prompts, strict=True)], room


def _path(llm: LLM, prompts: Sequence[Sequence[int]], decoding: DecodingSettings, seed: int) -> Path:
    what = {
        "version": 3,
        "model": llm.runtime.skeleton.identity.model_dump(mode="json", exclude={"name"}),
        "ends": sorted(llm.runtime.skeleton.ends),
        "dtype": str(llm.runtime.dtype),
        "device": llm.runtime.device.type,
        "decoding": [decoding.max_new_tokens, decoding.temperature, decoding.top_k, decoding.top_p],
        "seed": seed,
        "prompts": [list(prompt) for prompt in prompts],
    }
    return cached_file("continuations", what)


def _read(path: Path, prompts: int, room: int) -> list[list[int]] | None:
    data = read_cached(path)
    sound = isinstance(data, list) and len(data) == prompts
    if not sound or not all(isinstance(new, list) and 1 <= len(new) <= room for new in data):
        return None
    return data if all(type(token) is int for new in data for token in new) else None
