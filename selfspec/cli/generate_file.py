"""`selfspec generate --prompts`: decode many prompts in batches into a file of results, from which a run resumes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.progress import TextColumn

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import check_writable, json_line, kind, parse_json, write_text
from selfspec.cli.command_options import GenerateCommand
from selfspec.cli.common import printable, progress, quiet, say_how_to_resume, stage_line, stderr
from selfspec.cli.decoding_options import decoding

if TYPE_CHECKING:
    from rich.console import Console

    from selfspec.llm.batch import BatchCounters
    from selfspec.llm.llm import LLM
    from selfspec.llm.options import Options
    from selfspec.llm.request import Request
    from selfspec.llm.sampling_plan import Plan
    from selfspec.speculation.drafter import Drafter
    from selfspec.text.prompt_template import Prompt

SINGLE_PROMPT_OPTIONS = ("prompt", "compare", "color", "json")  # options for a single prompt
PROGRESS_INTERVAL = 32  # results between two progress lines where there is no progress bar


def run_many(command: GenerateCommand) -> int:
    """Validate the options before loading the model, then decode the prompts whose results are missing in the file.

    Returns 130 after an interrupt, and 1 if a prompt failed.
    """
    quiet()
    _check(command)
    request = decoding(command.decoding)
    request.run_as_worker()
    how = request.check()
    raw_prompts = command.data.read(every=True, limit=command.limit)
    assert raw_prompts is not None
    assert command.out is not None
    chat = command.data.chat or raw_prompts.messages
    request.check_chat(chat=command.data.chat, system=command.system)

    from selfspec.llm.prompt_encoding import encode, takes_messages

    llm = request.load()
    how = request.complete(llm, how)
    chat = command.data.chat or (chat and takes_messages(llm))
    jobs = []
    for index, text in enumerate(islice(raw_prompts.texts, command.limit)):
        prompt, error = list[int](), None
        try:
            prompt = encode(llm, text, chat=chat, system=command.system)
            llm.check_fits(prompt, how)
        except SelfspecError as cause:
            error = str(cause)
        jobs.append(_Job(index, text, prompt, _key(llm, command, how, request.schema, prompt or text), error))
    first = next((job for job in jobs if job.error is None), None)
    plans = {} if first is None else {first.index: llm.plan(first.prompt, how)}
    if first is not None:
        request.hint(llm, plans[first.index], how)
    done = _finished_indices(command.out, jobs, command.limit)
    if done:
        message = f"{command.out}: {len(done)} of {len(jobs)} are done already"
        stderr().print(message, markup=False, soft_wrap=True)
    left = [job for job in jobs if job.index not in done]
    return _decode(command, llm, how, left, plans, request.drafter_in_batches(llm)) if left else 0


@dataclass(frozen=True, slots=True)
class _Job:
    """A prompt of the file, as read and as token ids.

    `key`: a hash of everything that its result depends on. `error`: why it cannot be decoded, None if it can.
    """

    index: int
    text: Prompt
    prompt: list[int]
    key: str
    error: str | None = None


def _check(command: GenerateCommand) -> None:
    for name in SINGLE_PROMPT_OPTIONS:
        if getattr(command, name):
            option = "a prompt" if name == "prompt" else f"--{name}"
            raise SelfspecError(f"--prompts: given with {option}; expected only one of the two")
    if command.out is None:
        raise SelfspecError("--prompts: given without --out; expected a file for results, such as results.jsonl")
    if command.system is not None and not command.data.chat:
        raise SelfspecError("--system is for chats; expected --chat with it")
    command.data.check_not_written(command.out, "--out")
    if command.decoding.answers is not None and command.decoding.answers.resolve() == command.out.resolve():
        raise SelfspecError(f"--out {command.out} and --answers name one file; expected two")
    check_writable(command.out)


def _key(llm: LLM, command: GenerateCommand, how: Options, schema: str | None, prompt: Prompt) -> str:
    """Return a short hash of everything that a result depends on: model, prompt, decoding options and JSON schema."""
    options = command.decoding
    what = [
        llm.identity.model_dump(mode="json", exclude={"name"}),
        list(prompt),
        repr(options.generation_options),
        options.stop,
        None if how.config is None else how.config.to_json_string(),
        options.settings,
        options.min_p,
        options.repetition_penalty,
        options.regex,
        schema,
        str(llm.runtime.dtype),
    ]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _finished_indices(out: Path, jobs: Sequence[_Job], limit: int | None) -> set[int]:
    """Return the indices of the prompts with results in the file; drop an incomplete last line and lines of errors.

    Raises `SelfspecError` if the file holds anything else.
    """
    if kind(out) == "missing":
        return set()
    data = out.read_bytes()
    complete_lines = data[: data.rfind(b"\n") + 1]
    begun, start = data[len(complete_lines) :], b'{"index": '
    if not begun.startswith(start) and not start.startswith(begun):
        raise SelfspecError(f"{out}: its last line is not a result of this command; expected another --out file")
    indices, results = set[int](), list[str]()
    for number, line in enumerate(complete_lines.decode("utf-8", "replace").split("\n")[:-1], start=1):
        try:
            row = parse_json(line)
            index, key = int(row["index"]), str(row["key"])
        except (ValueError, TypeError, KeyError, OverflowError):
            raise SelfspecError(f"{out}:{number}: not a result of this command; expected another --out file") from None
        if limit is not None and index >= limit:
            raise SelfspecError(f"{out}:{number}: a result of prompt {index + 1}, beyond --num-prompts {limit}")
        if not 0 <= index < len(jobs) or jobs[index].key != key:
            raise SelfspecError(
                f"{out}:{number}: a result of another prompt, model or decoding option; expected another --out file"
            )
        if "error" not in row:
            indices.add(index)
            results.append(f"{line}\n")
    if len(results) < complete_lines.count(b"\n"):
        write_text(out, "".join(results))
    elif len(complete_lines) < len(data):
        os.truncate(out, len(complete_lines))
    return indices


def _decode(
    command: GenerateCommand,
    llm: LLM,
    how: Options,
    jobs: Sequence[_Job],
    plans: Mapping[int, Plan],
    make: Callable[[Any], Drafter] | None,
) -> int:
    """Decode the jobs and write each result as it ends; return the exit code. `make`: as of `Batch`."""
    from selfspec.llm.batch import Batch
    from selfspec.llm.generate_many import check_memory, decode_many, longest

    console, failed = stderr(), [job for job in jobs if job.error is not None]
    jobs = [job for job in jobs if job.error is None]
    by_index = {job.index: job for job in jobs}
    bar = progress(console, TextColumn("{task.fields[said]}"))
    assert command.out is not None
    with command.out.open("a", encoding="utf-8") as out:
        for job in failed:
            _fail(console, out, job, str(job.error))
    if not jobs:
        return 1
    rows, most = min(command.batch_size or 8, len(jobs)), longest(llm, [job.prompt for job in jobs], how)
    with (
        Batch(llm, rows=rows, memory=command.memory, longest=most, make=make) as batch,
        bar,
        command.out.open("a", encoding="utf-8") as out,
    ):
        for job in list(jobs):
            try:
                check_memory(batch, job.prompt, how)
            except SelfspecError as error:
                jobs.remove(job)
                failed.append(job)
                _fail(console, out, job, str(error))
        task = bar.add_task("decoding", total=len(jobs), said="")
        stage_line(console, f"decoding {len(jobs)} prompts ...")
        start, written = time.perf_counter(), 0
        try:
            prompts = ((job.index, job.prompt) for job in jobs)
            for done, (index, request) in enumerate(decode_many(batch, prompts, how, plans=plans), start=1):
                if request.error is None:
                    _write(out, _row(by_index[index], request))
                    written += 1
                else:
                    failed.append(by_index[index])
                    _fail(console, out, by_index[index], str(request.error))
                speed = f"{batch.counters.tokens / (time.perf_counter() - start):.0f} tokens/s"
                bar.update(task, completed=done, said=speed)
                if done % PROGRESS_INTERVAL == 0:
                    stage_line(console, f"{done} of {len(jobs)}, {speed}")
        except KeyboardInterrupt:
            bar.stop()
            say_how_to_resume(console)
            return 130
        finally:
            seconds = time.perf_counter() - start
            shown = stderr(always=True) if console.quiet and command.stats else console
            bar.stop()
            shown.print(
                _summary(batch.counters, seconds, command.out, written, len(failed)), markup=False, soft_wrap=True
            )
            if command.stats:
                shown.print(_stats(batch.counters), soft_wrap=True)
    return 1 if failed else 0


def _row(job: _Job, request: Request) -> dict[str, Any]:
    """Return a result as a record of the file."""
    return {
        "index": job.index,
        "prompt": job.text,
        "text": request.text,
        "tokens": request.tokens,
        "finish": request.finish,
        "stats": request.stats.as_dict(),
        "key": job.key,
    }


def _fail(console: Console, out: TextIO, job: _Job, error: str) -> None:
    """Print a prompt's error and write it as the prompt's line."""
    shown = stderr(always=True) if console.quiet else console
    shown.print(printable(f"prompt {job.index + 1}: {error}"), markup=False, soft_wrap=True)
    _write(out, {"index": job.index, "prompt": job.text, "error": error, "key": job.key})


def _write(out: TextIO, row: dict[str, Any]) -> None:
    """Write a line and sync it to disk. Raises `SelfspecError` if it cannot be written."""
    try:
        out.write(json_line(row) + "\n")
        out.flush()
        os.fsync(out.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):  # closed here, as the text that is left would fail again
            out.close()
        raise SelfspecError(f"{out.name}: cannot be written ({error.strerror or error})") from None


def _summary(counters: BatchCounters, seconds: float, out: Path, written: int, failed: int) -> str:
    """Format what was decoded, in what time, and where the results are, as one line.

    `written`: the prompts whose results are in the file.
    """
    c = counters
    drafts = f"; {c.accepted / c.drafted:.0%} of {c.drafted} drafted tokens accepted" if c.drafted else ""
    errors = f"; {failed} failed" if failed else ""
    return (
        f"{written} prompts, {c.tokens} tokens in {seconds:.2f} s ({c.tokens / seconds:.1f} a second)"
        f"{drafts}{errors}; results: {out}"
    )


def _stats(counters: BatchCounters) -> str:
    """Format rounds, reuse and preemptions of the run as one line."""
    c = counters
    return (
        f"{c.rounds} rounds, {c.drafted} drafted, {c.accepted} accepted; {c.reused} prompt tokens reused from the KV "
        f"cache, {c.evicted} preemptions"
    )
