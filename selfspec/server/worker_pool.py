"""One queue of texts, and for each replica a thread that takes texts from the queue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from selfspec.server.errors import ApiError, wrong
from selfspec.server.request_state import Call, EndReason, TextJob, TextUpdate
from selfspec.server.worker import Replica

MOST_SECONDS = 60  # the longest Retry-After sent to a client


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
            raise ApiError(503, "the server is ending", headers={"Retry-After": "10"})
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
            while (work := self._work(replica)) is not None:
                replica.turn(work.taken, work.cancelled)
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
