"""The state of a running request: its texts, and their updates from the decoding threads to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from selfspec.server.request_parser import ParsedRequest, TextRequest
from selfspec.server.request_schemas import ApiError

if TYPE_CHECKING:
    from selfspec.llm.request import Request, TokenLogprobs
    from selfspec.types.events import Origin
    from selfspec.types.stats import Finish


SHARED = 32  # minimum tokens of a prompt that is prefilled once and reused by all texts of the request


class EndReason(StrEnum):
    """The reason why the server ended a text."""

    GONE = "the client is gone"
    TIME = "time"
    SHUTDOWN = "shutdown"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """Update of one text: its new text and log probabilities since the last update, and its totals so far.

    `index`: the text's number in its call, from 0. `spans`: the new text split at token boundaries, each part with its
    token's origin, if requested. `logprobs`: log probabilities of the new tokens, if requested. `tokens`, `drafted`,
    `accepted` and `rounds`: totals so far. `num_cached`: prompt tokens found in the KV cache. `ended`: no update
    follows; then `finish`, `end_reason` or `error` gives the reason.
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

    `index`: the text's number in the call, from 0. `request`: the text's request in a batch, None until it is added;
    `num_logprobs_sent`: the number of log probabilities sent; `prompt_logprobs`: those of the prompt, until they are
    sent. Only the decoding thread touches these three.

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
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(eq=False, slots=True)
class Times:
    """Times of a call's events, by `time.perf_counter`; None: the event has not happened yet.

    `arrived`: the request was parsed. `admitted`: a replica took the call's first text. `first`: the first new token.
    """

    arrived: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the arrival."""
        return time.perf_counter() - self.arrived


def _jobs(call: Call, parsed: ParsedRequest) -> list[TextJob]:
    """Return a job for each text.

    Texts that share a long prompt wait until the first of them has prefilled the prompt, and reuse its keys.
    """
    jobs: list[TextJob] = []
    firsts: dict[int, TextJob] = {}  # by the identity of the prompt, which its texts share
    for index, text in enumerate(parsed.texts):
        first = firsts.get(id(text.prompt)) if len(text.prompt) >= SHARED else None
        jobs.append(TextJob(call, index, text, first))
        firsts.setdefault(id(text.prompt), jobs[-1])
    return jobs


class Call:
    """The running texts of one request; must be created in the event loop that answers the request.

    `latest`: the last update of each text. `prompt_logprobs`: those of the prompts that were scored, by token ids.
    """

    def __init__(self, parsed: ParsedRequest) -> None:
        self.parsed = parsed
        self.times = Times()
        self.jobs = _jobs(self, parsed)
        self.latest = [TextUpdate(index) for index in range(len(self.jobs))]
        self.prompt_logprobs: dict[tuple[int, ...], tuple[TokenLogprobs, ...]] = {}
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
        """Yield the updates as they arrive, until all texts have ended."""
        open_texts = len(self.jobs)
        while open_texts:
            update = await self._queue.get()
            open_texts -= update.ended
            yield update

    def total(self, name: str) -> int:
        """Return the sum over all texts of the count `name` in their latest updates."""
        return sum(getattr(update, name) for update in self.latest)

    @property
    def num_cached(self) -> int:
        """The prompt tokens that the first text of each prompt found in the KV cache."""
        firsts = {id(job.text.prompt): job.index for job in reversed(self.jobs)}
        return sum(self.latest[index].num_cached for index in firsts.values())

    @property
    def finishes(self) -> list[Any]:
        """The reason why each text ended; None for a text that has not."""
        return [update.finish or update.end_reason or (update.error and EndReason.FAILED) for update in self.latest]
