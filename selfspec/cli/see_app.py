"""The commands that show what was found, `plot` and `report`, and their options; their work is in other modules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.data import KINDS, Chat, Column, DataOptions, Template
from selfspec.cli.devices import Device, Dtype, Threads

see_app = typer.Typer()

Storage = Annotated[str | None, typer.Option(help="The file or the database that holds the study.")]


@see_app.command()
def plot(
    source: Annotated[
        str,
        typer.Argument(
            help="A profile (a file or a shipped one's name), a file of trials, a study's name in --storage, or what "
            "bench --out wrote."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Where the picture goes: a .png, .svg or .pdf file.")],
    kind: Annotated[
        str | None,
        typer.Option(
            help="Of a profile: skip-map or confidence; of a study: skipped, pareto, sensitivity or progress; of a "
            "benchmark: bars or position. The first of each when left out."
        ),
    ] = None,
    storage: Storage = None,
    width: Annotated[float | None, typer.Option(min=3, max=40, help="Inches; 7.2 when left out.")] = None,
    title: Annotated[str | None, typer.Option(help="Written above it.")] = None,
) -> None:
    """Draw a profile, a search's trials, or a benchmark."""
    from selfspec.cli.plot import PlotOptions, run

    run(PlotOptions(source=source, out=out, kind=kind, storage=storage, width=width, title=title))


@see_app.command()
def report(
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("report.html"),
    profile: Annotated[
        str | None,
        typer.Option(help="A file, or a shipped one's name; the study's best, else the built-in model's, if left out."),
    ] = None,
    study: Annotated[str | None, typer.Option(help="A file of trials, or a study's name in --storage.")] = None,
    storage: Storage = None,
    bench: Annotated[Path | None, typer.Option(help="What bench --out wrote.")] = None,
    model: Annotated[str | None, typer.Option(help="builtin, a folder, or a hub id; else the profile's.")] = None,
    prompts: Annotated[str | None, typer.Option(help=f"A {KINDS}; built-in held-out ones when left out.")] = None,
    column: Column = None,
    template: Template = None,
    chat: Chat = False,
    limit: Annotated[int, typer.Option(min=1, max=100, help="The most prompts.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that continue each prompt.")] = 64,
    no_sample: Annotated[bool, typer.Option("--no-sample", help="Decode nothing, and do not load the model.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:
    """Write one page, which needs nothing else, on a profile, its search, and a benchmark, with coloured texts."""
    from selfspec.cli.report import ReportOptions, run

    run(
        ReportOptions(
            out=out,
            profile=profile,
            study=study,
            storage=storage,
            bench=bench,
            model=model,
            data=DataOptions(prompts, column, template, chat),
            limit=limit,
            max_new_tokens=max_new_tokens,
            sample=not no_sample,
            device=device,
            dtype=dtype,
            threads=threads,
        )
    )
