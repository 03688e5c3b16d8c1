"""Options of `quantize`, with their help. `flatten_options` evaluates the annotations, so they are not postponed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.data import DataOptions
from selfspec.cli.devices import DeviceOptions
from selfspec.cli.options import Json, Model
from selfspec.search.quantize_options import QuantizeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeCommand:
    """Options of `quantize`."""

    model: Model = None
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="File to write the weights to; a profile is written beside it.")
    ] = Path("int4.safetensors")
    profile: Annotated[
        str,
        typer.Option(
            help="Profile whose int4 sub-layers use the weights: a file, the name of a shipped one, or none: "
            "every sub-layer in int4."
        ),
    ] = "none"
    data: DataOptions
    quantize_options: QuantizeOptions
    device_options: DeviceOptions
    json: Json = False
