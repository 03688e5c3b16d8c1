"""One queue of texts, and for each replica a worker: a batch and the texts in it, on one thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from selfspec.basics.errors import SelfspecError
from selfspec.basics.machine import release_memory
from selfspec.server.request_schemas import ApiError, ending, wrong
from selfspec.server.request_state import Call, EndReason, TextJob, TextUpdate

if TYPE_CHECKING:
    from selfspec.llm.batch import Batch
    from selfspec.llm.request import Request


_LOGGER = logging.getLogger("selfspec.server")


class Replica:
    """A worker that decodes one batch on one thread; other threads only read its state.

    `device`: the model's device. `takes_plans`: whether a text's plan, made on the first replica's device, is used.
    `jobs`: texts that have a cache row, or are about to get a row. `free` and `num_slots`: the free and all slots of
    the batch's KV cache, after the last step.
    """

    def __init__(self, batch: Batch, device: str = "cpu") -> None:
        self.batch = batch
        self.device, self.takes_plans = device, True
        self.jobs: list[TextJob] = []
        self.free, self.num_slots, self.max_seq_len = batch.free, batch.num_slots, batch.max_seq_len

    def __enter__(self) -> Replica:
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.set_device(torch.device(self.device))  # each thread has its own current device
        self.batch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.batch.__exit__(kind, error, traceback)

    @property
    def load(self) -> int:
        """The number of texts that this replica decodes."""
        return len(self.jobs)

    def jobs_of(self, call: Call) -> list[TextJob]:
        """Return those jobs of this replica that belong to `call`."""
        return [job for job in tuple(self.jobs) if job.call is call]

    def turn(self, taken: Sequence[TextJob], cancelled: Sequence[tuple[TextJob, EndReason]]) -> None:
        """Run one iteration: cancel jobs, add jobs, and step the batch.

        `cancelled`: pairs of a job and the reason for which it ends. A failed step ends all texts of this replica.
        """
        for job, why in cancelled:
            if job in self.jobs:  # the job may have ended by itself
                self._end(job, why)
        for job in taken:
            self._add(job)
        try:
            if self.jobs:
                self._pass_on(self.batch.step())
        except Exception:
            _LOGGER.exception("decoding failed; %d texts are ended", len(self.jobs))
            for job in list(self.jobs):
                self._end(job, EndReason.FAILED, ApiError(500, "decoding failed; the server's log says how"))
        self.free, self.num_slots = self.batch.free, self.batch.num_slots

    def _add(self, job: TextJob) -> None:
        parsed, times = job.call.parsed, job.call.times
        times.admitted = times.admitted or time.perf_counter()
        try:
            if parsed.echo and parsed.top is not None:
                scored, prompt = job.call.prompt_logprobs, tuple(job.text.prompt)
                if prompt not in scored:  # of several texts, one is scored
                    scored[prompt] = tuple(self.batch.prompt_logprobs(prompt, job.text.options, parsed.top))
                job.prompt_logprobs = scored[prompt]
            if parsed.prompt_only:
                update = TextUpdate(job.index, logprobs=job.prompt_logprobs, ended=True, finish="length")
                self._leave(job, update)
                return
            job.request = self.batch.add(
                list(job.text.prompt),
                job.text.options,
                planned=job.text.planned if self.takes_plans else None,
                top=parsed.top,
            )
        except SelfspecError as error:
            self._leave(job, TextUpdate(job.index, ended=True, error=wrong(str(error))))
        except Exception:
            _LOGGER.exception("a text could not be added to the batch")
            failed = ApiError(500, "the text could not be added to the batch; the server's log says why")
            self._leave(job, TextUpdate(job.index, ended=True, error=failed))

    def _end(self, job: TextJob, why: EndReason, error: ApiError | None = None) -> None:
        """Cancel a text that has not ended by itself, for the reason `why`, and send its last update."""
        if job.request is None:
            return self._leave(job, TextUpdate(job.index, ended=True, end_reason=why, error=error))
        try:
            self.batch.cancel(job.request)
            update = _make_update(job, job.request, why=why, error=error)
        except Exception:
            _LOGGER.exception("a text could not be ended")
            update = TextUpdate(
                job.index, ended=True, end_reason=why, error=error or ApiError(500, "the text could not be ended")
            )
        return self._leave(job, update)

    def _leave(self, job: TextJob, update: TextUpdate) -> None:
        self.jobs.remove(job)
        job.begun = True
        job.call.send(update)

    def _pass_on(self, touched: Sequence[Request]) -> None:
        by_request = {id(job.request): job for job in self.jobs}
        for request in touched:
            job = by_request.get(id(request))
            if job is None:
                continue
            update = _make_update(job, request)
            job.begun = True
            if update.ended:
                self.jobs.remove(job)
            job.call.send(update)


def _make_update(
    job: TextJob, request: Request, *, why: EndReason | None = None, error: ApiError | None = None
) -> TextUpdate:
    """Return what is new in a text since its last update; `why` or `error` end the text."""
    sources = job.call.parsed.sources
    spans = tuple(request.spans()) if sources else ()
    text = "".join(piece for _, piece in spans) if sources else request.take()
    logprobs = tuple(request.logprobs[job.num_logprobs_sent :])
    job.num_logprobs_sent += len(logprobs)
    logprobs, job.prompt_logprobs = (*job.prompt_logprobs, *logprobs), ()
    if request.error is not None:
        error = ApiError(500, f"decoding failed: {request.error}")
    stats = request.stats
    return TextUpdate(
        job.index,
        text,
        spans,
        logprobs,
        tokens=len(request.tokens),
        drafted=stats.drafted,
        accepted=stats.accepted,
        rounds=stats.rounds,
        num_cached=stats.num_cached,
        ended=request.done or why is not None or error is not None,
        finish=request.finish,
        end_reason=why,
        error=error,
    )


MOST_SECONDS = 60  # the longest Retry-After sent to a client
TRIM_SECONDS = 10  # from one collection and return of freed memory to the next while texts run; it takes some 20 ms
IDLE_SECONDS = 1  # the same when the last text has ended


@dataclass(frozen=True, slots=True)
class Work:
    """Changes for a replica before its next step: jobs to add, and pairs of a job to cancel and the reason."""

    taken: list[TextJob]
    cancelled: list[tuple[TextJob, EndReason]]


class WorkerPool:
    """One queue for all texts; each replica takes up to `rows` of them, the least loaded replica first.

    A context manager: once entered, all replicas are ready. Entering raises the exception of a replica that fails to
    start. Leaving ends the threads and all running texts. `queue`: the most texts that may wait for a row.
    """

    def __init__(self, replicas: Sequence[Replica], *, rows: int, queue: int) -> None:
        self._changed = threading.Condition()
        self._pending: deque[TextJob] = deque()
        self._queue, self._rows = queue, rows
        self._closing = False
        self.replicas = list(replicas)
        for replica in self.replicas:
            replica.takes_plans = replica.device == self.replicas[0].device
        self._cancels: dict[Replica, list[tuple[TextJob, EndReason]]] = {replica: [] for replica in self.replicas}
        self._ready: list[Future[None]] = [Future() for _ in self.replicas]
        self._threads = [
            threading.Thread(target=self._serve, args=thread_args, name="replica", daemon=True)
            for thread_args in zip(self.replicas, self._ready, strict=True)
        ]

    def __enter__(self) -> WorkerPool:
        for thread in self._threads:
            thread.start()
        try:
            for ready in self._ready:
                ready.result()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    @property
    def waiting(self) -> int:
        """The number of texts that wait for a row."""
        return len(self._pending)

    @property
    def running(self) -> int:
        """The number of texts that have a row, or wait inside a replica for memory."""
        return sum(replica.load for replica in self.replicas)

    @property
    def alive(self) -> bool:
        """Whether any worker thread is alive."""
        return any(thread.is_alive() for thread in self._threads)

    def check_room(self, num_texts: int, *, retry_after: float = 1.0) -> None:
        """Raise `ApiError` if the queue has no room for so many texts, and during shutdown.

        `retry_after`: the seconds after which a refused client should try again.
        """
        most = self._queue + self._rows * len(self.replicas)
        if num_texts > most:
            raise wrong(f"{num_texts} texts (n for each prompt); expected at most {most} texts", "n")
        if self._closing or not self.alive:
            raise ending()
        if self.running + len(self._pending) + num_texts > most:
            seconds = min(MOST_SECONDS, max(1, round(retry_after)))
            message = f"the queue is full: {self.running} texts are running, {len(self._pending)} wait; try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": str(seconds)})

    def submit(self, call: Call, *, retry_after: float = 1.0) -> None:
        """Queue a call's texts. Raises `ApiError` as `check_room` does."""
        with self._changed:
            self.check_room(len(call.jobs), retry_after=retry_after)
            self._pending.extend(call.jobs)
            self._changed.notify_all()

    def cancel(self, call: Call, why: EndReason) -> None:
        """End those texts of a call that have not ended, for the reason `why`; their rows are free by the next step."""
        with self._changed:
            waiting = [job for job in call.jobs if job in self._pending]
            for job in waiting:
                self._pending.remove(job)
            for replica, cancels in self._cancels.items():
                cancels.extend((job, why) for job in replica.jobs_of(call))
            self._changed.notify_all()
        call.send(*(TextUpdate(job.index, ended=True, end_reason=why) for job in waiting))

    def cancel_all(self, why: EndReason) -> None:
        """End the texts of all calls, for the reason `why`."""
        with self._changed:
            calls = {job.call for job in self._pending} | {
                job.call for replica in self.replicas for job in tuple(replica.jobs)
            }
        for call in calls:
            self.cancel(call, why)

    def _serve(self, replica: Replica, ready: Future[None]) -> None:
        """Run a replica until shutdown, on its thread; `ready` gets the result of entering the replica."""
        with ExitStack() as resources:
            try:
                resources.enter_context(replica)
            except BaseException as error:
                return ready.set_exception(error)
            ready.set_result(None)
            trimmed = time.monotonic()
            while (work := self._work(replica)) is not None:
                replica.turn(work.taken, work.cancelled)
                idle = not (replica.jobs or self._pending)
                if time.monotonic() - trimmed > (IDLE_SECONDS if idle else TRIM_SECONDS):
                    release_memory()
                    trimmed = time.monotonic()
                if self._pending:
                    with self._changed:  # the prefill that a queued text waits for may have ended
                        self._changed.notify_all()
            return replica.turn((), [(job, EndReason.SHUTDOWN) for job in replica.jobs])

    def _work(self, replica: Replica) -> Work | None:
        """Wait for a replica's next work; return None at shutdown."""
        with self._changed:
            cancels = self._cancels[replica]
            while not (self._closing or cancels or replica.load or self._next()):
                self._changed.wait()
            if self._closing:
                return None
            taken = []
            while replica.load < self._rows and replica.load <= min(self._loads()) and (job := self._next()):
                self._pending.remove(job)
                taken.append(job)
                replica.jobs.append(job)
            self._cancels[replica] = []
            return Work(taken, cancels)

    def _next(self) -> TextJob | None:
        """Return the first queued job that need not wait for another job's prefill."""
        return next((job for job in self._pending if job.first is None or job.first.begun), None)

    def _loads(self) -> Iterable[int]:
        living = zip(self.replicas, self._threads, strict=True)
        return [replica.load for replica, thread in living if thread.is_alive()]
