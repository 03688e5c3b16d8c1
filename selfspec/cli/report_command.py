"""The command `selfspec report`."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import check_not_read, check_writable, write_text
from selfspec.cli.common import checked_profile, load_llm, model_for, progress, quiet, stderr
from selfspec.cli.input_options import EncodedPrompts
from selfspec.cli.options import ReportCommand
from selfspec.cli.plot import open_study
from selfspec.cli.profile_text import facts, label
from selfspec.profile.schema import Profile
from selfspec.types.draft_path import WORDS

if TYPE_CHECKING:
    import pandas as pd
    from markupsafe import Markup

    from selfspec.llm.llm import LLM
    from selfspec.search.ledger import Ledger
    from selfspec.show.report import Section, ShownSample, Table

_CONDITIONS = ("figures of", "temperature", "speedup", "prompts x tokens", "machine")
_GIVE_PROFILE = "No profile was given: --profile or --study shows the skipped sub-layers and the accepted tokens."
_GIVE_STUDY = (
    "No study was given: --study FILE (written by selfspec search --storage FILE) shows the effect of single "
    "sub-layers, acceptance against draft cost, speedup against skipped sub-layers, and the search's progress."
)
_GIVE_BENCH = "No benchmark was given: --bench FILE (written by selfspec bench --out FILE) shows measured speeds."


@dataclass(frozen=True)
class _DecodedSamples:
    """Texts decoded for the report, and their rounds' acceptance by draft position (`positions`).

    `intro`: a paragraph about the texts. `conditions`: a row for them in the table of measurement conditions.
    """

    samples: tuple[ShownSample, ...]
    positions: pd.DataFrame
    intro: str
    conditions: tuple[str, ...]


@dataclass(frozen=True)
class _Sources:
    """All that the page shows; what is None was not given."""

    profile: Profile | None
    ledger: Ledger | None
    bench: dict[str, Any] | None
    decoded: _DecodedSamples | None


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
        decoded = _decode_samples(options, profile)
    write_text(options.out, _page(options, _Sources(profile, ledger, bench, decoded)))
    stderr().print(f"saved {options.out}", markup=False, soft_wrap=True)


def _check(options: ReportCommand) -> None:
    check_writable(options.out)
    if options.storage is not None and options.study is None:
        raise SelfspecError(f"--storage {options.storage}: given without --study; expected the study's name, too")
    read = (options.model, options.profile, options.study, options.storage, options.bench)
    check_not_read(options.out, *read, what="a file to be shown")
    options.data.check_not_written(options.out, f"--out {options.out}")


def _profile(options: ReportCommand, ledger: Ledger | None) -> Profile | None:
    """Return the named profile, else that of the study's best trial; None if only a benchmark is shown.

    Raises `SelfspecError` for a damaged study, a model without a profile, and if there is nothing to report on.
    """
    if options.profile is not None:
        return checked_profile(options.profile)
    if ledger is not None:
        from selfspec.search.trial_tables import as_profile, best_within

        best = best_within(ledger, None)
        try:
            picked: Profile = as_profile(ledger, best)
            return picked
        except SelfspecError as error:
            raise SelfspecError(f"{error}, or give --profile") from None
    if options.bench is None:
        raise SelfspecError("nothing to report on; expected --profile, --study or --bench")
    return None


def _decode_samples(options: ReportCommand, profile: Profile) -> _DecodedSamples:
    """Decode a few prompts, held out if they can be, with the profile's drafter, greedily and without the guard."""
    raw_prompts = options.data.read(held_out=True)
    options.device_options.set_threads()

    from selfspec.llm.prompt_encoding import check_chat

    try:
        name = model_for(options.model, profile)
        if options.data.chat:
            check_chat(name)
        llm = load_llm(name, profile, options.device_options)
    except SelfspecError as error:
        raise SelfspecError(f"{error}; --no-sample writes the page without loading the model") from None
    encoded = options.data.encode_prompts(llm, raw_prompts, limit=options.limit, max_new_tokens=options.max_new_tokens)
    return _generate_samples(llm, profile, encoded, options.max_new_tokens, held_out=options.data.held_out)


