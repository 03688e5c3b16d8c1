"""The options that say on what a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Spread = Annotated[
    str | None,
    typer.Option("--device-map", help="For models larger than one device: auto, balanced, balanced_low_0, sequential."),
]
MaxMemory = Annotated[str | None, typer.Option(help="What --device-map may use of each, such as 0=20GiB,cpu=60GiB.")]
Offload = Annotated[Path | None, typer.Option("--offload-folder", help="Where --device-map may keep weights on disk.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, float64, bfloat16, float16. auto: float32 on a CPU.")]
Threads = Annotated[int | None, typer.Option(min=1, max=4096, help="CPU threads; PyTorch's choice when left out.")]
