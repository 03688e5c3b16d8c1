"""Options that select a command's devices. `flatten_options` evaluates the annotations, so they are not postponed."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from selfspec.models.loading import DeviceMap, check_dtype, check_parallel, parse_devices

_PANEL = "Device"


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Options of one device, or several for a model larger than one. Raises `SelfspecError` for invalid options."""

    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=_PANEL)] = "auto"
    dtype: Annotated[
        str,
        typer.Option(
            help="auto (float32 on a CPU), float32, float64, bfloat16, float16; file keeps a GGUF file's weights as "
            "they are.",
            rich_help_panel=_PANEL,
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            "-t",
            min=1,
            max=4096,
            metavar="N",
            help="Number of CPU threads; PyTorch's default if not given.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    device_map: Annotated[
        str | None,
        typer.Option(
            help="Device map for models larger than one device: auto, balanced, balanced_low_0, sequential.",
            hidden=True,
            rich_help_panel=_PANEL,
        ),
    ] = None
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="Maximum memory of each device for --device-map, such as 0=20GiB,cpu=60GiB.",
            hidden=True,
            rich_help_panel=_PANEL,
        ),
    ] = None
    offload_folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder for weights that --device-map offloads to disk.", hidden=True, rich_help_panel=_PANEL
        ),
    ] = None

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        _ = self.placement

    @property
    def placement(self) -> str | DeviceMap:
        """The device, or the map of the model over several devices."""
        return parse_devices(self.device, self.device_map, self.device_memory, self.offload_folder)


@dataclass(frozen=True, slots=True)
class SharedDeviceOptions(DeviceOptions):
    """Device options, with tensor parallelism. Raises `SelfspecError` for invalid options."""

    tensor_parallel: Annotated[
        bool,
        typer.Option(
            "--tensor-parallel",
            help="Split the model over the processes that torchrun has started.",
            hidden=True,
            rich_help_panel=_PANEL,
        ),
    ] = False

    def __post_init__(self) -> None:
        DeviceOptions.__post_init__(self)
        if self.tensor_parallel:
            check_parallel(self.placement)

    @property
    def is_worker(self) -> bool:
        """Whether this is a tensor-parallel process other than the first."""
        return self.tensor_parallel and os.environ["RANK"] != "0"
