"""The commands that show results, `plot` and `report`; the implementations are imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.command_help import PlainCommand, more
from selfspec.cli.dataclass_options import flatten_options
from selfspec.cli.options import ReportCommand, Storage
from selfspec.cli.shared_options import with_shared_options

_SHOW = "Show"  # the group of these commands in the help

report_app = typer.Typer()


@report_app.command(
    cls=PlainCommand,
    rich_help_panel=_SHOW,
    epilog=more("see-it.md#plots", "selfspec plot profile.yaml --out skip-map.svg"),
)
def plot(
    source: Annotated[
        str,
        typer.Argument(
            help="A profile (a file or a shipped one's name), a file of trials, a study's name in --storage, what "
            "bench --out wrote, or the folder of train."
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write the picture to: .png, .svg or .pdf.")],
    kind: Annotated[
        str | None,
        typer.Option(
            help="Kind of plot. Profile: skip-map, confidence; study: skipped, pareto, sensitivity, progress; "
            "benchmark: bars, position, sources; training: learning, places. The first of each by default."
        ),
    ] = None,
    storage: Storage = None,
    width: Annotated[float | None, typer.Option(min=3, max=40, help="Width in inches; 7.2 by default.")] = None,
    title: Annotated[str | None, typer.Option(help="Title of the plot.")] = None,
) -> None:
    """Plot a profile, the trials of a search, a benchmark, or training."""
    from selfspec.cli.plot import PlotOptions, run

    run(PlotOptions(source=source, out=out, kind=kind, storage=storage, width=width, title=title))


@report_app.command(
    cls=PlainCommand,
    rich_help_panel=_SHOW,
    epilog=more("see-it.md#the-report", "selfspec report --profile profile.yaml --out report.html"),
)
@with_shared_options
@flatten_options
def report(command: ReportCommand) -> None:
    """Write a self-contained HTML report on a profile, its search and a benchmark, with coloured texts."""
    from selfspec.cli.report_command import run

    run(command)
