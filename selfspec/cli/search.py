"""`selfspec search`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from selfspec.cli.common import print_json, quiet, set_threads, skip_map, stderr
from selfspec.controllers import parse_controller
from selfspec.errors import SelfspecError
from selfspec.files import check_writable
from selfspec.loading import check_dtype, check_model_name
from selfspec.profile import Profile, write_profile

if TYPE_CHECKING:
    from selfspec.search import Trial


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The command's options, as given."""

    model: str
    data: Path | None
    strategy: str
    trials: int
    prompts: int
    seed: int
    out: Path
    max_new_tokens: int
    controller: str | None
    device: str
    dtype: str
    threads: int | None
    keep_best: bool
    warm_starts: bool
    json: bool


def run(options: SearchOptions) -> None:
    """Check everything that can be checked before the model is loaded, then search."""
    quiet()
    check_model_name(options.model)
    check_dtype(options.dtype)
    spec = None if options.controller is None else parse_controller(options.controller)
    from selfspec.search.calibration import read_prompts
    from selfspec.search.strategies import check_strategy

    check_strategy(options.strategy)
    prompts = read_prompts(options.data) if options.data else None
    check_writable(options.out)
    if options.data and options.out.resolve() == options.data.resolve():
        raise SelfspecError(f"--out {options.out} is the data file; want another place")
    set_threads(options.threads)

    from selfspec.api import load
    from selfspec.search import find_profile

    console = stderr()
    llm = load(options.model, profile="none", device=options.device, dtype=options.dtype)
    with _Watch(console, options.trials) as watch:
        profile = find_profile(
            llm,
            prompts,
            source=str(options.data.name) if options.data else "builtin",
            strategy=options.strategy,
            trials=options.trials,
            seed=options.seed,
            count=options.prompts,
            max_new_tokens=options.max_new_tokens,
            controller=spec,
            warm=options.warm_starts,
            keep_best=options.keep_best,
            on_trial=watch.trial,
            on_stage=watch.stage,
        )
    write_profile(profile, options.out)
    _report(profile, options, console)
    if options.json:
        print_json({"out": str(options.out), "profile": profile.model_dump(mode="json", exclude_none=True)})


class _Watch:
    """The progress bar: trials done, the best so far, time left."""

    def __init__(self, console: Console, trials: int) -> None:
        self._best = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[best]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("loading", total=trials, best="")

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar.live.is_started:
            self._bar.stop()

    def stage(self, name: str) -> None:
        """What happens now; the bar shows from the first stage on, when everything has been checked."""
        self._bar.start()
        self._bar.update(self._task, description=name)

    def trial(self, trial: Trial) -> None:
        """A trial is done."""
        self._best = max(self._best, trial.speedup)
        self._bar.update(self._task, advance=1, best=f"best {self._best:.2f}x plain")


def _report(profile: Profile, options: SearchOptions, console: Console) -> None:
    console.print(skip_map(profile))
    for m in profile.measured:
        where = f"{m.prompts} held-out prompts" if m.held_out else f"the {m.prompts} prompts searched on"
        low, high = m.interval
        console.print(
            f"{m.speedup:.2f}x plain decoding ({low:.2f} to {high:.2f}) on {where}, acceptance {m.acceptance_rate:.0%}"
        )
    if profile.note:
        console.print(profile.note, markup=False)
    command = f"selfspec generate --profile {shlex.quote(str(options.out))} 'your prompt'"
    console.print(f"saved {options.out}; use it with: {command}", markup=False, soft_wrap=True)
