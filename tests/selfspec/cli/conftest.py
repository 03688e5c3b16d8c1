"""`selfspec` as a person calls it, in the tests' own process."""

from __future__ import annotations

import io
import sys
import warnings

import pytest
from builtin_model import on_builtin
from fake_costs import costs_are_fixed as costs_are_fixed

from selfspec.cli import main


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """Run the command in a fresh folder: exit code, standard output, standard error. `stdin`: bytes, or a stream.

    Where neither a model nor a profile is named, it runs on the built-in model.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*args, stdin=None):
        monkeypatch.setattr(sys, "argv", ["selfspec", *on_builtin(args)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)) if isinstance(stdin, bytes) else stdin)
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


@pytest.fixture
def ran(cli):
    """Run the command as `cli` does, successfully: standard output."""

    def run(*args, **options):
        code, out, err = cli(*args, **options)
        assert code == 0, err
        return out

    return run
