"""The command `selfspec report`."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from selfspec import builtin
from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import check_writable, write_text
from selfspec.cli.common import checked_profile, model_for, progress, quiet, set_threads, stderr
from selfspec.cli.data import Given
from selfspec.cli.file_kinds import open_study
from selfspec.cli.options import ReportCommand
from selfspec.cli.profile_text import facts, label
from selfspec.profile.schema import Profile
from selfspec.types.draft_path import WORDS

if TYPE_CHECKING:
    import pandas as pd
    from markupsafe import Markup

    from selfspec.llm.llm import LLM
    from selfspec.search.ledger import Ledger
    from selfspec.show.report import Section, ShownSample, Table

_CONDITIONS = ("figures of", "temperature", "of plain's speed", "prompts x tokens", "on")
_GIVE_PROFILE = "No profile was given: --profile or --study shows what is bypassed, and what is accepted."
_GIVE_STUDY = (
    "No search's trials were given: --study FILE (kept by selfspec search --storage FILE) shows what single sub-layers "
    "do, acceptance against draft cost, speedup against bypassed sub-layers, and the search's progress."
)
_GIVE_BENCH = "No benchmark was given: --bench FILE (written by selfspec bench --out FILE) shows measured speeds."


@dataclass(frozen=True)
class _Decoded:
    """Texts decoded for the page, and acceptance by position; `conditions`: their row of the table of conditions."""

    samples: tuple[ShownSample, ...]
    positions: pd.DataFrame
    intro: str
    conditions: tuple[str, ...]


def run(options: ReportCommand) -> None:
    """Validate the options before loading the model, then decode, draw, and write the page."""
    quiet()
    _check(options)
    from selfspec.show.tables import read_bench

    bench = None if options.bench is None else read_bench(options.bench)
    ledger = None if options.study is None else open_study(options.study, options.storage)
    profile = _profile(options, ledger)
    decoded = None
    if not options.no_sample and profile is not None and profile.drafts:
        decoded = _decoded(options, profile)
    page = _page(options, profile, ledger, bench, decoded)
    write_text(options.out, page)
    stderr().print(f"saved {options.out}", markup=False, soft_wrap=True)


def _check(options: ReportCommand) -> None:
    check_writable(options.out)
    if options.storage is not None and options.study is None:
        raise SelfspecError("--storage holds studies; say which with --study")
    read = (options.profile, options.study, options.storage, options.bench)
    if options.out.resolve() in {Path(given).resolve() for given in read if given}:
        raise SelfspecError(f"--out {options.out} would write over what is to be shown; expected another place")
    options.data.check_not_written(options.out, f"--out {options.out}")


def _profile(options: ReportCommand, ledger: Ledger | None) -> Profile | None:
    """Return the named profile, else the study's best, else the shipped one unless only a benchmark is shown."""
    if options.profile is not None:
        return checked_profile(options.profile)
    if ledger is not None:
        from selfspec.search.front_pick import as_profile, best_within

        best = best_within(ledger, None)
        try:
            picked: Profile = as_profile(ledger, best)
            return picked
        except (KeyError, TypeError, ValidationError) as error:
            raise SelfspecError(f"{ledger.place} is damaged ({type(error).__name__}); give --profile") from None
    if options.model not in (None, builtin.NAME):
        raise SelfspecError(f"--model {options.model}: expected --profile or --study, too: what it is to be shown with")
    return checked_profile(builtin.PROFILE) if options.bench is None or options.model is not None else None


def _decoded(options: ReportCommand, profile: Profile) -> _Decoded:
    """Decode a few held-out prompts with the profile's drafter, greedily and without the guard."""
    read = options.data.read(held_out=True)
    set_threads(options.where.threads)

    from selfspec.llm.llm import load
    from selfspec.llm.prompt_encoding import check_chat

    try:
        name = model_for(options.model, profile)
        if options.data.chat:
            check_chat(name)
        llm = load(name, profile=profile, device=options.where.place, dtype=options.where.dtype)
    except SelfspecError as error:
        raise SelfspecError(f"{error}; --no-sample makes the page without the model") from None
    given = options.data.given(llm, read, limit=options.limit, max_new_tokens=options.max_new_tokens)
    return _sampled(llm, profile, given, options.max_new_tokens)


