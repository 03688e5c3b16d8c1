"""Calibration prompts: to search on and to measure on, chosen by seed. Knows nothing of torch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from selfspec.profile.schema import Calibration
from selfspec.text.jsonl import FileTexts, digest
from selfspec.text.prompt import Prompt
from selfspec.text.prompt_files import Prompts, prompts_for

COUNTED = 1000  # prompts that serve neither searching nor measuring, whose tokens are counted


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts to search on and prompts to measure on. `held_out`: whether the two have nothing in common.

    `rest`: the first few of those that serve neither, whose tokens can be counted. `available`: how many different ones
    there were to draw from; `column` and `template`: what of each row they are. `chat`: whether each is a
    user's message.
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
    """`count` prompts to search on and as many others to measure on, drawn by `seed`; None: the built-in ones.

    Where there are too few for both, each gets half; a single one serves both. `source` names a plain sequence. Which
    are built in, and which are a user's messages, follows from `chat` and `takes_messages` as in `prompts_for`.
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
    """The number of each text that is like none before it; told by a hash, as texts may be more than memory holds."""
    digests = texts.digests if isinstance(texts, FileTexts) else map(digest, texts)
    seen: dict[bytes, int] = {}
    for index, of in enumerate(digests):
        seen.setdefault(of, index)
    return list(seen.values())


def record(
    source: str,
    prompts: Iterable[Sequence[int]],
    *,
    column: str | None = None,
    template: str | None = None,
    chat: bool = False,
    drawn_from: int | None = None,
) -> Calibration:
    """What a profile says of the prompts (token ids) that were searched on."""
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
