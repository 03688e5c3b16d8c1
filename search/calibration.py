"""Calibration prompts to search on and prompts to measure on, drawn by seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from selfspec.profile.schema import Calibration
from selfspec.text.jsonl import FileTexts, digest
from selfspec.text.prompt import Prompt
from selfspec.text.prompt_files import Prompts, prompts_for

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


def record(
    source: str,
    prompts: Iterable[Sequence[int]],
    *,
    column: str | None = None,
    template: str | None = None,
    chat: bool = False,
    drawn_from: int | None = None,
) -> Calibration:
    """Return the profile's record of the prompts (token ids) that trials were scored on."""
    digest, count, total = hashlib.sha256(), 0, 0
    for ids in prompts:
        digest.update((" ".join(map(str, ids)) + "\n").encode())
        count, total = count + 1, total + len(ids)
    return Calibration(
        source=source,
        column=column,
        template=template,
        chat=chat,
        drawn_from=drawn_from,
        prompts=count,
        tokens=total,
        sha256=digest.hexdigest(),
    )
