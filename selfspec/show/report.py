"""The report page on a search and its measurements: one self-contained HTML file. Does not import torch.

Text from outside (names, notes, prompts, tokens) is escaped; only markup generated here is inserted unescaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from selfspec.profile.schema import Profile
from selfspec.show import captions as reading
from selfspec.show.plots import bench_plots as bench_plots
from selfspec.show.plots import profile_plots as profile_plots
from selfspec.show.plots.style import svg
from selfspec.show.tables import bench_frame, bench_position_frame, source_frame
from selfspec.types.draft_path import WORDS, SkipSet

WIDTH = 7.2  # width of a plot, in inches


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the page; the first cell of each row is the row's heading. Without `columns` it has no head row."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A plot of the page: `drawn`, the `<svg>` element, and `reading`, the caption."""

    drawn: Markup
    reading: str


@dataclass(frozen=True, slots=True)
class ShownSample:
    """A prompt and its generation: `tokens` and `legend`, the coloured text and its legend, are HTML."""

    prompt: str
    tokens: Markup
    legend: Markup


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page.

    `name`: the anchor. `intro`: the first paragraph. `notes`: paragraphs below the content, such as which command-line
    option would produce missing content.
    """

    name: str
    title: str
    intro: str = ""
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    samples: tuple[ShownSample, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """The whole page; `versions`: a text with the versions of selfspec and the packages that made the page."""

    title: str
    summary: str
    sections: tuple[Section, ...]
    versions: str


def render(report: Report) -> str:
    """Return the page's HTML."""
    environment = Environment(
        loader=PackageLoader("selfspec.show", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html").render(report=report)
    return page.encode("utf-8", "replace").decode()  # a lone surrogate cannot be encoded


def picture(name: str, draw: Callable[..., Any], subject: Any, text: str, label: str) -> Picture:
    """Return the plot that `draw` makes of a profile or a frame, with the caption `text`.

    `label`: the plot's text alternative. `name`: a prefix that keeps its element ids unique in the page.
    """
    return Picture(Markup(svg(draw(subject, width=WIDTH), name=name, label=label)), text)


def skip_section(profile: Profile) -> Section:
    """Return the section with the map of the sub-layers that a profile skips or quantises while drafting."""
    path = profile.path
    label = f"Skip map. Skipped while drafting: {_of_layers(path.skip)}."
    for mode, sublayers in path.quantized_sets:
        label += f" {WORDS[mode].capitalize()}: {_of_layers(sublayers)}."
    drawn = picture("skip", profile_plots.skip_map, profile, reading.skip_map(profile), label)
    title = "How drafts run" if path.low_precision else "What is skipped"
    return Section("skip-map", title, pictures=(drawn,))


def _of_layers(sublayers: SkipSet) -> str:
    attention, mlp = (", ".join(map(str, part)) or "none" for part in (sublayers.attention, sublayers.mlp))
    return f"attention of layers {attention}; MLP of layers {mlp}"


def study_section(trials: pd.DataFrame, sensitivities: pd.DataFrame | None, place: str) -> Section:
    """Return the section on the trials of a search.

    `sensitivities`: the effects of single sub-layers, as from `sensitivity_frame` (None: unknown). `place`: the name of
    the study's file or database.
    """
    drawn, notes = [], []
    if sensitivities is not None:
        text = reading.sensitivity(sensitivities)
        drawn.append(picture("sensitivity", profile_plots.sensitivity, sensitivities, text, f"Heat map. {text}"))
    else:
        notes.append("The effects of single sub-layers are known only with --objective replay and warm starts.")
    if trials["draft_cost"].notna().any():
        text = reading.pareto(trials)
        drawn.append(picture("pareto", profile_plots.pareto, trials, text, f"Acceptance against draft cost. {text}"))
    else:
        notes.append("Draft costs are unknown for these timed trials; --objective replay computes them.")
    for name, draw, read, what in (
        ("skipped", profile_plots.speedup_against_skipped, reading.speedup_against_skipped, "Speedup against skipped."),
        ("progress", profile_plots.progress, reading.progress, "Best speedup against seconds."),
    ):
        text = read(trials)
        drawn.append(picture(name, draw, trials, text, f"{what} {text}"))
    intro = f"{len(trials)} trials of {place}."
    return Section("search", "The search", intro, pictures=tuple(drawn), notes=tuple(notes))


def acceptance_section(positions: pd.DataFrame | None, profile: Profile | None, notes: Iterable[str]) -> Section:
    """Return the section on acceptance: by draft position and by the draft's confidence.

    `positions`: acceptance by position, measured for this page (None: not measured). `profile`: the profile whose
    acceptance curve is shown (None: no profile). `notes`: further notes of the section.
    """
    drawn, notes = [], list(notes)
    if positions is not None and len(positions):
        text = reading.acceptance_by_position(positions)
        label = f"Acceptance by position in the draft. {text}"
        drawn.append(picture("position", bench_plots.acceptance_by_position, positions, text, label))
    if profile is not None and profile.acceptance is not None:
        text = reading.acceptance_by_confidence(profile)
        label = f"Acceptance by confidence. {text}"
        drawn.append(picture("confidence", profile_plots.acceptance_by_confidence, profile, text, label))
    elif profile is not None:
        notes.append("The profile holds no acceptance by confidence; selfspec search finds profiles that do.")
    return Section("acceptance", "Acceptance", pictures=tuple(drawn), notes=tuple(notes))


def bench_section(bench: dict[str, Any]) -> Section:
    """Return the section on a benchmark (the JSON of `selfspec bench --out`): plots, and a table per temperature."""
    frame, positions = bench_frame(bench), bench_position_frame(bench)
    drawn, notes = [], []
    if (frame["speedup"].notna() & (frame["method"] != "plain")).any():
        text = reading.bench_bars(frame)
        drawn.append(picture("bars", bench_plots.bench_bars, frame, text, f"Speed of each method. {text}"))
    else:
        notes.append("Only plain decoding was measured; selfspec bench --methods measures other methods.")
    if len(positions):
        text = reading.acceptance_by_position(positions)
        label = f"Acceptance by position in the benchmark. {text}"
        drawn.append(picture("benchposition", bench_plots.acceptance_by_position, positions, text, label))
    sources = source_frame(bench)
    if len(sources):
        text = reading.tokens_by_source(sources)
        drawn.append(picture("sources", bench_plots.tokens_by_source, sources, text, f"Sources of tokens. {text}"))
    wide = f", widened {bench['widened']} times" if bench["widened"] > 1 else ""
    threads = f"{bench['threads']} thread{'s' * (bench['threads'] > 1)}"
    task = f"{bench['prompts']} prompts x {bench['max_new_tokens']} tokens x {bench['rounds']} interleaved rounds"
    intro = (
        f"{bench['model']}{wide}, on {bench['machine']}, {threads}, {bench['dtype']}, torch {bench['torch']}: {task}; "
        f"drafts by {bench['source']}."
    )
    tables = tuple(
        _bench_table(group, f"At temperature {temperature:g}") for temperature, group in frame.groupby("temperature")
    )
    return Section("bench", "The benchmark", intro, tables, tuple(drawn), notes=tuple(notes))


def _bench_table(frame: pd.DataFrame, caption: str) -> Table:
    columns = ("method", "tokens/s", "speedup", "first token", "next token", "tokens a pass")
    rows = tuple(
        (
            str(row.method),
            f"{row.tokens_per_second:.4g}",
            "1" if row.method == "plain" else f"{row.speedup:.3g} ({row.low:.3g} to {row.high:.3g})",
            _known(row.first_token_ms, "{:.3g} ms"),
            f"{_known(row.next_ms, '{:.3g} ms')} (95%: {_known(row.next_ms_95, '{:.3g}')})",
            f"{row.tokens_per_round:.2f}",
            _known(row.acceptance_rate, "{:.0%}"),
        )
        for row in frame.itertuples(index=False)
    )
    return Table(caption, (*columns, "acceptance"), rows)


def _known(value: float, form: str) -> str:
    return "-" if pd.isna(value) else form.format(value)


def facts_table(caption: str, facts: Sequence[tuple[str, str]]) -> Table:
    """Return a table of two columns, names and values, without a head row."""
    return Table(caption, (), tuple(facts))
