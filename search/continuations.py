"""Calibration prompts, drawn by seed, and the target's own continuations of them, cached on disk by their inputs."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

from transformers import LogitsProcessor

from selfspec.basics.files import cached_file, read_cached, write_cached
from selfspec.drafters import PlainDrafter
from selfspec.engine.engine import Engine
from selfspec.llm.batch_memory import SHARE, free_bytes, slot_bytes
from selfspec.llm.llm import LLM
from selfspec.llm.options import Options
from selfspec.measure.timing import same_length
from selfspec.profile.schema import Calibration
from selfspec.runtime.base import Runtime
from selfspec.speculation.rules import find_rule
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.text.prompt_files import Prompts, prompts_for
from selfspec.text.prompt_template import FileTexts, Prompt, digest
from selfspec.types.methods import WIDEST_DRAFT

from .budget import Deadline, no_deadline
from .replay_state import TargetText

COUNTED = 1000  # the most further prompts to count token frequencies in


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts to search on (`search`) and prompts to measure on (`measure`), drawn from one source.

    `held_out`: whether `search` and `measure` are disjoint. `rest`: some of the remaining prompts, to count token
    frequencies in. `available`: the number of different prompts to draw from. `column`, `template`: how a prompt is
    made of a row of the source (None: a row is a prompt). `chat`: whether each prompt is a user's message.
    """

    source: str
    search: tuple[Prompt, ...]
    measure: tuple[Prompt, ...]
    held_out: bool
    rest: tuple[Prompt, ...] = ()
    available: int = 0
    column: str | None = None
    template: str | None = None
    chat: bool = False


