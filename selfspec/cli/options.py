"""Options of the commands, each defined once with its help; the commands' implementations take these classes.

The module imports nothing heavy, so that `--help` is instant. `flat` evaluates the annotations as values.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.data import DataOptions, PromptOptions, TrainDataOptions
from selfspec.cli.devices import DeviceOptions, SharedDeviceOptions
from selfspec.llm.options import Options
from selfspec.measure.bench_methods import METHODS
from selfspec.search.options import SearchOptions
from selfspec.training.options import TrainOptions
from selfspec.types.methods import OWN

_DRAFTING = "Drafting"
_GUIDED = "What the text must be (needs llguidance)"
_SAMPLING = "Sampling"
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, all else on standard error.")]
Model = Annotated[
    str | None,
    typer.Option(help="A folder, GGUF file, hub id, smollm2-135m, or builtin; the profile's when left out."),
]
Controller = Annotated[
    str | None,
    typer.Option(
        help="When to stop drafting: fixed:k=4, static:threshold=0.6,k_max=8, adaptive:threshold=0.6; the profile's "
        "when left out.",
        rich_help_panel=_DRAFTING,
    ),
]
Store = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Texts to guess from, beside the prompt: what index made.", rich_help_panel=_DRAFTING
    ),
]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="A system message, which comes before the user's first.")
]
Storage = Annotated[str | None, typer.Option(help="The file or the database that holds the study.")]
Tokens = Annotated[int, typer.Option(min=1, metavar="N", help="Tokens that continue each prompt.")]


@dataclass(frozen=True, slots=True)
class DraftingOptions:
    """Options that select the model and its drafts."""

    model: Model = None
    profile: Annotated[
        str, typer.Option(help="A file, the name of a shipped one, or auto: one made for the model, else half of it.")
    ] = "auto"
    controller: Controller = None
    store: Store = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCommand:
    """Options of `search`."""

    model: Annotated[str, typer.Option(help="A folder, GGUF file, hub id, smollm2-135m, or builtin.")] = "builtin"
    data: DataOptions
    out: Annotated[Path, typer.Option(help="Where the profile goes.")] = Path("profile.yaml")
    how: SearchOptions
    where: DeviceOptions
    json: Json = False

    @property
    def kept_in(self) -> str | Path:
        """The storage of the trials: a file, `memory` or a database."""
        from selfspec.search.storage import place

        beside = self.out.parent / f"{self.out.name}.trials.jsonl"
        kept: str | Path = place(beside if self.how.storage is None else self.how.storage)
        return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCommand:
    """Options of `train`."""

    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help="eagle, medusa, hydra, mlp, mtp, chimera; bridge, adapter; distill, layerskip."
        ),
    ]
    model: Annotated[str, typer.Option(help="A folder, GGUF file, hub id, smollm2-135m, or builtin.")] = "builtin"
    profile: Annotated[
        str,
        typer.Option(
            help="Whose draft path the part is for, or is to have below it: a file, a shipped one, auto, or none."
        ),
    ] = "auto"
    data: TrainDataOptions
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the part and its profiles go.")] = Path("parts")
    how: TrainOptions
    where: DeviceOptions
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertCommand:
    """Options of `convert`."""

    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of the head: its config.json and weights.")]
    model: Annotated[str, typer.Option(help="Whose head it is: a folder, GGUF file, hub id, or smollm2-135m.")]
    profile: Annotated[
        str, typer.Option(help="Whose draft path is to have the head below it: a file, a shipped one, auto, or none.")
    ] = "auto"
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the part and its profiles go.")] = Path("parts")
    where: DeviceOptions
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingOptions:
    """Options of model, drafts and decoding; options with another form on the command line are not part of `how`."""

    model: Model = None
    profile: Annotated[str, typer.Option(help="A file, the name of a shipped one, auto, or none.")] = "auto"
    how: Options
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given again.")
    ] = None
    generation_config: Annotated[
        str | None,
        typer.Option(
            help="A generation_config.json or its folder; 'model': the checkpoint's own.", rich_help_panel=_SAMPLING
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Any other field of transformers' GenerationConfig, such as min_p=0.05; may be given again.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    method: Annotated[
        str | None,
        typer.Option(
            help=f"Draft by another method: {', '.join(OWN)}, model:NAME, staged:NAME.", rich_help_panel=_DRAFTING
        ),
    ] = None
    controller: Controller = None
    store: Store = None
    answers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Earlier answers to guess from, beside the prompt; new ones are added.",
            rich_help_panel=_DRAFTING,
        ),
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="The new text matches this regular expression.", rich_help_panel=_GUIDED)
    ] = None
    json_schema: Annotated[
        Path | None, typer.Option(help="The new text is JSON that this schema describes.", rich_help_panel=_GUIDED)
    ] = None
    where: SharedDeviceOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCommand:
    """Options of `chat`."""

    decoding: DecodingOptions
    system: System = None
    color: Annotated[bool, typer.Option("--color", help="Colour tokens by where they came from.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCommand:
    """Options of `audit`."""

    drafting: DraftingOptions
    data: PromptOptions
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="The most prompts.")] = 20
    max_new_tokens: Tokens = 64
    temperature: Annotated[float, typer.Option(min=0, metavar="X", help="Above 0: sampled with the seed.")] = 0.0
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of what is sampled.")] = 0
    where: DeviceOptions
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCommand:
    """Options of `bench`."""

    drafting: DraftingOptions
    methods: Annotated[
        str,
        typer.Option(
            show_default=False,
            help=f"Of {', '.join(METHODS)}.",
        ),
    ] = "plain,skip,hf,hf-early-exit,hf-prompt-lookup"
    data: PromptOptions
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="The most prompts; all of a file or folder, or 12 of others (widened 6)."
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens that continue each prompt; 96, or 64 widened, when left out."),
    ] = None
    temperature: Annotated[str, typer.Option(help="One or several, separated by commas; 0 is greedy.")] = "0,0.8"
    rounds: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Runs of each method on each prompt; 5, or 3 widened, when left out."),
    ] = None
    widen: Annotated[
        int,
        typer.Option(min=1, max=64, metavar="N", help="Times wider, with the same output: a large model's cost."),
    ] = 1
    out: Annotated[Path | None, typer.Option(help="Write everything that was measured here, as JSON.")] = None
    where: DeviceOptions
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareCommand:
    """Options of `compare`."""

    model: Model = None
    profile: Annotated[
        str, typer.Option(help="A file, the name of a shipped one, auto (one made for the model), or none.")
    ] = "auto"
    methods: Annotated[
        str | None,
        typer.Option(help="As bench's, and profiles by their files, separated by commas; all that apply if left out."),
    ] = None
    draft_model: Annotated[str | None, typer.Option(metavar="MODEL", help="A smaller model, to draft too.")] = None
    data: PromptOptions
    limit: Annotated[int | None, typer.Option(min=2, metavar="N", help="The most prompts; 24 if left out.")] = None
    max_new_tokens: Tokens = 64
    temperature: Annotated[str, typer.Option(help="One or several, separated by commas; 0 is greedy.")] = "0,0.8"
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Runs of each method on each prompt.")] = 1
    patience: Annotated[
        int,
        typer.Option(min=2, metavar="N", help="Prompts after which a method slower than plain decoding is dropped."),
    ] = 8
    out: Annotated[Path | None, typer.Option(help="Write a profile of the method that is recommended here.")] = None
    where: DeviceOptions
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCommand:
    """Options of `export`."""

    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="A file, or the name of a shipped one.")]
    to: Annotated[str, typer.Option(metavar="ENGINE", help="vllm, sglang, llama.cpp, tensorrt-llm or hf.")]
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where all goes: an empty folder, or a new one.")]
    model: Model = None
    tokens: Annotated[
        int | None, typer.Option(min=1, max=64, metavar="N", help="Of each draft; the best number when left out.")
    ] = None
    type: Annotated[
        str | None, typer.Option(help="Of the model's weights in GGUF files, such as q8_0; its own when left out.")
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Write over what is in the folder.")] = False
    data: PromptOptions
    limit: Annotated[
        int, typer.Option(min=0, metavar="N", help="The most prompts that are rehearsed; 0: go by the profile's word.")
    ] = 8
    max_new_tokens: Tokens = 64
    where: DeviceOptions
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCommand:
    """Options of `index`."""

    texts: Annotated[
        list[str], typer.Argument(help="Files and folders of texts; .jsonl and .parquet files by row.", metavar="TEXTS")
    ]
    model: Annotated[str, typer.Option(help="Whose tokens: a folder, GGUF file, hub id, smollm2-135m, or builtin.")] = (
        "builtin"
    )
    out: Annotated[Path, typer.Option(help="Where the store goes.")] = Path("texts.store")
    add: Annotated[bool, typer.Option("--add", help="Keep what the store at --out holds already.")] = False
    column: Annotated[str | None, typer.Option(help="Column of the texts; 'prompt', else 'text', if left out.")] = None
    template: Annotated[str | None, typer.Option(help="Texts made of columns, as '{question}\\n{answer}'.")] = None
    json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCommand:
    """Options of `report`."""

    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("report.html")
    profile: Annotated[
        str | None,
        typer.Option(help="A file, or a shipped one's name; the study's best, else the built-in model's, if left out."),
    ] = None
    study: Annotated[str | None, typer.Option(help="A file of trials, or a study's name in --storage.")] = None
    storage: Storage = None
    bench: Annotated[Path | None, typer.Option(help="What bench --out wrote.")] = None
    model: Annotated[
        str | None, typer.Option(help="A folder, GGUF file, hub id, smollm2-135m, or builtin; else the profile's.")
    ] = None
    data: PromptOptions
    limit: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="The most prompts.")] = 4
    max_new_tokens: Tokens = 64
    no_sample: Annotated[bool, typer.Option("--no-sample", help="Decode nothing, and do not load the model.")] = False
    where: DeviceOptions
