"""Options that select a command's prompts and devices, and reading of the prompts.

`flatten_options` evaluates the annotations, so they are not postponed.
"""

import os
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import kind
from selfspec.models.loading import DeviceMap, check_dtype, check_parallel, parse_devices

if TYPE_CHECKING:
    from selfspec.llm.llm import LLM
    from selfspec.text.prompt_files import Prompts
    from selfspec.text.prompt_template import Prompt


_KINDS = (
    ".jsonl, .txt or .parquet file, a folder, cnn_dailymail, xsum, gsm8k, humaneval, mt_bench, {spec,speed}-bench:FILE"
)
# Options in a group of the help.
_prompts = partial(typer.Option, rich_help_panel="Prompts")
many_option = partial(typer.Option, rich_help_panel="Many prompts")
device_option = partial(typer.Option, rich_help_panel="Device")


def unescape_newlines(template: str | None) -> str | None:
    r"""Return a template with each typed `\n` replaced by a newline."""
    return None if template is None else template.replace("\\n", "\n")


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Options that select prompts; `source` None selects the built-in prompts."""

    source: Annotated[str | None, typer.Option("--prompts", help=f"Prompts: a {_KINDS}; built-in ones by default.")] = (
        None
    )
    column: Annotated[str | None, _prompts(help="Column of the prompts; by default 'prompt', else 'text'.")] = None
    template: Annotated[
        str | None, _prompts(help="Template of a prompt from columns, such as 'Q: {question}\\nA:'; \\n is a new line.")
    ] = None
    chat: Annotated[
        bool, _prompts("--chat", help="Apply the model's chat template, with each prompt as a user message.")
    ] = False

    def read(self, *, held_out: bool = False, every: bool = False, limit: int | None = None) -> "Prompts | None":
        r"""Read the prompts that the options name; return None for the built-in prompts.

        `held_out`: read the split of a hub data set that searches do not draw from. Each typed `\n` in the template
        becomes a newline. `every`: use every row, as in `read_prompts`; otherwise print which rows are not used.
        `limit`: the most rows of a data set that are read (None: as `every` says). Raises `SelfspecError`.
        """
        from selfspec.text.prompt_files import read_prompts

        if self.source is None:
            if self.column is not None or self.template is not None:
                raise SelfspecError(
                    "--column and --template: given without --prompts; expected a file or data set, too"
                )
            return None
        prompts = read_prompts(
            self.source,
            column=self.column,
            template=unescape_newlines(self.template),
            held_out=held_out,
            chat=self.chat,
            use="every" if every else "first",
            limit=limit,
        )
        if prompts.note is not None:
            warnings.warn(prompts.note, stacklevel=2)
        return prompts

    @property
    def preset(self) -> bool:
        """Whether the prompts are a data set of the hub, which is too large to decode all of it."""
        from selfspec.text.datasets_prompts import PRESETS

        return self.source in PRESETS

    @property
    def held_out(self) -> bool:
        """Whether `read(held_out=True)` reads prompts that no search draws from, as far as is known."""
        from selfspec.text.datasets_prompts import PRESETS

        if self.source is None:
            return True
        preset = PRESETS.get(self.source)  # of a file, a search may have read all
        return preset is not None and preset.held_out != preset.split

    def check_not_written(self, place: Path, option: str) -> None:
        """Raise `SelfspecError` if `place`, the file that `option` names, is one of the data files."""
        if self.source is None or self.preset:
            return
        from selfspec.text.datasets_prompts import text_files
        from selfspec.text.spec_bench import benchmark_file

        named = benchmark_file(self.source)
        data = Path(self.source) if named is None else named[1]
        read = text_files(data) if kind(data) == "folder" else [data]
        if place.resolve() in {file.resolve() for file in read}:
            raise SelfspecError(f"{option} would write over the data file; expected another path")


@dataclass(frozen=True, slots=True)
class TrainDataOptions(DataOptions):
    """Options that select prompts for training texts; with `source` None the model generates texts without prompts."""

    source: Annotated[
        str | None,
        typer.Option("--prompts", help="Prompts to start from, as for search; by default the model generates its own."),
    ] = None


@dataclass(frozen=True, slots=True)
class ManyPrompts(DataOptions):
    """Options that select a file of prompts to decode; with `source` None the command decodes a single prompt."""

    source: Annotated[str | None, many_option("--prompts", help=f"Several prompts: a {_KINDS}.")] = None
    column: Annotated[str | None, many_option(help="Column of the prompts; by default 'prompt', else 'text'.")] = None
    template: Annotated[
        str | None, many_option(help="Template of a prompt from columns, such as 'Q: {question}\\nA:'.")
    ] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="Apply the model's chat template, with the prompt as a user message.")
    ] = False


@dataclass(frozen=True, slots=True)
class EncodedPrompts:
    """Prompts: `texts` as read, and `prompts` encoded for the model.

    `source`: a description for messages. `tasks`: the task of each text; empty if unknown. `chat`: whether each text
    became a user's message.
    """

    source: str
    texts: tuple[str, ...]
    prompts: "tuple[Prompt, ...]"
    tasks: tuple[str, ...]
    chat: bool

    @property
    def summary(self) -> str:
        """Description of the prompts' source, and whether they are chat messages."""
        return f"{self.source}{', as chat messages' * self.chat}"


