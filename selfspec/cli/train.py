"""The command `selfspec train`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import TextColumn

from selfspec.cli.common import (
    load_llm,
    model_for,
    print_json,
    profile_named,
    progress,
    quiet,
    set_threads,
    stage_line,
    stderr,
)
from selfspec.cli.options import TrainCommand
from selfspec.models.loading import check_at_hand
from selfspec.training.options import check_kind

PROGRESS_SECONDS = 30  # seconds between two progress lines where there is no progress bar

if TYPE_CHECKING:
    from selfspec.training.fit import Fitted


def run(command: TrainCommand) -> int:
    """Validate the options before loading the model, then train; return 130 after an interrupt."""
    quiet()
    kind = check_kind(command.kind)
    model = model_for(command.model, profile_named(command.profile))
    if command.train_options.student is not None:
        check_at_hand(command.train_options.student)
    prompts = command.data.read()
    set_threads(command.device_options.threads)

    from selfspec.training.fit import check_folder, fit

    check_folder(command.out)
    console = stderr()
    llm = load_llm(model, command.profile, command.device_options)
    with _Watch(console) as watch:
        fitted = fit(
            llm,
            part=kind,
            out=command.out,
            prompts=None if prompts is None else prompts.texts,
            chat=command.data.chat,
            profile=llm.known_profile,
            options=command.train_options,
            callbacks=watch,
        )
    _report(fitted, console)
    if command.json:
        files = {"part": str(fitted.part), "profiles": [str(path) for path in fitted.profiles]}
        print_json({**files, **fitted.record, "interrupted": fitted.interrupted})
    if fitted.interrupted:
        again = shlex.join(["selfspec", *sys.argv[1:]])
        console.print(f"to resume, run the same command again: {again}", markup=False, soft_wrap=True)
        return 130
    return 0


class _Watch:
    """Progress bar of a training: the current stage and its figures; periodic lines if there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console, self._last_printed = console, time.monotonic()
        self._bar = progress(console, TextColumn("{task.fields[said]}"))
        self._task = self._bar.add_task("loading the model", total=None, said="")

    def __enter__(self) -> _Watch:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, name: str, total: float | None) -> None:
        """Begin a stage of `total` steps; None: unknown."""
        stage_line(self._console, f"{name} ...")
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(name, total=total, said="")

    def step(self, done: float, message: str) -> None:
        """Show that `done` steps of the stage are complete, with `message`, a line of figures so far."""
        self._bar.update(self._task, completed=done, said=message)
        if message and time.monotonic() > self._last_printed + PROGRESS_SECONDS:
            stage_line(self._console, message)
            self._last_printed = time.monotonic()


def _report(fitted: Fitted, console: Console) -> None:
    done, agrees = fitted.progress, fitted.record.get("right")
    places = ", ".join(f"{share:.0%}" for share in done.acceptance)
    if agrees is None:
        brought = f"{done.best:.2f} tokens a pass on held-out texts, greedy drafts; right up to each position: {places}"
    else:
        (before, after), (other, shared) = agrees, fitted.record["shared"]
        brought = (
            f"the draft path's best token is the model's at {after:.1%} of held-out positions ({before:.1%} without); "
            f"it shares {shared:.1%} of the model's probability ({other:.1%} without)"
        )
    steps = f"{done.steps} steps on " if done.steps else ""
    console.print(f"{brought}; {steps}{fitted.texts} texts", markup=False, soft_wrap=True)
    console.print(f"saved {fitted.part}", markup=False, soft_wrap=True)
    if fitted.changed:
        before, after = fitted.record["perplexity"]
        message = f"training changed the model: perplexity on held-out answers {after:.2f}, before {before:.2f}"
        console.print(message, soft_wrap=True)
    print_usage(fitted.profiles, console, model=fitted.part if fitted.changed else None)


def print_usage(profiles: Sequence[Path], console: Console, *, model: Path | None = None) -> None:
    """Print how saved profiles are used; `model`: the folder of their model, if training changed it."""
    model_option = "" if model is None else f"--model {shlex.quote(str(model))} "
    for path in profiles:
        command = f"selfspec generate {model_option}--profile {shlex.quote(str(path))} 'your prompt'"
        console.print(f"saved {path}; use it with: {command}", markup=False, soft_wrap=True)
