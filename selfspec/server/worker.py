"""One worker: a batch and the texts in it, on one thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from selfspec.basics.errors import SelfspecError
from selfspec.server.errors import ApiError, wrong
from selfspec.server.request_state import Call, EndReason, TextJob, TextUpdate

if TYPE_CHECKING:
    from selfspec.llm.batch import Batch
    from selfspec.llm.request import Request

_LOGGER = logging.getLogger("selfspec.server")


class Replica:
    """A worker that decodes one batch on one thread; other threads only read its state.

    `device`: the model's device. `jobs`: texts that have a cache row, or are about to get a row. `free` and
    `num_slots`: the free and all slots of the batch's KV cache, after the last step.
    """

    def __init__(self, batch: Batch, device: str = "cpu") -> None:
        self.batch = batch
        self._device = device
        self.jobs: list[TextJob] = []
        self.free, self.num_slots, self.max_seq_len = batch.free, batch.num_slots, batch.max_seq_len

    def __enter__(self) -> Replica:
        if self._device.startswith("cuda"):
            import torch

            torch.cuda.set_device(torch.device(self._device))  # each thread has its own current device
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
                job.prompt_logprobs = tuple(self.batch.prompt_logprobs(job.text.prompt, job.text.options, parsed.top))
            if parsed.prompt_only:
                update = TextUpdate(job.index, logprobs=job.prompt_logprobs, ended=True, finish="length")
                self._leave(job, update)
                return
            job.request = self.batch.add(
                list(job.text.prompt), job.text.options, planned=job.text.planned, top=parsed.top
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
