"""Options of `generate`, `quantize` and `serve`, with their help. Imports no heavy module."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from selfspec.basics.errors import SelfspecError
from selfspec.cli.input_options import (
    DataOptions,
    DeviceOptions,
    ManyPrompts,
    SharedDeviceOptions,
    device_option,
    many_option,
)
from selfspec.cli.options import DecodingOptions, ExtraMemory, Json, Method, Model, Store, System
from selfspec.search.options import QuantizeOptions


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
    limit: Annotated[
        int | None, many_option("--num-prompts", min=1, metavar="N", help="Decode the first N prompts; all by default.")
    ] = None
    batch_size: Annotated[
        int | None, many_option(min=1, metavar="N", help="Batch size: prompts decoded together; 8 by default.")
    ] = None
    memory: Annotated[
        float | None,
        many_option(
            metavar="GIB",
            help="Memory of the KV cache; by default for 2,048 tokens a prompt, at most half of what is available.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        many_option(
            metavar="FILE.jsonl",
            help="File that results are appended to; prompts whose results it has are not decoded again.",
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


# Options in a group of the help.
_limit = partial(typer.Option, rich_help_panel="Limits")
_access = partial(typer.Option, rich_help_panel="Address and access")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """Limits of the server: batch size, memory, lengths, queue length and time limits."""

    max_num_seqs: Annotated[
        int | None,
        _limit(
            min=1,
            max=1024,
            metavar="N",
            help="Maximum number of sequences decoded together, also as --batch-size; 8 by default.",
        ),
    ] = None
    batch_size: Annotated[
        int | None, _limit(min=1, max=1024, metavar="N", help="The same as --max-num-seqs.", hidden=True)
    ] = None
    memory: Annotated[
        float | None,
        _limit(
            min=0.001,
            metavar="GIB",
            help="Memory of the KV cache; by default for 2,048 tokens a sequence, at most half of what is available.",
        ),
    ] = None
    max_tokens: Annotated[
        int | None, _limit(min=1, metavar="N", help="Maximum number of new tokens of a request; by default what fits.")
    ] = None
    max_model_len: Annotated[
        int | None,
        _limit(
            min=2,
            metavar="N",
            help="Maximum number of tokens of a prompt and its new text; by default what context and memory allow.",
        ),
    ] = None
    queue: Annotated[
        int,
        _limit(min=0, metavar="N", help="Maximum number of waiting texts (n for each prompt); more get status 429."),
    ] = 64
    max_body: Annotated[
        int,
        _limit(min=1, metavar="BYTES", help="Maximum size of a request body; larger ones get status 413.", hidden=True),
    ] = 4 * 2**20
    timeout: Annotated[
        float, _limit(min=0.001, metavar="SECONDS", help="Time limit of a request, waiting included.")
    ] = 600.0
    read_timeout: Annotated[
        float,
        _limit(
            min=0.001, metavar="SECONDS", help="Time limit for reading a request's head, then its body.", hidden=True
        ),
    ] = 20.0
    grace: Annotated[
        float,
        _limit(min=0, metavar="SECONDS", help="Time that running requests have to finish on shutdown.", hidden=True),
    ] = 30.0

    @property
    def rows(self) -> int:
        """Maximum number of sequences decoded together. Raises `SelfspecError` if it is given under both names."""
        if self.max_num_seqs is not None and self.batch_size is not None:
            raise SelfspecError("--max-num-seqs and --batch-size: expected only one of the two")
        return self.max_num_seqs or self.batch_size or 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommand:
    """Options of `serve`."""

    model: Model = None
    profile: Annotated[str, typer.Option(help="Profile: a file, the name of a shipped one, auto, or none.")] = "auto"
    method: Method = None
    store: Store = None
    extra_memory: ExtraMemory = None
    host: Annotated[str, _access(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _access(min=0, max=65535, metavar="N", help="Port to listen on; 0: any free one.")] = 8000
    api_key: Annotated[
        str | None,
        _access(envvar="SELFSPEC_API_KEY", metavar="KEY", show_envvar=True, help="API key that requests must send."),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        _access(
            metavar="ORIGIN",
            help="Origin of web pages that may send requests, such as https://app.example; can be repeated; *: any.",
            hidden=True,
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        _access(metavar="NAME", help="Model name in the API, instead of the model's own; can be repeated."),
    ] = None
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="PEFT adapter that requests select as their model; can be repeated."),
    ] = None
    limits: LimitOptions
    devices: Annotated[
        str | None,
        device_option(metavar="LIST", help="Devices with one replica each, such as cuda:0,cuda:1 or cpu,cpu."),
    ] = None
    device_options: SharedDeviceOptions
