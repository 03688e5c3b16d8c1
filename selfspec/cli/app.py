"""The commands. Their options are in `options`; each command's implementation is a module imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from selfspec.cli.dataclass_options import flat
from selfspec.cli.generate_options import GenerateCommand
from selfspec.cli.options import (
    AuditCommand,
    BenchCommand,
    ChatCommand,
    CompareCommand,
    ConvertCommand,
    ExportCommand,
    IndexCommand,
    SearchCommand,
    TrainCommand,
)
from selfspec.cli.profile_app import profile_app
from selfspec.cli.report_app import see_app
from selfspec.cli.serve_options import ServeCommand

app = typer.Typer(
    name="selfspec",
    help="Lossless self-speculative decoding: the same output, sooner, with no second model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(profile_app, name="profile")
app.add_typer(see_app)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        from selfspec import __version__

        typer.echo(f"selfspec {__version__}")
        raise typer.Exit


@app.command()
@flat
def search(given: SearchCommand) -> int:
    """Find which sub-layers of this model, on this machine, to bypass while drafting; save a profile."""
    from selfspec.cli.search import run

    return run(given)


@app.command()
@flat
def train(given: TrainCommand) -> int:
    """Train a small part on the model's own texts that drafts far better; the model and its output stay the same."""
    from selfspec.cli.train import run

    return run(given)


@app.command()
@flat
def convert(given: ConvertCommand) -> None:
    """Make a part of a published head (EAGLE, EAGLE-3, Medusa, Hydra, MLPSpeculator), and profiles that use it."""
    from selfspec.cli.convert import run

    run(given)


@app.command()
@flat
def export(given: ExportCommand) -> None:
    """Write what another engine needs to draft so: files, the command, what is lost, and the acceptance to expect."""
    from selfspec.cli.export import run

    run(given)


@app.command()
@flat
def generate(given: GenerateCommand) -> int:
    """Continue a prompt, or many together, drafting with a profile: the same output as plain decoding, sooner."""
    from selfspec.cli.generate import run

    return run(given)


@app.command()
@flat
def chat(given: ChatCommand) -> int:
    """Talk to an instruct model: answers come as they are decoded, and only what is new is read. /help says more."""
    from selfspec.cli.chat import run

    return run(given)


@app.command()
@flat
def audit(given: AuditCommand) -> int:
    """Check that drafting changes nothing: near-ties are counted, and exit code 1 means a bug was found."""
    from selfspec.cli.audit_command import run

    return run(given)


@app.command()
@flat
def bench(given: BenchCommand) -> int:
    """Measure every method on the same prompts, interleaved: plain, layer skip, and transformers' own."""
    from selfspec.cli.bench_command import run

    return run(given)


@app.command()
@flat
def compare(given: CompareCommand) -> int:
    """Measure all methods that apply to a model, and recommend one: which is best for your model and your text?"""
    from selfspec.cli.compare import run

    return run(given)


@app.command()
@flat
def index(given: IndexCommand) -> None:
    """Make a store of texts, your own or earlier answers, that drafts are guessed from: --store."""
    from selfspec.cli.index import run

    run(given)


@app.command()
@flat
def serve(given: ServeCommand) -> int:
    """Serve the OpenAI API: chats and completions, many at a time, and a page to try it."""
    from selfspec.cli.serve import run

    return run(given)
