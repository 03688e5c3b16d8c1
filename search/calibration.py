"""Calibration prompts: to search on and to measure on, chosen by seed. Knows nothing of torch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from selfspec import builtin
from selfspec.profile.schema import Calibration
from selfspec.text.prompt_files import Prompts

COUNTED = 1000  # prompts that serve neither searching nor measuring, whose tokens are counted


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts to search on and prompts to measure on. `held_out`: whether the two have nothing in common.

    `rest`: the first few of those that serve neither, whose tokens can be counted. `available`: how many different ones
    there were to draw from; `column` and `template`: what of each row they are.
    """

    source: str
    search: tuple[str, ...]
    measure: tuple[str, ...]
    held_out: bool
    rest: tuple[str, ...] = ()
    available: int = 0
    column: str | None = None
    template: str | None = None


def choose(prompts: Sequence[str] | Prompts | None, *, source: str, count: int, seed: int) -> PromptSet:
    """`count` prompts to search on and as many others to measure on, drawn by `seed`; None: the built-in ones.

    Where there are too few for both, each gets half; a single one serves both. `source` names a plain sequence.
    """
    if isinstance(prompts, Prompts):
        chosen = choose(prompts.texts, source=prompts.source, count=count, seed=seed)
        return replace(chosen, column=prompts.column, template=prompts.template)
    draw = random.Random(seed)
    if prompts is None:
        parts = [builtin.prompts("calibration"), builtin.prompts("heldout")]
        search, measure = (tuple(draw.sample(part, min(count, len(part)))) for part in parts)
        left = tuple(prompt for prompt in parts[0] if prompt not in search)
        return PromptSet("builtin", search, measure, True, left, len(parts[0]))
    distinct = list(dict.fromkeys(prompts))
    draw.shuffle(distinct)
    count = min(count, (len(distinct) + 1) // 2)
    mine, rest = distinct[:count], distinct[count : 2 * count]
    left = tuple(distinct[2 * count : 2 * count + COUNTED])
    return PromptSet(source, tuple(mine), tuple(rest or mine), bool(rest), left, len(distinct))


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
