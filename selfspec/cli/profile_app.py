"""The commands under `selfspec profile` and their options; the implementations are imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.options import Json

profile_app = typer.Typer(no_args_is_help=True, help="List profiles, look at them, check, compare and import them.")

Profile = Annotated[str, typer.Argument(help="A file, or the name of a shipped profile.")]


@profile_app.command("list")
def list_profiles(
    folder: Annotated[
        Path | None, typer.Argument(help="List the profiles in this folder; those that ship when left out.")
    ] = None,
    json: Json = False,
) -> None:
    """List profiles: model, what they skip, measured speedup, source."""
    from selfspec.cli.profile_commands import list_profiles

    list_profiles(folder, as_json=json)


@profile_app.command()
def show(file: Profile) -> None:
    """Draw a profile's skip map and say how it was found and measured."""
    from selfspec.cli.profile_commands import show

    show(file)


@profile_app.command()
def validate(
    file: Profile,
    model: Annotated[str | None, typer.Option(help="Check it against this model's configuration too.")] = None,
) -> None:
    """Check a profile; exit code 2 and one line when something is wrong."""
    from selfspec.cli.profile_commands import validate

    validate(file, model)


@profile_app.command()
def diff(
    a: Profile,
    b: Profile,
    json: Json = False,
) -> None:
    """Say what two profiles differ in; exit code 0 when in nothing, 1 otherwise."""
    from selfspec.cli.diff import run

    if code := run(a, b, as_json=json):
        raise typer.Exit(code)


@profile_app.command("import")
def import_profile(
    file: Annotated[Path, typer.Argument(help="The published file.")],
    model: Annotated[str, typer.Option(help="A folder, a GGUF file, a hub id, or builtin: the model that it is for.")],
    format_name: Annotated[
        str, typer.Option("--format", help="draft-verify: Draft & Verify's skip_layers.json, and SWIFT's.")
    ] = "draft-verify",
    key: Annotated[str | None, typer.Option(help="Which of the file's sets; needed where it has several.")] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="The model's layers, where it is not on this machine.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the profile goes; standard output when left out.")] = None,
) -> None:
    """Make a profile of a skip set that others published."""
    from selfspec.cli.profile_commands import import_profile

    import_profile(file, format_name=format_name, model=model, key=key, layers=layers, out=out)


@profile_app.command()
def join(
    files: Annotated[list[str], typer.Argument(help="Files, or names of shipped profiles, of one model.")],
    out: Annotated[Path, typer.Option(help="Where the profile goes.")] = Path("profile.yaml"),
) -> None:
    """Make one profile of several: each sequence takes the one that has brought most, one with a seed the first."""
    from selfspec.cli.profile_commands import join

    join(files, out)


@profile_app.command()
def schema() -> None:
    """Print the JSON schema of profiles, for editors that check and complete YAML."""
    from selfspec.cli.profile_commands import schema

    schema()


@profile_app.command()
def pick(
    study: Annotated[str, typer.Argument(help="A file of trials, or a study's name in --storage.")],
    storage: Annotated[str | None, typer.Option(help="The file or the database that holds the study.")] = None,
    max_draft_cost: Annotated[
        float | None, typer.Option(help="The most that a draft step may cost, as a share of a plain step.")
    ] = None,
    max_memory: Annotated[
        float | None, typer.Option(help="The most that drafts may hold beside the model, as a share of its bytes.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the profile goes.")] = Path("profile.yaml"),
    json: Json = False,
) -> None:
    """Save the best set of a search whose draft is cheap enough; show acceptance against draft cost and memory."""
    from selfspec.cli.pick_command import run

    run(study, storage, max_draft_cost, out, max_memory=max_memory, as_json=json)
