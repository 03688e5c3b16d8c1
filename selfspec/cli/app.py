"""The commands. Their options are in `options`; each command's implementation is a module imported when it runs."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from selfspec.cli.command_options import GenerateCommand, QuantizeCommand, ServeCommand
from selfspec.cli.dataclass_options import PlainGroup, add_command
from selfspec.cli.options import (
    AuditCommand,
    BenchCommand,
    ChatCommand,
    CompareCommand,
    ConvertCommand,
    ExportCommand,
    IndexCommand,
    Json,
    SearchCommand,
    TrainCommand,
)
from selfspec.cli.profile_app import profile_app, report_app

app = typer.Typer(
    name="selfspec",
    cls=PlainGroup,
    help="Lossless self-speculative decoding: the same output, sooner, with no second model.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# Decorators of commands, for each group of the help, in the order in which their commands are declared.
_run, _tune, _check, _extend = (partial(add_command, app, panel=name) for name in ("Run", "Tune", "Check", "Extend"))


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        from selfspec import __version__

        typer.echo(f"selfspec {__version__}")
        raise typer.Exit


@_run(
    "command-line.md#selfspec-generate", 'selfspec generate --model smollm2-135m --chat "Why is the sky blue?" --stats'
)
def generate(command: GenerateCommand) -> int:
    """Generate text with a profile, for one prompt or many: the same output as plain decoding, sooner."""
    from selfspec.cli.generate import run

    return run(command)


@_run("command-line.md#selfspec-chat", "selfspec chat --model smollm2-135m")
def chat(command: ChatCommand) -> int:
    """Chat with an instruct model, with streamed answers; each turn prefills only new tokens. See /help."""
    from selfspec.cli.chat import run

    return run(command)


@_run("serving.md", "selfspec serve --model smollm2-135m --port 8000")
def serve(command: ServeCommand) -> int:
    """Serve the OpenAI API (chat and completions) with continuous batching, and a page to try it."""
    from selfspec.cli.serve import run

    return run(command)


@_tune("search.md", "selfspec search --model smollm2-135m --minutes 3 --out profile.yaml")
def search(command: SearchCommand) -> int:
    """Find how each sub-layer of this model should run while drafting on this machine; save a profile."""
    from selfspec.cli.search import run

    return run(command)


@_tune("measuring.md#which-method", "selfspec compare --model smollm2-135m --chat --prompts mine.jsonl --out best.yaml")
def compare(command: CompareCommand) -> int:
    """Measure all methods that apply to a model on your text, and recommend one."""
    from selfspec.cli.compare import run

    return run(command)


app.add_typer(profile_app, name="profile", rich_help_panel="Tune")


@_check("losslessness.md#your-model", "selfspec audit --model smollm2-135m --num-prompts 10")
def audit(command: AuditCommand) -> int:
    """Check that drafting does not change the output; counts near-ties. Exit code 1: a bug was found."""
    from selfspec.cli.audit_command import run

    return run(command)


@_check("results.md", "selfspec bench --profile profile.yaml --methods plain,profile,hf --temperature 0")
def bench(command: BenchCommand) -> int:
    """Measure methods on the same prompts, interleaved: plain decoding, layer skipping, and those of transformers."""
    from selfspec.cli.bench_command import run

    return run(command)


@_check("command-line.md#selfspec-env", "selfspec env --model smollm2-135m")
def env(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model to say the memory of: as for generate; not loaded.")
    ] = None,
    json: Json = False,
) -> None:
    """Show versions, processor, kernels, caches and devices: what a bug report needs."""
    from selfspec.cli.env import run

    run(model, as_json=json)


@_extend("training.md", "selfspec train eagle --model smollm2-135m --minutes 10 --out parts")
def train(command: TrainCommand) -> int:
    """Train a draft head, bridge, adapter, draft model, or copy of the model (layerskip) on the model's own texts."""
    from selfspec.cli.artifacts import run_train

    return run_train(command)


@_extend("training.md#published-heads", "selfspec convert eagle-head --model ./my-model --out parts")
def convert(command: ConvertCommand) -> None:
    """Convert a published draft head (EAGLE, EAGLE-3, Medusa, Hydra, MLPSpeculator), and write profiles that use it."""
    from selfspec.cli.artifacts import run_convert

    run_convert(command)


@_extend("search.md#int4-weights", "selfspec quantize --model smollm2-135m --int4 gptq --out int4.safetensors")
def quantize(command: QuantizeCommand) -> int:
    """Quantise a model's weights to int4 for drafting, better than rounding to nearest; resumable."""
    from selfspec.cli.artifacts import run_quantize

    return run_quantize(command)


@_extend("search.md#a-store-of-texts", "selfspec index notes src --model smollm2-135m --out texts.store")
def index(command: IndexCommand) -> None:
    """Build a retrieval store from texts or earlier answers, for drafting with --store."""
    from selfspec.cli.artifacts import run_index

    run_index(command)


@_extend("export.md", "selfspec export profile.yaml --to llama.cpp --out for-llama.cpp")
def export(command: ExportCommand) -> None:
    """Export a profile to another engine: files, command, limitations and expected acceptance."""
    from selfspec.cli.artifacts import run_export

    run_export(command)


app.add_typer(report_app)