def _sampled(llm: LLM, profile: Profile, given: Given, n: int) -> _Decoded:
    from selfspec.measure.timing import conditions
    from selfspec.show.markup import legend_html, tokens_html
    from selfspec.show.report import ShownSample
    from selfspec.show.tables import position_frame
    from selfspec.types.stats import Stats

    drafter = llm.drafts_with(profile)
    found = []
    with progress(stderr()) as bar:
        task = bar.add_task("decoding", total=len(given.prompts))
        for prompt in given.prompts:
            found.append(llm.generate(prompt, max_new_tokens=n, drafter=drafter, probabilities=True))
            bar.advance(task)
    samples = tuple(
        ShownSample(text, _hovered(tokens_html(done.events)), _hovered(legend_html(done.events, done.stats)))
        for text, done in zip(given.texts, found, strict=True)
    )
    total = Stats.total(done.stats for done in found)
    intro = (
        f"{len(found)} held-out prompts ({given.said}), continued greedily by {llm.name} with this profile's drafts "
        f"({profile.draft.said}), without the guard: {total.tokens} tokens in {total.rounds} passes of the whole "
        f"model, {total.tokens_per_round:.2f} a pass, where plain decoding has 1; {total.accepted} of {total.drafted} "
        "drafted tokens were accepted. Hover over a token, tap it or tab to it for its probability, its round, and "
        "what was rejected."
    )
    where = conditions(llm.runtime)
    row = ("this page's texts", "0", "-", f"{len(found)} x {n}", _machine(where))
    rounds = [done for one in found for done in one.stats.log]
    return _Decoded(samples, position_frame(rounds), intro, row)


def _hovered(html: str) -> Markup:
    """Replace the tokens' `title` attributes by data that the page can also show on tap and by keyboard."""
    from markupsafe import Markup

    return Markup(re.sub(r'(<span(?: style="[^"]*")?) title=', r'\1 tabindex="0" data-said=', html))


def _page(
    options: ReportCommand,
    profile: Profile | None,
    ledger: Ledger | None,
    bench: dict[str, Any] | None,
    decoded: _Decoded | None,
) -> str:
    from selfspec.show.report import (
        Report,
        Section,
        acceptance_section,
        bench_section,
        render,
        skip_section,
        study_section,
    )

    sections = [_conditions(options, profile, ledger, bench, decoded)]
    if profile is None:
        sections.append(Section("skip-map", "What is bypassed", notes=(_GIVE_PROFILE,)))
    else:
        sections.append(skip_section(profile))
    if ledger is None:
        sections.append(Section("search", "The search", notes=(_GIVE_STUDY,)))
    else:
        from selfspec.search.trial_tables import sensitivity_frame, trials_frame

        sensitivities = None if ledger.gains is None else sensitivity_frame(ledger)
        sections.append(study_section(trials_frame(ledger), sensitivities, ledger.place))
    lacking = _no_sample(profile)
    positions = None if decoded is None else decoded.positions
    sections.append(acceptance_section(positions, profile, lacking if decoded is None else ()))
    if bench is None:
        sections.append(Section("bench", "The benchmark", notes=(_GIVE_BENCH,)))
    else:
        sections.append(bench_section(bench))
    if decoded is None:
        sections.append(Section("texts", "Texts", notes=lacking))
    else:
        sections.append(Section("texts", "Texts", decoded.intro, samples=decoded.samples))
    name = options.model or (profile and profile.model.name) or (bench and bench["model"]) or "a model"
    return render(Report(f"selfspec: {name}", _summary(profile), tuple(sections), _versions()))


def _no_sample(profile: Profile | None) -> tuple[str, ...]:
    if profile is None:
        return (_GIVE_PROFILE,)
    if not profile.drafts:
        return ("The profile drafts nothing: there is no acceptance to show.",)
    return ("The model was not loaded: without --no-sample, a few prompts are decoded, and what is accepted is shown.",)


