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


def commands(name):
    """The block of commands that run the page's file of this name."""
    (block,) = (text for language, text in blocks() if language == "bash" and name in text)
    return block


def program(name):
    """The block of Python that imports the page's file of this name."""
    (block,) = (text for language, text in blocks() if language == "python" and f"import {name}\n" in text)
    return block


def test_its_files(folder):
    assert sorted(file.name for file in folder.iterdir()) == ["copycat.py", "copycat.yaml", "full_stop.py"]


def test_every_block_is_run():
    run_here = [commands("copycat.py"), commands("full_stop.py"), program("copycat"), program("full_stop")]
    shown = [text for language, text in blocks() if language in ("bash", "python") and not FILE.match(text)]
    assert sorted(shown) == sorted(run_here)


def test_the_drafters_commands(folder):
    done = run(folder, "bash", "-ec", commands("copycat.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("copycat.yaml: valid, drafts by copycat, fits builtin\n")
    assert "identical output: yes" in done.stdout


def test_the_drafters_python(folder):
    done = run(folder, sys.executable, "-c", program("copycat"))
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ passes of the model, 48 without drafts\n", done.stdout)


def test_the_controllers_command(folder):
    done = run(folder, "bash", "-ec", commands("full_stop.py"))
    assert done.returncode == 0, done.stderr
    assert "identical output: yes" in done.stdout


STOPS = """
drafts = {}  # round -> for each accepted drafted token, whether it is a full stop
for event in out.events:
    if event.origin == "accepted draft":
        drafts.setdefault(event.round, []).append(event.token in full_stop.full_stops())
assert any(draft[-1] for draft in drafts.values())
assert not any(any(draft[:-1]) for draft in drafts.values())
"""


def test_the_controllers_python(folder):
    done = run(folder, sys.executable, "-c", program("full_stop") + STOPS)
    assert done.returncode == 0, done.stderr
    stopped, fixed = re.fullmatch(r"(\d+) tokens drafted, (\d+) by a fixed draft length\n", done.stdout).groups()
    assert int(stopped) < int(fixed)


def test_a_controller_is_known_where_its_file_is_imported(folder):
    command = ("generate", "--model", "builtin", "--controller", "full-stop:k_max=0", "import os")
    done = run(folder, sys.executable, "full_stop.py", *command)
    message = "error: controller 'full-stop': k_max 0.0: expected a whole number from 1 to 64\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
    done = run(folder, "selfspec", *command)
    message = "error: controller 'full-stop' is not known; known: fixed, static, adaptive, rate\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


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
