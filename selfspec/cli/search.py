"""`selfspec search`."""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import TextColumn

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import check_writable
from selfspec.cli.common import print_json, progress, quiet, set_threads, skip_map, stderr
from selfspec.cli.data import DataOptions
from selfspec.controllers import parse_controller
from selfspec.model.loading import DeviceMap, check_dtype, check_model_name
from selfspec.profile.reading import write_profile
from selfspec.profile.schema import Profile

if TYPE_CHECKING:
    from selfspec.llm.llm import LLM
    from selfspec.search import Trial


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The command's options, as given."""

    model: str
    data: DataOptions
    objective: str
    strategy: str
    trials: int
    minutes: float | None
    prompts: int
    seed: int
    out: Path
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    rule: str | None
    context: int | None
    controller: str | None
    keep: str
    granularity: str
    max_draft_cost: float | None
    device: str | DeviceMap
    dtype: str
    threads: int | None
    keep_best: bool
    kv: str
    warm_starts: bool
    storage: str | None
    study: str
    json: bool

    @property
    def kept_in(self) -> str | Path:
        """Where the trials are kept: a file, `memory` or a database."""
        from selfspec.search.storage import place

        beside = self.out.parent / f"{self.out.name}.trials.jsonl"
        kept: str | Path = place(beside if self.storage is None else self.storage)
        return kept


def run(options: SearchOptions) -> int:
    """Check everything that can be checked before the model is loaded, then search. 130 after an interrupt."""
    quiet()
    check_model_name(options.model)
    check_dtype(options.dtype)
    spec = None if options.controller is None else parse_controller(options.controller)
    from selfspec.search.checks import check_options
    from selfspec.search.space import parse_keep
    from selfspec.search.storage import check_storage

    keep = parse_keep(options.keep)
    check_options(
        objective=options.objective,
        strategy=options.strategy,
        granularity=options.granularity,
        kv=options.kv,
        trials=options.trials,
        count=options.prompts,
        seed=options.seed,
        minutes=options.minutes,
        context=options.context,
        max_draft_cost=options.max_draft_cost,
    )
    prompts = options.data.read()
    as_out, as_storage = f"--out {options.out}", f"--storage {options.storage}"
    places = {options.out: as_out}
    if isinstance(options.kept_in, Path):
        if options.kept_in.resolve() == options.out.resolve():
            raise SelfspecError(f"{as_storage} is where the profile goes; want another place")
        places[options.kept_in] = as_out if options.storage is None else as_storage
    for place, option in places.items():
        check_writable(place)
        options.data.check_not_written(place, option)
    check_storage(options.kept_in)
    set_threads(options.threads)

    from selfspec.llm.llm import load
    from selfspec.search import AnotherFinishes, find_profile
    from selfspec.search.continuations import Decoding

    decoding = Decoding(options.max_new_tokens, options.temperature, options.top_k, options.top_p, rule=options.rule)
    decoding.check()
    if options.data.chat:
        from selfspec.llm.prompts import check_chat

        check_chat(options.model)
    console = stderr()
    llm = load(options.model, profile="none", device=options.device, dtype=options.dtype, drafting=True)

    def plainly() -> LLM:
        return load(options.model, profile="none", device=options.device, dtype=options.dtype, drafting=False)

    try:
        with _Watch(console) as watch:
            profile = find_profile(
                llm,
                prompts,
                chat=options.data.chat,
                objective=options.objective,
                strategy=options.strategy,
                trials=options.trials,
                minutes=options.minutes,
                seed=options.seed,
                count=options.prompts,
                max_new_tokens=options.max_new_tokens,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                rule=options.rule,
                context=options.context,
                controller=spec,
                keep=keep,
                granularity=options.granularity,
                max_draft_cost=options.max_draft_cost,
                warm=options.warm_starts,
                keep_best=options.keep_best,
                kv=options.kv,
                storage=options.kept_in,
                study=options.study,
                watch=watch,
                usual=plainly if llm.layout == "onednn" else None,
            )
    except AnotherFinishes as over:
        console.print(str(over), markup=False, soft_wrap=True)
        return 0
    write_profile(profile, options.out)
    _report(profile, options, console)
    if options.json:
        print_json({"out": str(options.out), "profile": profile.model_dump(mode="json", exclude_none=True)})
    if profile.search is not None and profile.search.interrupted:
        again = shlex.join(["selfspec", *sys.argv[1:]])
        console.print(f"to resume the search, run the same command again: {again}", markup=False, soft_wrap=True)
        return 130
    if options.storage is None and isinstance(options.kept_in, Path):
        options.kept_in.unlink(missing_ok=True)
    return 0


class _Watch:
    """The progress bar: what is done now, the best so far, time left."""

    def __init__(self, console: Console) -> None:
        self._best = -math.inf
        self._bar = progress(console, TextColumn("{task.fields[best]}"))
        self._task = self._bar.add_task("loading", total=None, best="")

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar.live.is_started:
            self._bar.stop()

    def stage(self, name: str, total: int | None) -> None:
        """What happens now; the bar shows from the first stage on, when everything has been checked."""
        self._bar.start()
        best = self._bar.tasks[0].fields["best"]
        self._bar.remove_task(self._task)  # a task whose total is known cannot forget it
        self._task = self._bar.add_task(name, total=total, best=best)

    def step(self, done: int) -> None:
        """So many steps of the stage are done."""
        self._bar.update(self._task, completed=done)

    def trial(self, trial: Trial) -> None:
        """A trial is done; one that betters all before has a line of its own."""
        score = trial.score
        if not score.pruned and score.speedup > self._best:
            self._best = score.speedup
            if not trial.known:
                self._bar.console.print(
                    f"trial {trial.number + 1}: {score.speedup:.2f}x plain decoding predicted, {len(score.skip)} "
                    f"sub-layers bypassed, {score.acceptance_rate:.0%} accepted",
                    soft_wrap=True,
                )
        best = "" if math.isinf(self._best) else f"best {self._best:.2f}x plain"
        self._bar.update(self._task, completed=trial.number + 1, best=best)


def _report(profile: Profile, options: SearchOptions, console: Console) -> None:
    console.print(skip_map(profile))
    if profile.costs is not None:
        c = profile.costs
        error = "" if c.error is None else f" (draft steps of fresh skip sets within {c.error:.0%})"
        console.print(
            f"costs: plain step {c.plain * 1e3:.3g} ms, verifying 4 tokens {c.verification(4) / c.verify[0]:.2f} times "
            f"as much as 1{error}"
        )
    if profile.predicted is not None:
        p = profile.predicted
        console.print(
            f"predicted {p.speedup:.2f}x plain decoding, acceptance {p.acceptance_rate:.0%}, {p.tokens_per_round:.2f} "
            f"tokens a pass, a draft step at {p.draft_cost:.2f} of a plain one"
        )
    for m in profile.measured:
        prompts = "1 prompt" if m.prompts == 1 else f"{m.prompts} prompts"
        where = f"{prompts} held out" if m.held_out else f"the {prompts} searched on"
        low, high = m.interval
        console.print(
            f"measured {m.speedup:.2f}x plain decoding ({low:.2f} to {high:.2f}) on {where}, "
            f"acceptance {m.acceptance_rate:.0%}"
        )
    if profile.note:
        console.print(profile.note, markup=False)
    command = f"selfspec generate --profile {shlex.quote(str(options.out))} 'your prompt'"
    console.print(f"saved {options.out}; use it with: {command}", markup=False, soft_wrap=True)
