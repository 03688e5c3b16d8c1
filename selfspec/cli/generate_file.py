"""`selfspec generate --prompts`: decode many prompts in a batch into a file of results, from which a run resumes."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.progress import TextColumn

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import check_writable, kind
from selfspec.cli.common import printable, progress, quiet, stage_line, stderr
from selfspec.cli.decoding_options import decoding
from selfspec.cli.generate_options import GenerateCommand

if TYPE_CHECKING:
    from selfspec.llm.batch import BatchCounters
    from selfspec.llm.llm import LLM
    from selfspec.llm.options import Options
    from selfspec.llm.request import Request
    from selfspec.llm.sampling_plan import Plan

SINGLE = ("prompt", "compare", "color", "json")  # options for a single prompt
TOLD = 32  # results between two progress lines where there is no progress bar


def run_many(given: GenerateCommand) -> int:
    """Validate the options before loading the model, then decode the prompts whose results are missing in the file.

    Returns 130 after an interrupt, and 1 if a prompt failed.
    """
    quiet()
    _check(given)
    asked = decoding(given.decoding)
    asked.follow()
    how = asked.check()
    read = given.data.read()
    assert read is not None
    assert given.out is not None
    chat = given.data.chat or read.messages
    asked.check_chat(chat=given.data.chat, system=given.system)

    from selfspec.llm.generate_many import check_prompts, of_prompt
    from selfspec.llm.prompt_encoding import encode, takes_messages

    llm = asked.load()
    how = asked.complete(llm, how)
    chat = given.data.chat or (chat and takes_messages(llm))
    jobs = []
    for index, text in enumerate(read.texts):
        with of_prompt(index):
            prompt = encode(llm, text, chat=chat, system=given.system)
        jobs.append(_Job(index, text, prompt, _key(llm, given, prompt)))
    first = check_prompts(llm, [job.prompt for job in jobs], how)
    done = _done(given.out, jobs)
    if done:
        said = f"{given.out}: {len(done)} of {len(jobs)} are done already"
        stderr().print(said, markup=False, soft_wrap=True)
    left = [job for job in jobs if job.index not in done]
    return _decode(given, llm, how, left, first) if left else 0


@dataclass(frozen=True, slots=True)
class _Job:
    """A prompt of the file, as text and as token ids; `key`: a hash of everything that its result depends on."""

    index: int
    text: str
    prompt: list[int]
    key: str


def _check(given: GenerateCommand) -> None:
    for name in SINGLE:
        if getattr(given, name):
            option = "a prompt" if name == "prompt" else f"--{name}"
            raise SelfspecError(
                f"--prompts decodes many prompts together, and {option} is of one; leave one of them out"
            )
    if given.out is None:
        raise SelfspecError("--prompts: say where the results go, with --out results.jsonl")
    if given.system is not None and not given.data.chat:
        raise SelfspecError("--system is for chats; expected --chat with it")
    given.data.check_not_written(given.out, "--out")
    check_writable(given.out)


def _key(llm: LLM, given: GenerateCommand, prompt: Sequence[int]) -> str:
    """Return a short hash of everything that a result depends on: model, prompt and decoding options."""
    asked = given.decoding
    what = [
        llm.identity.model_dump(mode="json", exclude={"name"}),
        list(prompt),
        repr(asked.how),
        asked.stop,
        asked.generation_config,
        asked.settings,
        asked.regex,
        None if asked.json_schema is None else asked.json_schema.read_text(),
        str(llm.runtime.dtype),
    ]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _done(out: Path, jobs: Sequence[_Job]) -> set[int]:
    """Return the indices of the prompts with results in the file, and truncate an incomplete last line.

    Raises `SelfspecError` if the file holds anything else.
    """
    if kind(out) == "missing":
        return set()
    data = out.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    found = set[int]()
    for number, line in enumerate(whole.decode("utf-8", "replace").splitlines(), start=1):
        try:
            row = json.loads(line)
            index, key = int(row["index"]), str(row["key"])
        except (ValueError, TypeError, KeyError):
            raise SelfspecError(f"{out}:{number}: no result of this command; expected another file for --out") from None
        if not 0 <= index < len(jobs) or jobs[index].key != key:
            raise SelfspecError(
                f"{out}:{number}: the result of another prompt, model or way to decode; expected another file for --out"
            )
        found.add(index)
    if len(whole) < len(data):
        os.truncate(out, len(whole))
    return found


def _decode(given: GenerateCommand, llm: LLM, how: Options, jobs: Sequence[_Job], first: Plan | None) -> int:
    """Decode the jobs and write each result as it ends; return the exit code."""
    from selfspec.llm.batch import Batch
    from selfspec.llm.generate_many import decoded

    console, failed = stderr(), 0
    by_index = {job.index: job for job in jobs}
    bar = progress(console, TextColumn("{task.fields[said]}"))
    task = bar.add_task("decoding", total=len(jobs), said="")
    assert given.out is not None
    rows = min(given.batch_size, len(jobs))
    with Batch(llm, rows=rows, memory=given.memory) as batch, bar, given.out.open("a") as out:
        stage_line(console, f"decoding {len(jobs)} prompts ...")
        start = time.perf_counter()
        try:
            prompts = ((job.index, job.prompt) for job in jobs)
            for done, (index, request) in enumerate(decoded(batch, prompts, how, first=first), start=1):
                if request.error is None:
                    _write(out, _row(by_index[index], request))
                else:
                    failed += 1
                    console.print(printable(f"prompt {index + 1}: {request.error}"), markup=False, soft_wrap=True)
                said = f"{batch.counters.tokens / (time.perf_counter() - start):.0f} tokens/s"
                bar.update(task, completed=done, said=said)
                if done % TOLD == 0:
                    stage_line(console, f"{done} of {len(jobs)}, {said}")
        except KeyboardInterrupt:
            bar.stop()
            again = shlex.join(["selfspec", *sys.argv[1:]])
            console.print(f"to go on, run the same command again: {again}", markup=False, soft_wrap=True)
            return 130
        finally:
            if given.stats:
                console.print(_stats(batch.counters, time.perf_counter() - start), soft_wrap=True)
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


def _write(out: TextIO, row: dict[str, Any]) -> None:
    """Write a line and sync it to disk. Raises `SelfspecError` if it cannot be written."""
    try:
        out.write(json.dumps(row, ensure_ascii=False) + "\n")
        out.flush()
        os.fsync(out.fileno())
    except OSError as error:
        raise SelfspecError(f"{out.name}: cannot be written ({error.strerror or error})") from None


def _stats(counters: BatchCounters, seconds: float) -> str:
    """Format time, rounds and acceptance of the run as one line."""
    c = counters
    share = c.accepted / c.drafted if c.drafted else 0.0
    return (
        f"{c.requests} prompts, {c.tokens} tokens in {seconds:.2f} s ({c.tokens / seconds:.1f} a second), "
        f"{c.rounds} rounds, {c.drafted} drafted, {c.accepted} accepted ({share:.0%}); {c.reused} prompt tokens were "
        f"known already, {c.evicted} times a text made room for others"
    )