def _generate_samples(
    llm: LLM, profile: Profile, encoded: EncodedPrompts, n: int, *, held_out: bool
) -> _DecodedSamples:
    from selfspec.measure.timing import conditions, untaught
    from selfspec.show.markup import legend_html, tokens_html
    from selfspec.show.report import ShownSample
    from selfspec.show.tables import position_frame
    from selfspec.types.stats import Stats

    drafter = untaught(llm.drafter_for(profile))
    outputs = []
    with progress(stderr()) as bar:
        task = bar.add_task("decoding", total=len(encoded.prompts))
        for prompt in encoded.prompts:
            outputs.append(llm.generate(prompt, max_new_tokens=n, drafter=drafter, probabilities=True))
            bar.advance(task)
    samples = tuple(
        ShownSample(
            text, _with_tooltips(tokens_html(done.events)), _with_tooltips(legend_html(done.events, done.stats))
        )
        for text, done in zip(encoded.texts, outputs, strict=True)
    )
    total = Stats.total(done.stats for done in outputs)
    intro = (
        f"{len(outputs)} {'held-out ' if held_out else ''}prompts ({encoded.summary}), continued greedily by "
        f"{llm.name} with this profile's drafts ({profile.draft.summary}), without the guard: {total.tokens} tokens in "
        f"{total.rounds} passes of the whole model, {total.tokens_per_round:.2f} a pass (1 in plain decoding); "
        f"{total.accepted} of {total.drafted} drafted tokens were accepted. Hover over a token, tap it "
        "or tab to it for its probability, its round, and the tokens rejected at its position."
    )
    where = conditions(llm.runtime)
    row = ("this page's texts", "0", "-", f"{len(outputs)} x {n}", _machine(where))
    rounds = [done for output in outputs for done in output.stats.log]
    return _DecodedSamples(samples, position_frame(rounds), intro, row)


def _with_tooltips(html: str) -> Markup:
    """Replace the tokens' `title` attributes by `data-said`, which the page shows on hover, on tap and by keyboard."""
    from markupsafe import Markup

    return Markup(re.sub(r'(<span(?: style="[^"]*")?) title=', r'\1 tabindex="0" data-said=', html))


def _page(options: ReportCommand, shown: _Sources) -> str:
    from selfspec.show.report import (
        Report,
        Section,
        acceptance_section,
        bench_section,
        render,
        skip_section,
        study_section,
    )

    sections = [_conditions(options, shown)]
    profile, ledger, bench, decoded = shown.profile, shown.ledger, shown.bench, shown.decoded
    if profile is None:
        sections.append(Section("skip-map", "What is skipped", notes=(_GIVE_PROFILE,)))
    else:
        sections.append(skip_section(profile))
    if ledger is None:
        sections.append(Section("search", "The search", notes=(_GIVE_STUDY,)))
    else:
        from selfspec.search.trial_tables import sensitivity_frame, trials_frame

        sensitivities = None if ledger.gains is None else sensitivity_frame(ledger)
        sections.append(study_section(trials_frame(ledger), sensitivities, ledger.description))
    missing_notes = _no_sample(profile)
    positions = None if decoded is None else decoded.positions
    sections.append(acceptance_section(positions, profile, missing_notes if decoded is None else ()))
    if bench is None:
        sections.append(Section("bench", "The benchmark", notes=(_GIVE_BENCH,)))
    else:
        sections.append(bench_section(bench))
    if decoded is None:
        sections.append(Section("texts", "Texts", notes=missing_notes))
    else:
        sections.append(Section("texts", "Texts", decoded.intro, samples=decoded.samples))
    name = options.model or (profile and profile.model.name) or (bench and bench["model"]) or "a model"
    return render(Report(f"selfspec: {name}", _summary(profile), tuple(sections), _versions()))


def _no_sample(profile: Profile | None) -> tuple[str, ...]:
    if profile is None:
        return (_GIVE_PROFILE,)
    if not profile.drafts:
        return ("The profile drafts nothing: there is no acceptance to show.",)
    return ("The model was not loaded: without --no-sample, a few prompts are decoded to show the accepted tokens.",)


