"""docs/extending.md as written: its files are saved, its commands and its Python are run, in order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long("examples of the docs")

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.\w+)\n")


def blocks():
    return [(language, text) for language, text in BLOCK.findall(PAGE.read_text("utf-8"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page's files: blocks that begin with their name."""
    folder = tmp_path_factory.mktemp("extending")
    for _, text in blocks():
        if named := FILE.match(text):
            (folder / named[1]).write_text(text)
    return folder


def run(folder, *command):
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return subprocess.run(command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True)


def test_its_files(folder):
    assert sorted(file.name for file in folder.iterdir()) == ["copycat.py", "copycat.yaml"]


def test_its_commands(folder):
    (commands,) = (text for language, text in blocks() if language == "bash")
    done = run(folder, "bash", "-ec", commands)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("copycat.yaml: valid, drafts by copycat, fits builtin\n")
    assert "identical output: yes" in done.stdout


def test_its_python(folder):
    (program,) = (text for language, text in blocks() if language == "python" and not FILE.match(text))
    done = run(folder, sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ passes of the model, 48 without drafts\n", done.stdout)


def test_what_it_says_of_wrong_profiles(folder):
    (folder / "wrong.yaml").write_text((folder / "copycat.yaml").read_text().replace("length: 6", "lengths: 6"))
    done = run(folder, sys.executable, "copycat.py", "profile", "validate", "wrong.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: wrong.yaml: unknown key 'draft.lengths'\n"
    done = run(folder, "selfspec", "profile", "validate", "copycat.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "error: copycat.yaml: draft.kind: 'copycat' is not known; "
        "known: plain, layer-skip, lookup, recycle, swift, clasp, input, jacobi, lookahead, head, model, merged\n"
    )
