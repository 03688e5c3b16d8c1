"""Options of `generate`, for one prompt and for many. The module imports nothing heavy, as `options`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.data import MANY, ManyPrompts
from selfspec.cli.options import DecodingOptions, Json, System


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCommand:
    """Options of `generate`."""

    prompt: Annotated[str | None, typer.Argument(help="The prompt; standard input when left out.")] = None
    decoding: DecodingOptions
    data: ManyPrompts
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Prompts that are decoded together.", rich_help_panel=MANY)
    ] = 8
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            help="For their keys and values; for 2,048 tokens each when left out.",
            rich_help_panel=MANY,
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Where results go, as they come; those that it has are not made again.",
            rich_help_panel=MANY,
        ),
    ] = None
    system: System = None
    stats: Annotated[bool, typer.Option("--stats", help="Show rounds, acceptance and speed.")] = False
    compare: Annotated[bool, typer.Option("--compare", help="Plain decoding beside it, interleaved.")] = False
    color: Annotated[
        bool, typer.Option("--color", help="Colour tokens by where they came from; with --json, add their events.")
    ] = False
    json: Json = False