def _summary(profile: Profile | None) -> str:
    if profile is None:
        return "The results of a benchmark."
    summary = f"The profile {profile.draft.summary}"
    if (path := profile.path).cheaper:
        size, skipped = 2 * profile.model.layers, len(path.skip)
        summary = f"While drafting, {skipped} of the model's {size} attention and MLP sub-layers are skipped"
        few = [f"{len(sublayers)} run {WORDS[mode]}" for mode, sublayers in path.quantized_sets]
        summary = ", ".join([summary, *few, *([] if path.head == "full" else [f"the head runs {WORDS[path.head]}"])])
        summary += "" if profile.bits_read is None else f"; {profile.bits_read.summary}"
    if profile.measured:
        fastest = max(profile.measured, key=lambda m: m.speedup)
        low, high = fastest.interval
        return (
            f"{summary}; measured at {fastest.speedup:g} times plain decoding's speed ({low:g} to {high:g}) at "
            f"temperature {fastest.temperature:g}."
        )
    if profile.predicted is not None:
        return f"{summary}; predicted {profile.predicted.speedup:g} times plain decoding's speed, and not measured."
    return f"{summary}; its speed was not measured."


def _conditions(options: ReportCommand, shown: _Sources) -> Section:
    """Return the report's section on model, profile, and the conditions of each measurement."""
    from selfspec.show.report import Section, Table, facts_table

    tables: list[Table] = []
    rows: list[tuple[str, ...]] = []
    profile, ledger, bench = shown.profile, shown.ledger, shown.bench
    if profile is not None:
        lines = {key: values for key, values in facts(profile).items() if key != "measured" or not profile.measured}
        fact_rows = [(label(key), "\n".join(values)) for key, values in lines.items()]
        made = ", ".join(f"{name} {number}" for name, number in profile.versions.items())
        title = f"The profile: {options.profile or (ledger.description if ledger is not None else '')}"
        tables.append(facts_table(title, fact_rows + ([("versions", made)] if made else [])))
        for m in profile.measured:
            workload = f"{m.prompts} x {m.max_new_tokens}{', held out' if m.held_out else ''}"
            speed = f"{m.speedup:g} ({m.interval[0]:g} to {m.interval[1]:g})"
            rows.append(("the profile", f"{m.temperature:g}", speed, workload, _machine(m.model_dump())))
    if ledger is not None:
        tables.append(facts_table("The search", _searched(ledger)))
    if bench is not None:
        workload = f"{bench['prompts']} x {bench['max_new_tokens']} x {bench['rounds']} rounds"
        temperatures = ", ".join(f"{result['temperature']:g}" for result in bench["temperatures"])
        rows.append(("the benchmark", temperatures, "below", workload, _machine(bench)))
    if shown.decoded is not None:
        rows.append(shown.decoded.conditions)
    if rows:
        tables.append(Table("Where it was measured", _CONDITIONS, tuple(rows)))
    return Section("conditions", "Model and measurements", tables=tuple(tables))


def _machine(conditions: dict[str, Any]) -> str:
    threads = f"{conditions['threads']} thread{'s' * (conditions['threads'] > 1)}"
    return f"{conditions['machine']}, {conditions['device']}, {conditions['dtype']}, {threads}"


def _searched(ledger: Ledger) -> list[tuple[str, str]]:
    """Return the rows on a study's search: its name, model, trials and options."""
    settings = ledger.settings
    named = ("dtype", "objective", "strategy", "seed", "max_new_tokens", "temperature", "rule", "kv")
    options = ", ".join(f"{key.replace('_', ' ')} {_word(settings[key])}" for key in named if key in settings)
    return [
        ("study", ledger.description),
        ("model", str(settings.get("name"))),
        ("trials", str(len(ledger.entries))),
        ("options", options),
    ]


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).removeprefix("torch.")


def _versions() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("selfspec", "torch", "transformers"))
    return f"{packages}, Python {platform.python_version()}"