def _summary(profile: Profile | None) -> str:
    if profile is None:
        return "What a benchmark measured."
    said = f"The profile {profile.draft.said}"
    if (path := profile.path).cheaper:
        size, skipped = 2 * profile.model.layers, len(path.skip)
        said = f"While drafting, {skipped} of the model's {size} attention and MLP sub-layers are bypassed"
        few = [f"{len(of)} run {WORDS[mode]}" for mode, of in path.few]
        said = ", ".join([said, *few, *([] if path.head == "full" else [f"the head runs {WORDS[path.head]}"])])
        said += "" if profile.bits_read is None else f"; {profile.bits_read.said}"
    if profile.measured:
        fastest = max(profile.measured, key=lambda m: m.speedup)
        low, high = fastest.interval
        return (
            f"{said}; measured at {fastest.speedup:g} times plain decoding's speed ({low:g} to {high:g}) at "
            f"temperature {fastest.temperature:g}."
        )
    if profile.predicted is not None:
        return f"{said}; predicted {profile.predicted.speedup:g} times plain decoding's speed, and not measured."
    return f"{said}; how fast that is was not measured."


def _conditions(
    options: ReportCommand,
    profile: Profile | None,
    ledger: Ledger | None,
    bench: dict[str, Any] | None,
    decoded: _Decoded | None,
) -> Section:
    """Return the section on model, profile, and the conditions of each measurement."""
    from selfspec.show.report import Section, Table, facts_table

    tables: list[Table] = []
    rows: list[tuple[str, ...]] = []
    if profile is not None:
        lines = {key: told for key, told in facts(profile).items() if key != "measured" or not profile.measured}
        said = [(label(key), "\n".join(told)) for key, told in lines.items()]
        made = ", ".join(f"{name} {number}" for name, number in profile.versions.items())
        title = f"The profile: {options.profile or (ledger.place if ledger is not None else builtin.PROFILE)}"
        tables.append(facts_table(title, said + ([("versions", made)] if made else [])))
        for m in profile.measured:
            on = f"{m.prompts} x {m.max_new_tokens}{', held out' if m.held_out else ''}"
            speed = f"{m.speedup:g} ({m.interval[0]:g} to {m.interval[1]:g})"
            rows.append(("the profile", f"{m.temperature:g}", speed, on, _machine(m.model_dump())))
    if ledger is not None:
        tables.append(facts_table("The search", _searched(ledger)))
    if bench is not None:
        on = f"{bench['prompts']} x {bench['max_new_tokens']} x {bench['rounds']} rounds"
        temperatures = ", ".join(f"{at['temperature']:g}" for at in bench["temperatures"])
        rows.append(("the benchmark", temperatures, "below", on, _machine(bench)))
    if decoded is not None:
        rows.append(decoded.conditions)
    if rows:
        tables.append(Table("Where it was measured", _CONDITIONS, tuple(rows)))
    return Section("conditions", "Model and measurements", tables=tuple(tables))


def _machine(said: dict[str, Any]) -> str:
    threads = f"{said['threads']} thread{'s' * (said['threads'] > 1)}"
    return f"{said['machine']}, {said['device']}, {said['dtype']}, {threads}"


def _searched(ledger: Ledger) -> list[tuple[str, str]]:
    """Return the rows on a study's search: its name, model, trials and options."""
    said = ledger.settings
    named = ("dtype", "objective", "strategy", "seed", "max_new_tokens", "temperature", "rule", "kv")
    told = ", ".join(f"{key.replace('_', ' ')} {_word(said[key])}" for key in named if key in said)
    return [
        ("study", ledger.place),
        ("model", str(said.get("name"))),
        ("trials", str(len(ledger.entries))),
        ("options", told),
    ]


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).removeprefix("torch.")


def _versions() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("selfspec", "torch", "transformers"))
    return f"{packages}, Python {platform.python_version()}"
