"""Options of `generate`, for one prompt and for many. Imports no heavy module, so that `--help` is instant."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from selfspec.basics.errors import SelfspecError
from selfspec.cli.data import MANY, ManyPrompts
from selfspec.cli.options import DecodingOptions, Json, System


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCommand:
    """Options of `generate`."""

    argument: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Prompt; standard input by default.", show_default=False)
    ] = None
    option: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Prompt, instead of the argument.")
    ] = None
    decoding: DecodingOptions
    data: ManyPrompts
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Batch size: prompts decoded together.", rich_help_panel=MANY)
    ] = 8
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            help="Memory of the KV cache; by default for 2,048 tokens a prompt, at most half of the free memory.",
            rich_help_panel=MANY,
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="File that results are appended to; prompts whose results it has are not decoded again.",
            rich_help_panel=MANY,
        ),
    ] = None
    system: System = None
    stats: Annotated[bool, typer.Option("--stats", help="Show rounds, acceptance rate and speed.")] = False
    compare: Annotated[bool, typer.Option("--compare", help="Compare with plain decoding, interleaved.")] = False
    color: Annotated[
        bool, typer.Option("--color", help="Colour tokens by their source; with --json, add their events.")
    ] = False
    json: Json = False

    @property
    def prompt(self) -> str | None:
        """The prompt, as the argument or the option; None for standard input. Raises `SelfspecError` for both."""
        if self.argument is not None and self.option is not None:
            raise SelfspecError("--prompt: given with a prompt as the argument; expected only one of the two")
        return self.argument if self.option is None else self.option
