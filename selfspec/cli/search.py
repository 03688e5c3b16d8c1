"""The command `selfspec search`."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import SpinnerColumn, TextColumn

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import check_not_read, check_writable
from selfspec.cli.common import (
    model_for,
    print_json,
    progress,
    quiet,
    say_how_to_resume,
    skip_map,
    stage_line,
    stderr,
)
from selfspec.cli.options import SearchCommand
from selfspec.cli.profile_text import facts, plain_step
from selfspec.profile.reading import write_profile
from selfspec.profile.schema import Profile
from selfspec.types.draft_path import LOW

if TYPE_CHECKING:
    from selfspec.search import Prompts, Trial
    from selfspec.search.budget import Budget


def run(command: SearchCommand) -> int:
    """Validate the options before loading the model, then search; return 130 after an interrupt."""
    quiet()
    budget = _budget(command.search_options.minutes)
    model = model_for(command.model, None)
    _check_places(command)
    prompts = command.data.read()
    console = stderr()
    with SearchWatch(console) as watch:
        watch.loading()
        profile = _search(model, command, prompts, budget, watch)
    if profile is None:
        if command.json:
            print_json({"out": None, "profile": None})
        return 0
    profile = write_profile(profile, command.out)
    print_found(profile, command.out, console)
    console.print(f"took {_time_taken(budget)}")
    if command.json:
        print_json({"out": str(command.out), "profile": profile.model_dump(mode="json", exclude_none=True)})
    if profile.search is not None and profile.search.interrupted:
        if command.trials_storage != "memory":
            say_how_to_resume(console)
        return 130
    if command.search_options.storage is None and isinstance(command.trials_storage, Path):
        command.trials_storage.unlink(missing_ok=True)
    return 0


def _search(
    model: str, command: SearchCommand, prompts: Prompts | None, budget: Budget, watch: SearchWatch
) -> Profile | None:
    """Load the model and search; return None if another worker saves the profile."""
    command.device_options.set_threads()

    from selfspec.llm.llm import load
    from selfspec.search import AnotherFinishes, run_search

    command.search_options.decoding.check()
    if command.data.chat:
        from selfspec.llm.prompt_encoding import check_chat

        check_chat(model)
    load_for = partial(
        load, model, profile="none", device=command.device_options.placement, dtype=command.device_options.dtype
    )
    quantized_drafts = (
        any(mode in command.search_options.allowed_modes for mode in LOW) and command.search_options.extra_memory != 0
    )
    llm = load_for(drafting=True, quantized_drafts=quantized_drafts)
    options = replace(
        command.search_options,
        prompts=prompts,
        chat=command.data.chat,
        storage=command.trials_storage,
        watch=watch,
        budget=budget,
        plain_llm=partial(load_for, drafting=False) if llm.layout != llm.plain_layout else None,
    )
    try:
        profile: Profile = run_search(llm, options)
    except AnotherFinishes as over:
        watch.say(str(over))
        return None
    return profile


def _budget(minutes: float | None) -> Budget:
    """Start the time budget of the whole command."""
    from selfspec.search.budget import Budget

    return Budget(None if minutes is None else 60 * minutes)


def _time_taken(budget: Budget) -> str:
    """Format the command's time and its budget; if it took over 10% longer, also the time of loading the model."""
    limit = f" of {budget.seconds:.3g} s asked for" if budget.limited else ""
    late = budget.limited and budget.spent > 1.1 * budget.seconds
    why = f"; {budget.loaded:.1f} s had passed when the model was loaded" if late else ""
    return f"{budget.spent:.1f} s{limit}{why}"


def _check_places(command: SearchCommand) -> None:
    """Raise `SelfspecError` if profile or trials cannot be written, or would overwrite each other or a data file."""
    from selfspec.search.storage import check_storage

    out, trials_storage, storage = command.out, command.trials_storage, command.search_options.storage
    as_out, as_storage = f"--out {out}", f"--storage {storage}"
    places = {out: as_out}
    if isinstance(trials_storage, Path):
        if trials_storage.resolve() == out.resolve():
            raise SelfspecError(f"{as_storage}: the profile is written there; expected another path")
        places[trials_storage] = as_out if storage is None else as_storage
    for place, option in places.items():
        check_writable(place)
        command.data.check_not_written(place, option)
    check_not_read(out, command.model, command.search_options.store, command.search_options.int4)
    check_storage(trials_storage)


