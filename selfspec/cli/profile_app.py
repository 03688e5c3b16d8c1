"""The commands under `selfspec profile`, and `plot` and `report`; the implementations are imported when they run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.dataclass_options import PlainGroup, add_command
from selfspec.cli.options import Json, ReportCommand, Storage

report_app = typer.Typer()
_show = partial(add_command, report_app, panel="Show")


@_show("see-it.md#plots", "selfspec plot profile.yaml --out skip-map.svg")
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


@_show("see-it.md#the-report", "selfspec report --profile profile.yaml --out report.html")
def report(command: ReportCommand) -> None:
    """Write a self-contained HTML report on a profile, its search and a benchmark, with coloured texts."""
    from selfspec.cli.report_command import run

    run(command)


profile_app = typer.Typer(
    cls=PlainGroup,
    no_args_is_help=True,
    help="List, show, check, compare and import profiles.",
    epilog="Example: selfspec profile list\n\nMore: docs/profiles.md",
)
_profile = partial(add_command, profile_app)

Profile = Annotated[str, typer.Argument(help="Profile: a file, or the name of a shipped one.")]


@_profile("profiles.md", "selfspec profile list", name="list")
def list_profiles(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder to list the profiles of; by default the shipped ones.")
    ] = None,
    json: Json = False,
) -> None:
    """List profiles: model, what they skip, measured speedup, source."""
    from selfspec.cli.profile_commands import list_profiles

    list_profiles(folder, as_json=json)


@_profile("profiles.md", "selfspec profile show profile.yaml")
def show(file: Profile) -> None:
    """Show a profile: its skip map, how it was found, and what was measured."""
    from selfspec.cli.profile_commands import show

    show(file)


@_profile("profiles.md", "selfspec profile validate profile.yaml --model smollm2-135m")
def validate(
    file: Profile,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Model that the profile must fit.")] = None,
) -> None:
    """Check a profile; an error is one line, with exit code 2."""
    from selfspec.cli.profile_commands import validate

    validate(file, model)


@_profile("profiles.md", "selfspec profile diff old.yaml new.yaml")
def diff(
    a: Profile,
    b: Profile,
    json: Json = False,
) -> None:
    """Show the differences of two profiles; exit code 0 if there are none, 1 otherwise."""
    from selfspec.cli.profile_text import run_diff

    if code := run_diff(a, b, as_json=json):
        raise typer.Exit(code)


@_profile(
    "profiles.md#published-skip-sets",
    "selfspec profile import skip_layers.json --model ./my-model --out mine.yaml",
    name="import",
)
def import_profile(
    file: Annotated[Path, typer.Argument(help="File of the published skip set.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Model of the skip set: a folder, GGUF file, hub id, or builtin.")
    ],
    format_name: Annotated[
        str,
        typer.Option(
            "--format", help="Format of the file; draft-verify: skip_layers.json of Draft & Verify and SWIFT."
        ),
    ] = "draft-verify",
    key: Annotated[str | None, typer.Option(help="Key of the skip set; needed if the file has several.")] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Number of layers, if the model is not on this machine.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write the profile to; standard output by default.")] = None,
) -> None:
    """Make a profile from a published skip set."""
    from selfspec.cli.profile_commands import import_profile

    import_profile(file, format_name=format_name, model=model, key=key, layers=layers, out=out)


@_profile("profiles.md#several-ways-to-draft", "selfspec profile join code.yaml chat.yaml --out both.yaml")
def join(
    files: Annotated[list[str], typer.Argument(help="Profiles of one model: files, or names of shipped ones.")],
    out: Annotated[Path, typer.Option(help="File to write the profile to.")] = Path("profile.yaml"),
) -> None:
    """Join profiles into one that drafts each sequence with the fastest profile so far, or with a seed, the first."""
    from selfspec.cli.profile_commands import join

    join(files, out)


@_profile("profiles.md", "selfspec profile schema > profile.schema.json")
def schema() -> None:
    """Print the JSON schema of profiles, for editors that check and complete YAML."""
    from selfspec.cli.profile_commands import schema

    schema()


@_profile(
    "search.md#long-searches-and-many-workers",
    "selfspec profile pick trials.jsonl --max-draft-cost 0.5 --out cheap.yaml",
)
def pick(
    study: Annotated[str, typer.Argument(help="Study: a file of trials, or its name in --storage.")],
    storage: Annotated[str | None, typer.Option(help="File or database that holds the study.")] = None,
    max_draft_cost: Annotated[
        float | None, typer.Option(help="Maximum time of a draft step, as a share of a plain decoding step.")
    ] = None,
    extra_memory: Annotated[
        float | None, typer.Option(help="Maximum extra memory of drafts, as a share of the model's bytes.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File to write the profile to.")] = Path("profile.yaml"),
    json: Json = False,
) -> None:
    """Save the best profile of a search within limits of cost and memory; show the Pareto front."""
    from selfspec.cli.profile_commands import run

    run(study, storage, max_draft_cost, out, extra_memory=extra_memory, as_json=json)
