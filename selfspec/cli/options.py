"""Options of the commands, each defined once with its help; the commands' implementations take these classes.

The module imports nothing heavy, so that `--help` is instant. `flatten_options` evaluates the annotations, so they
are not postponed.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.input_options import DataOptions, DeviceOptions, PromptOptions, SharedDeviceOptions, TrainDataOptions
from selfspec.llm.options import Options
from selfspec.measure.bench_methods import METHODS
from selfspec.search.options import SearchOptions
from selfspec.training.options import TrainOptions
from selfspec.types.methods import OWN

BENCHED = "plain,profile,hf,hf-prompt-lookup"  # the methods that `bench` runs if none are named
# Options in a group of the help.
_drafting = partial(typer.Option, rich_help_panel="Drafting")
_guided = partial(typer.Option, rich_help_panel="Guided generation (needs llguidance)")
_sampling = partial(typer.Option, rich_help_panel="Sampling")
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object to standard output, and everything else to standard error."),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Model: a folder, GGUF file, hub id, smollm2-135m, or builtin; by default the profile's model.",
    ),
]
Controller = Annotated[
    str | None,
    _drafting(
        help="Controller, which decides when drafting stops: fixed:k=4, static:threshold=0.6,k_max=8, "
        "adaptive:threshold=0.6, rate:k_max=12; by default the profile's controller.",
        hidden=True,
    ),
]
Method = Annotated[
    str | None, _drafting(help=f"Drafting method instead of the profile's: {', '.join(OWN)}, model:NAME, staged:NAME.")
]
ExtraMemory = Annotated[
    float | None,
    _drafting(
        metavar="X",
        min=0,
        help="Maximum memory of draft weights made without a profile, as a share of the model; 0: none.",
    ),
]
Store = Annotated[
    Path | None,
    _drafting(
        metavar="FILE",
        help="Retrieval store to propose tokens from, in addition to the prompt; made by selfspec index.",
    ),
]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="System message, placed first; messages that begin with one keep it.")
]
Storage = Annotated[str | None, typer.Option(help="File or database that holds the study.")]
Tokens = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, metavar="N", help="New tokens for each prompt.")]


@dataclass(frozen=True, slots=True)
class DraftingOptions:
    """Options that select the model and its drafts."""

    model: Model = None
    profile: Annotated[
        str, typer.Option(help="Profile: a file, the name of a shipped one, auto (what generate drafts with), or none.")
    ] = "auto"
    controller: Controller = None
    store: Store = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCommand:
    """Options of `search`."""

    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Model: a folder, GGUF file, hub id, smollm2-135m, or builtin."),
    ] = None
    data: DataOptions
    out: Annotated[Path, typer.Option(help="File to write the profile to.")] = Path("profile.yaml")
    search_options: SearchOptions
    device_options: DeviceOptions
    json: Json = False

    @property
    def trials_storage(self) -> str | Path:
        """The storage of the trials: the path of a file, `memory`, or the URL of a database."""
        from selfspec.search.storage import resolve_storage

        default_file = self.out.parent / f"{self.out.name}.trials.jsonl"
        storage: str | Path = resolve_storage(
            default_file if self.search_options.storage is None else self.search_options.storage
        )
        return storage


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCommand:
    """Options of `train`."""

    kind: Annotated[
        str,
        typer.Argument(
            metavar="METHOD",
            help="Draft head: eagle, medusa, hydra, mlp, mtp, chimera; module of a draft path: bridge, adapter; draft "
            "model: distill; copy of the model: layerskip.",
        ),
    ]
    model: Model = None
    profile: Annotated[
        str,
        typer.Option(
            help="Profile with the draft path to train for: a file, the name of a shipped one, auto, or none."
        ),
    ] = "auto"
    data: TrainDataOptions
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder to write the trained module and its profiles to.")
    ] = Path("parts")
    train_options: TrainOptions
    device_options: DeviceOptions
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertCommand:
    """Options of `convert`."""

    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of the draft head, with its config.json and weights.")
    ]
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Model that the draft head is for: a folder, GGUF file, hub id, or smollm2-135m."
        ),
    ] = None
    profile: Annotated[
        str,
        typer.Option(
            help="Profile whose draft path checks the tokens that the draft head proposes: a file, the name of a "
            "shipped profile, auto, or none."
        ),
    ] = "auto"
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder to write the trained module and its profiles to.")
    ] = Path("parts")
    device_options: DeviceOptions
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingOptions:
    """Options that select the model, its drafts and how it decodes.

    `generation_options`: the options that have the same form on the command line as in Python.
    """

    model: Model = None
    profile: Annotated[str, typer.Option(help="Profile: a file, the name of a shipped one, auto, or none.")] = "auto"
    generation_options: Options
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop string; can be repeated.")] = None
    generation_config: Annotated[
        str | None,
        _sampling(help="Path of a generation_config.json or its folder; 'model': the configuration of the checkpoint."),
    ] = None
    min_p: Annotated[
        float | None,
        _sampling(
            min=0,
            max=1,
            metavar="X",
            help="Sample only tokens at least X times as probable as the most probable token.",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None, _sampling(min=0.01, metavar="X", help="Penalty on tokens that occurred; 1: none.")
    ] = None
    settings: Annotated[
        list[str] | None,
        _sampling(
            "--set",
            metavar="NAME=VALUE",
            help="Any other field of transformers' GenerationConfig, such as typical_p=0.9; can be repeated.",
        ),
    ] = None
    method: Method = None
    controller: Controller = None
    store: Store = None
    extra_memory: ExtraMemory = None
    answers: Annotated[
        Path | None,
        _drafting(metavar="FILE", help="File of earlier answers to propose tokens from; new ones are added."),
    ] = None
    regex: Annotated[str | None, _guided(help="Regular expression that the new text must match.")] = None
    json_schema: Annotated[
        str | None,
        _guided(metavar="FILE|JSON", help="JSON schema that the new text must satisfy: a file, or the schema itself."),
    ] = None
    device_options: SharedDeviceOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCommand:
    """Options of `chat`."""

    decoding: DecodingOptions
    system: System = None
    color: Annotated[bool, typer.Option("--color", help="Colour tokens by their source.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCommand:
    """Options of `audit`."""

    drafting: DraftingOptions
    method: Method = None
    data: PromptOptions
    limit: Annotated[int, typer.Option("--num-prompts", min=1, metavar="N", help="Maximum number of prompts.")] = 20
    max_new_tokens: Tokens = 64
    temperature: Annotated[
        float, typer.Option(min=0, metavar="X", help="Sampling temperature; above 0, texts are sampled with the seed.")
    ] = 0.0
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Random seed of sampling.")] = 0
    device_options: DeviceOptions
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCommand:
    """Options of `bench`."""

    drafting: DraftingOptions
    methods: Annotated[str, typer.Option(show_default=False, help=f"Of {', '.join(METHODS)}.")] = BENCHED
    data: PromptOptions
    limit: Annotated[
        int | None,
        typer.Option(
            "--num-prompts",
            min=1,
            metavar="N",
            help="Maximum number of prompts; by default all prompts of a file or folder, and 12 (6 with --widen) of a "
            "hub data set or of the built-in prompts.",
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            min=1,
            metavar="N",
            help="New tokens for each prompt; by default 96, or 64 with --widen.",
        ),
    ] = None
    temperature: Annotated[str, typer.Option(help="Sampling temperatures, separated by commas; 0 is greedy.")] = "0,0.8"
    rounds: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Runs of each method on each prompt; by default 5, or 3 with --widen."),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Random seed of sampling, for repeatable texts; none by default."),
    ] = None
    widen: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            metavar="N",
            help="Factor to widen the model by, to measure the cost of a larger model with the same output.",
        ),
    ] = 1
    out: Annotated[Path | None, typer.Option(help="JSON file to write all measurements to.")] = None
    device_options: DeviceOptions
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareCommand:
    """Options of `compare`."""

    model: Model = None
    profile: Annotated[
        str, typer.Option(help="Profile: a file, the name of a shipped one, auto (what generate drafts with), or none.")
    ] = "auto"
    methods: Annotated[
        str | None,
        typer.Option(help="Methods as for bench, and profile files, separated by commas; by default all that apply."),
    ] = None
    draft_model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Smaller model to compare as a draft model.")
    ] = None
    data: PromptOptions
    limit: Annotated[
        int | None, typer.Option("--num-prompts", min=2, metavar="N", help="Maximum number of prompts; 24 by default.")
    ] = None
    max_new_tokens: Tokens = 64
    temperature: Annotated[str, typer.Option(help="Sampling temperatures, separated by commas; 0 is greedy.")] = "0,0.8"
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Runs of each method on each prompt.")] = 1
    patience: Annotated[
        int,
        typer.Option(
            min=2, metavar="N", help="Prompts after which a method that is slower than plain decoding is dropped."
        ),
    ] = 8
    out: Annotated[Path | None, typer.Option(help="File to write a profile of the recommended method to.")] = None
    device_options: DeviceOptions
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCommand:
    """Options of `export`."""

    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="Profile: a file, or the name of a shipped one.")]
    to: Annotated[
        str, typer.Option(metavar="ENGINE", help="Runtime to export to: vllm, sglang, llama.cpp, tensorrt-llm or hf.")
    ]
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write to, empty or new.")]
    model: Model = None
    tokens: Annotated[
        int | None, typer.Option(min=1, max=64, metavar="N", help="Draft length in tokens; by default the best one.")
    ] = None
    type: Annotated[
        str | None, typer.Option(help="Type of the weights in GGUF files, such as q8_0; by default the model's type.")
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Overwrite the files in the folder.")] = False
    data: PromptOptions
    limit: Annotated[
        int,
        typer.Option(
            "--num-prompts",
            min=0,
            metavar="N",
            help="Maximum number of prompts to check on; 0: rely on the profile's figures.",
        ),
    ] = 8
    max_new_tokens: Tokens = 64
    device_options: DeviceOptions
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCommand:
    """Options of `index`."""

    texts: Annotated[
        list[str],
        typer.Argument(help="Files and folders of texts; .jsonl and .parquet files are read by row.", metavar="TEXTS"),
    ]
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Model whose tokenizer is used: a folder, GGUF file, hub id, smollm2-135m, or builtin.",
        ),
    ] = None
    out: Annotated[Path, typer.Option(help="File to write the retrieval store to.")] = Path("texts.store")
    add: Annotated[bool, typer.Option("--add", help="Add to the retrieval store at --out instead of replacing it.")] = (
        False
    )
    column: Annotated[
        str | None, typer.Option(help="Column of the texts; by default 'prompt', 'text' or 'messages'.")
    ] = None
    template: Annotated[
        str | None, typer.Option(help="Template of a text from columns, such as '{question}\\n{answer}'.")
    ] = None
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCommand:
    """Options of `report`."""

    out: Annotated[Path, typer.Option(help="File to write the page to.")] = Path("report.html")
    profile: Annotated[
        str | None, typer.Option(help="Profile: a file, or the name of a shipped one; by default the study's best.")
    ] = None
    study: Annotated[str | None, typer.Option(help="Study: a file of trials, or its name in --storage.")] = None
    storage: Storage = None
    bench: Annotated[Path | None, typer.Option(help="JSON file of measurements, written by bench --out.")] = None
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Model: folder, GGUF file, hub id, smollm2-135m or builtin; else the profile's."
        ),
    ] = None
    data: PromptOptions
    limit: Annotated[
        int, typer.Option("--num-prompts", min=1, max=100, metavar="N", help="Maximum number of prompts.")
    ] = 4
    max_new_tokens: Tokens = 64
    no_sample: Annotated[bool, typer.Option("--no-sample", help="Decode no texts, and do not load the model.")] = False
    device_options: DeviceOptions