@dataclass(frozen=True, slots=True)
class PromptOptions(DataOptions):
    """Options that select prompts to decode; `source` None selects the built-in held-out prompts."""

    def encode_prompts(
        self, llm: "LLM", raw_prompts: "Prompts | None", *, limit: int, max_new_tokens: int, last: bool = False
    ) -> EncodedPrompts:
        """Return at most `limit` of `raw_prompts` (None: the built-in prompts), encoded for the model.

        Takes the first prompts, or with `last` the last prompts; if tasks are known, balanced over tasks. Prompts are
        cut, with a warning, to leave room for `max_new_tokens`. Raises `SelfspecError` if a prompt cannot be encoded or
        if no room is left for it.
        """
        from selfspec.llm.prompt_encoding import encode, fit_prompt, takes_messages, warn_if_cut
        from selfspec.text.prompt_files import prompts_for
        from selfspec.text.prompt_template import shown

        all_prompts = prompts_for(raw_prompts, "heldout", chat=self.chat, takes_messages=takes_messages(llm))
        selected = all_prompts.subset(limit, last=last)
        chat, framed = selected.messages, selected.template is not None
        prompts = tuple(fit_prompt(llm, text, max_new_tokens, chat=chat, framed=framed) for text in selected.texts)
        lengths = (len(encode(llm, text, chat=chat)) for text in selected.texts)
        warn_if_cut(lengths, llm.runtime.skeleton.context - max_new_tokens)
        return EncodedPrompts(selected.source, tuple(map(shown, selected.texts)), prompts, selected.tasks, chat)


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Options of one device, or several for a model larger than one. Raises `SelfspecError` for invalid options."""

    device: Annotated[str, device_option(help="auto, cpu, cuda, cuda:1, ...")] = "auto"
    dtype: Annotated[
        str,
        device_option(
            help="auto (float32 on a CPU), float32, float64, bfloat16, float16; file keeps a GGUF file's weights as "
            "they are."
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        device_option(
            "--threads",
            "-t",
            min=1,
            max=4096,
            metavar="N",
            help="Number of CPU threads; PyTorch's default if not given.",
        ),
    ] = None
    device_map: Annotated[
        str | None,
        device_option(
            help="Device map for models larger than one device: auto, balanced, balanced_low_0, sequential.",
            hidden=True,
        ),
    ] = None
    device_memory: Annotated[
        str | None,
        device_option(help="Maximum memory of each device for --device-map, such as 0=20GiB,cpu=60GiB.", hidden=True),
    ] = None
    offload_folder: Annotated[
        Path | None, device_option(help="Folder for weights that --device-map offloads to disk.", hidden=True)
    ] = None

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        _ = self.placement

    @property
    def placement(self) -> str | DeviceMap:
        """The device, or the map of the model over several devices."""
        return parse_devices(self.device, self.device_map, self.device_memory, self.offload_folder)

    def set_threads(self) -> None:
        """Set PyTorch's number of CPU threads, if it is given."""
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)


@dataclass(frozen=True, slots=True)
class SharedDeviceOptions(DeviceOptions):
    """Device options, with tensor parallelism. Raises `SelfspecError` for invalid options."""

    tensor_parallel: Annotated[
        bool,
        device_option(
            "--tensor-parallel", help="Split the model over the processes that torchrun has started.", hidden=True
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