def choose(
    prompts: Sequence[Prompt] | Prompts | None,
    *,
    source: str,
    count: int,
    seed: int,
    chat: bool = False,
    takes_messages: bool = False,
) -> PromptSet:
    """Draw `count` prompts to search on and `count` other prompts to measure on, with the random seed `seed`.

    `prompts` None: the built-in prompts. With too few prompts, each purpose gets half of the prompts; a single prompt
    serves both. `source`: the name of a sequence of prompts. `chat` and `takes_messages` decide, as in `prompts_for`,
    which built-in prompts are used, and whether prompts are a user's messages.
    """
    if prompts is None or isinstance(prompts, Prompts):
        used = prompts_for(prompts, "calibration", chat=chat, takes_messages=takes_messages)
        texts: Sequence[Prompt] = used.texts
    else:
        used, texts = Prompts(source, (), messages=chat), tuple(prompts)
    draw = random.Random(seed)
    if prompts is None:
        held_out = prompts_for(None, "heldout", chat=chat, takes_messages=takes_messages)
        search, measure = (
            tuple[Prompt, ...](draw.sample(part.texts, min(count, len(part.texts)))) for part in (used, held_out)
        )
        left, available = tuple(prompt for prompt in texts if prompt not in search), len(texts)
    else:
        distinct = _distinct(texts)
        draw.shuffle(distinct)
        count, available = min(count, (len(distinct) + 1) // 2), len(distinct)
        drawn = tuple(texts[index] for index in distinct[: 2 * count + COUNTED])
        search, measure, left = drawn[:count], drawn[count : 2 * count], drawn[2 * count :]
    return PromptSet(
        used.source,
        search,
        measure or search,
        bool(measure),
        left,
        available,
        used.column,
        used.template,
        used.messages,
    )


def _distinct(texts: Sequence[Prompt]) -> list[int]:
    """Return the index of the first occurrence of each distinct text, by hash, as the texts may not fit in memory."""
    digests = texts.digests if isinstance(texts, FileTexts) else map(digest, texts)
    first_index: dict[bytes, int] = {}
    for index, text_digest in enumerate(digests):
        first_index.setdefault(text_digest, index)
    return list(first_index.values())


def record(chosen: PromptSet, prompts: Iterable[Sequence[int]]) -> Calibration:
    """Return the profile's record of the prompts (token ids) of `chosen` that trials were scored on."""
    digest, count, total = hashlib.sha256(), 0, 0
    for ids in prompts:
        digest.update((" ".join(map(str, ids)) + "\n").encode())
        count, total = count + 1, total + len(ids)
    return Calibration(
        source=chosen.source,
        column=chosen.column,
        template=chosen.template,
        chat=chosen.chat,
        drawn_from=chosen.available,
        prompts=count,
        tokens=total,
        sha256=digest.hexdigest(),
    )


FEWEST = 8  # the fewest new tokens for each prompt, however little time there is


@dataclass(frozen=True, slots=True)
class DecodingSettings:
    """The settings by which tokens are chosen and sampled drafts verified; the fields are options of `LLM.generate`."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    logits_processor: tuple[LogitsProcessor, ...] = ()
    rule: str | None = None

    def check(self) -> None:
        """Raise `SelfspecError` for a value out of range, and for a rule that does not fit the sampling settings."""
        find_rule(self.rule, Sampler(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self._seed))

    @property
    def _seed(self) -> int | None:
        """The seed that rule `match` needs."""
        return 0 if self.rule == "match" else None

    @property
    def verified_by(self) -> str:
        """The name of the verification rule; by default greedy at temperature 0, else block."""
        return self.rule or ("greedy" if self.temperature == 0 else "block")

    def sampler(self) -> Sampler:
        """Return a sampler with these settings. Raises `SelfspecError` for a value out of range."""
        return Sampler(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, processors=self.logits_processor
        )

    def options(self, *, seed: int | None = None) -> Options:
        """Return the settings as options of `LLM.run`; `seed` None: the seed 0 for rule `match`, else no seed."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return Options(**named, seed=self._seed if seed is None else seed)

    def timed(self) -> Options:
        """Return options for comparing speeds, under which sampled texts all have the same length."""
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
    """Return the target's continuations of all prompts (token ids), decoded without drafts or read from the cache.

    The first prompt is always decoded, to check that the cached texts are those of this model; all other prompts are
    decoded in one batch, or in several whose KV caches take half of the available memory each. `on_token` receives the
    number of decode steps done, for the first prompt and then for the batch; it ends at twice
    `decoding.max_new_tokens`. At the `deadline` all texts end at the same length, but not before `FEWEST` tokens. A
    cache that cannot be written is ignored; a cache that cannot be read is made again. With logits processors, which
    cannot be identified by content, nothing is cached.
    """
    deadline, most = deadline or no_deadline(), decoding.max_new_tokens
    seeds = [None if decoding.temperature == 0 else seed * 65_537 + number for number in range(len(prompts))]
    options = [replace(decoding, rule=None).options(seed=own) for own in seeds]

    def cache_path(max_new_tokens: int) -> Path | None:
        return (
            None
            if decoding.logits_processor
            else _path(llm, prompts, replace(decoding, max_new_tokens=max_new_tokens), seed)
        )

    half = deadline.part(0.5 if len(prompts) > 1 else 1.0)
    (first,), length = _decode(llm, prompts[:1], options[:1], most, half, on_token)
    path = cache_path(length)
    done = None if path is None else _read(path, len(prompts), length)
    if done is None or done[0] != first:  # the key of the cache does not cover every weight of the model
        others, length = _decode(
            llm, prompts[1:], options[1:], length, deadline, lambda tokens: on_token(most + tokens)
        )
        done = [new[:length] for new in (first, *others)]
        if (path := cache_path(length)) is not None:
            write_cached(path, done)
    on_token(2 * most)
    return [
        TargetText((*prompt, *new), len(prompt), length, own)
        for prompt, new, own in zip(prompts, done, seeds, strict=True)
    ]


def _decode(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    options: Sequence[Options],
    max_new_tokens: int,
    deadline: Deadline,
    on_token: Callable[[int], None],
) -> tuple[list[list[int]], int]:
    """Decode at most `max_new_tokens` tokens after each prompt in one batch, or in several if memory is short.

    Returns the new tokens of each prompt, and the number of tokens that fit the time.
    """
    seqs = []
    for prompt, how in zip(prompts, options, strict=True):
        planned = llm.plan(prompt, how)
        seqs.append(SequenceState([*prompt], max_new_tokens, planned.sampler, planned.final_tokens, rule=planned.rule))
    batches = _batches(llm.runtime, seqs)
    for number, batch in enumerate(batches):
        limit = deadline if batch is batches[-1] else deadline.part(1 / (len(batches) - number))
        steps = max_new_tokens
        for seq in batch:
            seq.remaining = min(seq.remaining, steps)
        runtime = llm.runtime.with_new_cache(rows=len(batch))
        with runtime.session(_slots(batch)):  # one allocation: a cache that grows is held twice meanwhile
            pass
        with Engine(runtime, PlainDrafter()) as engine:
            for seq in batch:
                engine.join(seq)
            done = 0
            while engine.running and (done < FEWEST or limit.allows()):
                engine.step()
                done += 1
                on_token((number * steps + done) // len(batches))
            max_new_tokens = done if engine.running else max_new_tokens
    return [seq.tokens[len(prompt) :] for seq, prompt in zip(seqs, prompts, strict=True)], max_new_tokens


def _slots(seqs: Sequence[SequenceState]) -> int:
    """Return the slots of a cache row that holds any of the sequences."""
    return max(len(seq.tokens) + seq.remaining for seq in seqs) + WIDEST_DRAFT


def _batches(runtime: Runtime, seqs: Sequence[SequenceState]) -> list[Sequence[SequenceState]]:
    """Split sequences into few batches of nearly equal size, whose KV caches take half of the available memory each.

    Each row of a cache is as long as the longest sequence.
    """
    if not seqs:
        return []
    rows = max(1, int(SHARE * free_bytes(runtime.device)) // (slot_bytes(runtime) * _slots(seqs)))
    count = -(-len(seqs) // rows)
    ends = [len(seqs) * number // count for number in range(count + 1)]
    return [seqs[start:end] for start, end in pairwise(ends)]


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


def _read(path: Path, prompts: int, max_new_tokens: int) -> list[list[int]] | None:
    data = read_cached(path)
    sound = isinstance(data, list) and len(data) == prompts
    if not sound or not all(isinstance(new, list) and 1 <= len(new) <= max_new_tokens for new in data):
        return None
    return data if all(type(token) is int for new in data for token in new) else None
