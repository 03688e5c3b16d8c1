"""The commands that show results, `plot` and `report`; the implementations are imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.dataclass_options import flat
from selfspec.cli.options import ReportCommand, Storage

see_app = typer.Typer()


@see_app.command()
def plot(
    source: Annotated[
        str,
        typer.Argument(
            help="A profile (a file or a shipped one's name), a file of trials, a study's name in --storage, what "
            "bench --out wrote, or the folder of train."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Where the picture goes: a .png, .svg or .pdf file.")],
    kind: Annotated[
        str | None,
        typer.Option(
            help="Of a profile: skip-map or confidence; of a study: skipped, pareto, sensitivity or progress; of a "
            "benchmark: bars, position or sources; of trainings: learning or places. The first of each when left out."
        ),
    ] = None,
    storage: Storage = None,
    width: Annotated[float | None, typer.Option(min=3, max=40, help="Inches; 7.2 when left out.")] = None,
    title: Annotated[str | None, typer.Option(help="Written above it.")] = None,
) -> None:
    """Draw a profile, a search's trials, a benchmark, or trainings."""
    from selfspec.cli.plot import PlotOptions, run

    run(PlotOptions(source=source, out=out, kind=kind, storage=storage, width=width, title=title))


@see_app.command()
@flat
def report(given: ReportCommand) -> None:
    """Write one page, which needs nothing else, on a profile, its search, and a benchmark, with coloured texts."""
    from selfspec.cli.report_command import run

    run(given)
