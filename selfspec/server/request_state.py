"""The state of a running request: its texts, and their updates from the decoding threads to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from selfspec.server.errors import ApiError
from selfspec.server.request_parser import ParsedRequest, TextRequest

if TYPE_CHECKING:
    from selfspec.llm.request import Request, TokenLogprobs
    from selfspec.types.events import Origin
    from selfspec.types.stats import Finish


SHARED = 32  # tokens from which on a prompt is prefilled once for several texts


class EndReason(StrEnum):
    """The reason why the server ended a text."""

    GONE = "the client is gone"
    TIME = "time"
    SHUTDOWN = "shutdown"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """The news of one text since its last update. `tokens`, `drafted`, `accepted` and `rounds` are totals so far.

    `spans`: the new text split at token boundaries, each part with its token's origin, if requested. `num_cached`:
    prompt tokens found in the KV cache. `ended`: no update follows; then `finish`, `end_reason` or `error` gives the
    reason.
    """

    index: int
    text: str = ""
    spans: tuple[tuple[Origin, str], ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    num_cached: int = 0
    ended: bool = False
    finish: Finish | None = None
    end_reason: EndReason | None = None
    error: ApiError | None = None


@dataclass(eq=False, slots=True)
class TextJob:
    """One text of a call.

    Only its decoding thread touches `request` and `num_logprobs_sent`, the number of log probabilities sent.

    `first`: an earlier job with the same prompt, which must be prefilled before this job begins. `begun`: whether this
    job's own prompt has been prefilled, or never will be.
    """

    call: Call
    index: int
    text: TextRequest
    first: TextJob | None = None
    begun: bool = False
    request: Request | None = None
    num_logprobs_sent: int = 0


@dataclass(eq=False, slots=True)
class Times:
    """Times of a call's events (`time.perf_counter`); None: not yet."""

    arrived: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the arrival."""
        return time.perf_counter() - self.arrived


def _jobs(call: Call, parsed: ParsedRequest) -> list[TextJob]:
    """Return a job for each text; texts that share a long prompt wait for the first one's prefill and reuse it."""
    jobs: list[TextJob] = []
    firsts: dict[int, TextJob] = {}  # by the identity of the prompt, which its texts share
    for index, text in enumerate(parsed.texts):
        first = firsts.get(id(text.prompt)) if len(text.prompt) >= SHARED else None
        jobs.append(TextJob(call, index, text, first))
        firsts.setdefault(id(text.prompt), jobs[-1])
    return jobs


class Call:
    """The running texts of one request; must be made in the event loop that answers it.

    `latest`: the last update of each text. Iterating over `updates` ends when all texts have ended.
    """

    def __init__(self, parsed: ParsedRequest) -> None:
        self.parsed = parsed
        self.times = Times()
        self.jobs = _jobs(self, parsed)
        self.latest = [TextUpdate(index) for index in range(len(self.jobs))]
        self._queue: asyncio.Queue[TextUpdate] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def send(self, *updates: TextUpdate) -> None:
        """Send updates to the event loop, from any thread."""
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
        """Whether all texts have ended."""
        return all(update.ended for update in self.latest)

    async def updates(self) -> AsyncIterator[TextUpdate]:
        """Yield the updates as they arrive."""
        open_texts = len(self.jobs)
        while open_texts:
            update = await self._queue.get()
            open_texts -= update.ended
            yield update

    def total(self, name: str) -> int:
        """Return the sum of a count over all texts."""
        return sum(getattr(update, name) for update in self.latest)

    @property
    def finishes(self) -> list[Any]:
        """The reason why each text ended."""
        return [update.finish or update.end_reason or (update.error and EndReason.FAILED) for update in self.latest]
