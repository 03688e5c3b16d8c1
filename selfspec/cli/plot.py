"""The command `selfspec plot`, and kinds of files, recognised by content: profiles, studies, benchmarks, trainings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import check_not_read, check_writable, kind, parse_json, read_text
from selfspec.cli.common import quiet, stderr
from selfspec.profile.shipped import find_profile_file
from selfspec.text.prompt_template import is_unicode

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from selfspec.search.ledger import Ledger


FileKind = Literal["profile", "study", "bench", "training"]


def recognise(source: str, storage: str | None) -> FileKind:
    """Return the kind of `source`, a file, a folder or a name.

    With a `storage`, `source` is the name of a study; a name without a file is taken for a shipped profile; a folder
    is a training. A file is recognised by its content, which is not validated. Raises `SelfspecError` for a file of no
    known kind.
    """
    if storage is not None:
        return "study"
    path_kind = kind(Path(source)) if source else "missing"
    if path_kind == "missing":
        return "profile"  # a shipped profile's name, or missing: its reader raises the error
    if path_kind == "folder":
        return "training"
    text = read_text(Path(source)).lstrip()
    first = _json(text.partition("\n")[0])
    if isinstance(first, dict) and "op_code" in first:
        return "study"
    if isinstance(content := _json(text), dict) and "model" in content:
        return "bench" if "temperatures" in content else "training" if "history" in content else "profile"
    if content is None and text and text[0] not in '{["':
        return "profile"
    raise SelfspecError(
        f"{source}: expected a profile, a search's file of trials, or a file that selfspec bench or train wrote"
    )


def open_study(study: str, storage: str | None) -> Ledger:
    """Open a study by its file of trials, or by its name in a storage. Raises `SelfspecError` if there is none."""
    from selfspec.search.ledger import Ledger
    from selfspec.search.storage import resolve_storage

    if storage is None:
        if not study or kind(Path(study)) != "file":
            raise SelfspecError(f"{study}: no such file; expected a file of trials, or --storage and a study's name")
        return Ledger(Path(study), None)
    where = resolve_storage(storage)
    if isinstance(where, Path) and kind(where) != "file":
        raise SelfspecError(f"--storage {storage}: no such file; expected a file of trials, or a database's URL")
    return Ledger(where, study)


def _json(text: str) -> object:
    try:
        return parse_json(text)
    except ValueError:
        return None


KINDS: dict[FileKind, tuple[str, ...]] = {  # the kinds of plots; the first of each file kind is the default
    "profile": ("skip-map", "confidence"),
    "study": ("skipped", "pareto", "sensitivity", "progress"),
    "bench": ("bars", "position", "sources"),
    "training": ("learning", "places"),
}
_NAMES: dict[FileKind, str] = {
    "profile": "a profile",
    "study": "a study",
    "bench": "a benchmark",
    "training": "a training",
}


@dataclass(frozen=True, slots=True)
class PlotOptions:
    """Options of `plot`; `width` in inches."""

    source: str
    out: Path
    kind: str | None
    storage: str | None
    width: float | None
    title: str | None


def run(options: PlotOptions) -> None:
    """Draw one plot of a profile, a study, a benchmark or a training, and save it."""
    quiet()
    check_writable(options.out)
    check_not_read(options.out, options.source, options.storage, what="the file to be drawn")
    if options.title is not None and not is_unicode(options.title):
        raise SelfspecError("--title: the text is not valid Unicode")
    what = recognise(options.source, options.storage)
    kind = KINDS[what][0] if options.kind is None else options.kind
    if kind not in KINDS[what]:
        raise SelfspecError(f"--kind {kind}: {options.source} is {_NAMES[what]}; expected {_listed(KINDS[what])}")

    from selfspec.show.plots.style import WIDTH, check_format, save

    check_format(options.out)
    draw = {"profile": _of_profile, "study": _of_study, "bench": _of_bench, "training": _of_training}[what]
    figure = draw(options, kind)(options.width or WIDTH)
    if options.title is not None:
        figure.suptitle(options.title, x=0.01, ha="left", fontsize=11, parse_math=False)
    save(figure, options.out)
    stderr().print(f"saved {options.out}: {kind} of {_NAMES[what]}", markup=False, soft_wrap=True)


def _of_profile(options: PlotOptions, kind: str) -> Callable[[float], Figure]:
    from selfspec.show.plots.profile_plots import acceptance_by_confidence, skip_map

    profile = find_profile_file(options.source)
    draw = {"skip-map": skip_map, "confidence": acceptance_by_confidence}[kind]
    return lambda width: draw(profile, width=width)


def _of_study(options: PlotOptions, kind: str) -> Callable[[float], Figure]:
    from selfspec.search.trial_tables import sensitivity_frame, trials_frame
    from selfspec.show.plots.profile_plots import pareto, progress, sensitivity, speedup_against_skipped

    ledger = open_study(options.source, options.storage)
    frame = sensitivity_frame(ledger) if kind == "sensitivity" else trials_frame(ledger)
    draws = {
        "skipped": speedup_against_skipped,
        "pareto": pareto,
        "sensitivity": sensitivity,
        "progress": progress,
    }
    return lambda width: draws[kind](frame, width=width)


def _of_bench(options: PlotOptions, kind: str) -> Callable[[float], Figure]:
    from selfspec.show.plots.bench_plots import acceptance_by_position, bench_bars, tokens_by_source
    from selfspec.show.tables import bench_frame, bench_position_frame, read_bench, source_frame

    bench = read_bench(Path(options.source))
    if kind == "bars":
        return lambda width: bench_bars(bench_frame(bench), width=width)
    if kind == "sources":
        return lambda width: tokens_by_source(source_frame(bench), width=width)
    return lambda width: acceptance_by_position(bench_position_frame(bench), width=width)


def _of_training(options: PlotOptions, kind: str) -> Callable[[float], Figure]:
    from selfspec.show.plots.bench_plots import acceptance_by_place, learning_curves
    from selfspec.show.tables import learning_frame, place_frame, read_trainings

    trainings = read_trainings(Path(options.source))
    if kind == "places":
        return lambda width: acceptance_by_place(place_frame(trainings), width=width)
    return lambda width: learning_curves(learning_frame(trainings), width=width)


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
