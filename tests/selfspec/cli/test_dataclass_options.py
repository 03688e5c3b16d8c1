"""A command made of classes: what typer shows and reads, and what the command is given."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from selfspec.cli.dataclass_options import flatten_options


@dataclass(frozen=True)
class Where:
    device: Annotated[str, typer.Option(help="A device.")] = "auto"
    threads: Annotated[int | None, typer.Option(min=1)] = None


@dataclass(frozen=True, kw_only=True)
class Told:
    file: Annotated[Path, typer.Argument()]
    where: Where
    often: Annotated[int, typer.Option("--times", max=9)] = 3
    share: Annotated[float, typer.Option()] = 0.5
    texts: Annotated[list[str] | None, typer.Option("--text")] = None
    layers: Annotated["tuple[int, ...] | str", typer.Option()] = (1,)
    place: Annotated["Path | NotThere", typer.Option()] = Path("here")  # noqa: F821
    loud: Annotated[bool, typer.Option("--loud")] = False
    python_only: object = "untouched"


@pytest.fixture
def run():
    """Run a command of `Told`: what it was given, or the exit code where it was not called."""
    app, seen = typer.Typer(), []

    @app.command()
    @flatten_options
    def command(told: Told) -> int:
        """Do it."""
        seen.append(told)
        return 7 if told.loud else 0

    def run(*args):
        result = CliRunner().invoke(app, args)
        return result.exit_code, seen.pop() if seen else result.output

    return run


def test_what_is_left_out_keeps_its_default(run):
    assert run("x") == (0, Told(file=Path("x"), where=Where()))


def test_what_is_given(run):
    given = ["x", "--times", "9", "--share=1", "--text", "a", "--text", "b", "--threads", "2", "--layers", "1,2"]
    expected = Told(file=Path("x"), where=Where(threads=2), often=9, share=1.0, texts=["a", "b"], layers="1,2")
    assert run(*given) == (0, expected)
    assert run("x", "--place", "there")[1].place == "there"
    assert run("x", "--layers", "")[1].layers == ""


def test_what_a_command_returns_is_the_exit_code(run):
    assert run("x", "--loud") == (7, Told(file=Path("x"), where=Where(), loud=True))


@pytest.mark.parametrize("args", [[], ["x", "--times", "10"], ["x", "--threads", "0"], ["x", "--python-only", "y"]])
def test_wrong_options_are_typers_to_refuse(run, args):
    code, said = run(*args)
    assert code == 2
    assert isinstance(said, str)


def test_help(run):
    code, said = run("--help")
    assert code == 0
    assert "Do it." in said
    assert "A device." in said
    assert "python" not in said