class SearchWatch:
    """Progress bar of a search, or of quantising: the current stage, the best trial so far, the time left."""

    def __init__(self, console: Console) -> None:
        self._best = -math.inf
        self._console = console
        self._bar = progress(console, TextColumn("{task.fields[best]}"), SpinnerColumn("line"))
        self._task = self._bar.add_task("loading the model", total=None, best="")

    def __enter__(self) -> SearchWatch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar.live.is_started:
            self._bar.stop()

    def loading(self) -> None:
        """Show the bar while the model is loading."""
        self._bar.start()

    def stage(self, name: str, total: int | None) -> None:
        """Begin a stage of `total` steps (None: unknown) and show the bar.

        If standard error is not a terminal, a line is printed instead.
        """
        self._bar.start()
        stage_line(self._console, f"{name} ...")
        best = self._bar.tasks[0].fields["best"]
        self._bar.remove_task(self._task)  # the total of a task cannot be reset to unknown
        self._task = self._bar.add_task(name, total=total, best=best)

    def step(self, done: int) -> None:
        """Show that `done` steps of the stage are complete."""
        self._bar.update(self._task, completed=done)

    def trial(self, trial: Trial) -> None:
        """Show a finished trial; a new best trial is printed as a line, unless it was resumed from storage."""
        score = trial.score
        if not score.pruned and score.speedup > self._best:
            self._best = score.speedup
            if not trial.known:
                self._bar.console.print(
                    f"trial {trial.number + 1}: {trial.speedup}, {score.path.summary}, "
                    f"{score.acceptance_rate:.0%} accepted",
                    soft_wrap=True,
                )
        best = "" if math.isinf(self._best) else f"best {self._best:.2f}x plain"
        self._bar.update(self._task, completed=trial.number + 1, best=best)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(line, soft_wrap=True, markup=False)


def print_found(profile: Profile, out: Path, console: Console) -> None:
    """Print the profile that a search saved at `out`, what is known of its speed, and how it is used."""
    console.print(skip_map(profile))
    if searched_on := facts(profile).get("calibration"):
        console.print(f"searched on {', '.join(searched_on)}", markup=False, soft_wrap=True)
    if profile.costs is not None:
        c = profile.costs
        error = "" if c.error is None else f" (predicted draft steps of other paths within {c.error:.0%})"
        console.print(
            f"costs: plain step {plain_step(c)}, verifying 4 tokens {c.verification(4) / c.verify[0]:.2f} times "
            f"as much as 1{error}"
        )
    if profile.predicted is not None:
        p = profile.predicted
        console.print(
            f"predicted {p.speedup:.2f}x plain decoding, acceptance {p.acceptance_rate:.0%}, {p.tokens_per_round:.2f} "
            f"tokens a pass, draft step cost {p.draft_cost:.2f} plain steps"
        )
    for m in profile.measured:
        prompts = "1 prompt" if m.prompts == 1 else f"{m.prompts} prompts"
        where = f"{prompts} held out" if m.held_out else f"the {prompts} of the search"
        low, high = m.interval
        console.print(
            f"measured {m.speedup:.2f}x plain decoding ({low:.2f} to {high:.2f}) on {where}, "
            f"acceptance {m.acceptance_rate:.0%}"
        )
    if profile.note:
        console.print(profile.note, markup=False)
    chat = "--chat " if profile.calibration is not None and profile.calibration.chat else ""
    command = f"selfspec generate {chat}--profile {shlex.quote(str(out))} 'your prompt'"
    use = f"use it with: {command}" if profile.drafts else "it drafts nothing: decoding is plain"
    files = ", ".join(part.file for part in profile.parts.values())
    beside = f" and, beside it, {files}" if files else ""
    console.print(f"saved {out}{beside}; {use}", markup=False, soft_wrap=True)
