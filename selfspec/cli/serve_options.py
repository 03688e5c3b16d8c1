"""Options of `serve`, with their help. `flat` evaluates the annotations as values."""

from dataclasses import dataclass
from typing import Annotated

import typer

from selfspec.cli.devices import SharedDeviceOptions
from selfspec.cli.options import Model, Store

_LIMITS, _WHO = "Limits", "Where, and for whom"


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """Limits of the server: batch size, memory, lengths, queue and times."""

    rows: Annotated[
        int, typer.Option(min=1, max=1024, metavar="N", help="Texts decoded at a time.", rich_help_panel=_LIMITS)
    ] = 8
    memory: Annotated[
        float | None,
        typer.Option(
            min=0.001, metavar="GIB", help="For keys and values; as rows need when left out.", rich_help_panel=_LIMITS
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="New tokens of a text; what the context leaves if not.", rich_help_panel=_LIMITS
        ),
    ] = None
    queue: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Texts that may wait for a row; more get 429.", rich_help_panel=_LIMITS),
    ] = 64
    max_body: Annotated[
        int, typer.Option(min=1, metavar="BYTES", help="Of a request's body; more get 413.", rich_help_panel=_LIMITS)
    ] = 4 * 2**20
    timeout: Annotated[
        float,
        typer.Option(min=0.001, metavar="SECONDS", help="Of a request, its wait included.", rich_help_panel=_LIMITS),
    ] = 600.0
    read_timeout: Annotated[
        float,
        typer.Option(
            min=0.001, metavar="SECONDS", help="For a request's head, then for its body.", rich_help_panel=_LIMITS
        ),
    ] = 20.0
    grace: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="For running requests when told to end.", rich_help_panel=_LIMITS),
    ] = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommand:
    """Options of `serve`."""

    model: Model = None
    profile: Annotated[str, typer.Option(help="A file, the name of a shipped one, auto, or none.")] = "auto"
    store: Store = None
    host: Annotated[str, typer.Option(help="The address to serve at.", rich_help_panel=_WHO)] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="0: any free one.", rich_help_panel=_WHO)] = (
        8000
    )
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="SELFSPEC_API_KEY",
            metavar="KEY",
            show_envvar=True,
            help="What requests must bear.",
            rich_help_panel=_WHO,
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Served as, instead of the model's own; may be given again.", rich_help_panel=_WHO
        ),
    ] = None
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER", help="A PEFT adapter that requests name as their model; may be given again."
        ),
    ] = None
    limits: LimitOptions
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="One replica on each, such as cuda:0,cuda:1 or cpu,cpu.", rich_help_panel="Device"
        ),
    ] = None
    where: SharedDeviceOptions
