"""A request under way: its texts, and what comes of them, from the threads that decode to the one that answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from selfspec.server.errors import ApiError
from selfspec.server.request_parser import Ask, TextRequest

if TYPE_CHECKING:
    from selfspec.llm.request import Request, TokenLogprobs
    from selfspec.types.events import Origin
    from selfspec.types.stats import Finish


SHARED = 32  # tokens of a prompt that is worth being read once for several texts


class Why(StrEnum):
    """Why a text was ended from outside."""

    GONE = "the client is gone"
    TIME = "time"
    SHUTDOWN = "shutdown"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """What is new of one text. `tokens`, `drafted`, `accepted` and `rounds` are all so far.

    `spans`: the text cut where tokens meet, where that was asked for. `ended`: nothing more comes; then `finish` says
    why, or `why`, or `error`.
    """

    index: int
    text: str = ""
    spans: tuple[tuple[Origin, str], ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    kept: int = 0
    ended: bool = False
    finish: Finish | None = None
    why: Why | None = None
    error: ApiError | None = None


@dataclass(eq=False, slots=True)
class TextJob:
    """One text of a call. The thread that decodes it alone touches `request` and `told`, how much was passed on.

    `first`: another of the same prompt, which is to be read before this one begins; `begun`: whether its own has been,
    or never will be.
    """

    call: Call
    index: int
    text: TextRequest
    first: TextJob | None = None
    begun: bool = False
    request: Request | None = None
    told: int = 0


@dataclass(eq=False, slots=True)
class Times:
    """When what happened (`time.perf_counter`); None: not yet."""

    arrived: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first: float | None = None

    @property
    def seconds(self) -> float:
        """Since it arrived."""
        return time.perf_counter() - self.arrived


def _jobs(call: Call, ask: Ask) -> list[TextJob]:
    """A job for each text; of those of one long prompt, all but the first wait until it is read: they need not be."""
    jobs: list[TextJob] = []
    firsts: dict[int, TextJob] = {}  # by the prompt itself, which all of its texts have
    for index, text in enumerate(ask.texts):
        first = firsts.get(id(text.prompt)) if len(text.prompt) >= SHARED else None
        jobs.append(TextJob(call, index, text, first))
        firsts.setdefault(id(text.prompt), jobs[-1])
    return jobs


class Call:
    """One request's texts under way; made in the loop that answers it.

    `latest`: of each text, the last update. Iterating over `updates` ends when all texts have.
    """

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.times = Times()
        self.jobs = _jobs(self, ask)
        self.latest = [TextUpdate(index) for index in range(len(self.jobs))]
        self._queue: asyncio.Queue[TextUpdate] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def tell(self, *updates: TextUpdate) -> None:
        """Pass on what is new, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._put, updates)

    def _put(self, updates: tuple[TextUpdate, ...]) -> None:
        for update in updates:
            if update.tokens and self.times.first is None:
                self.times.first = time.perf_counter()
            self.latest[update.index] = update
            self._queue.put_nowait(update)

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return all(update.ended for update in self.latest)

    async def updates(self) -> AsyncIterator[TextUpdate]:
        """What comes, as it comes."""
        open_texts = len(self.jobs)
        while open_texts:
            update = await self._queue.get()
            open_texts -= update.ended
            yield update

    def total(self, name: str) -> int:
        """A count over all texts."""
        return sum(getattr(update, name) for update in self.latest)

    @property
    def finishes(self) -> list[Any]:
        """Why each text ended."""
        return [update.finish or update.why or (update.error and Why.FAILED) for update in self.latest]
