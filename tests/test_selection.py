"""What `make test` leaves to `make test-all`, and that nothing else is left out there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from amount import examples, set_whole, some, whole
from spent import MUCH, summary_of_time

ROOT = Path(__file__).resolve().parents[1]


class Config:
    """Options of a run, and what its hooks are told."""

    def __init__(self, **options):
        self.options, self.gone = options, []
        self.hook = SimpleNamespace(pytest_deselected=lambda items: self.gone.extend(items))

    def getoption(self, name):
        return self.options.get(name.removeprefix("--"), False)


class Item:
    def __init__(self, *marks, name="test_x.py"):
        self.marks, self.path = {mark.name: mark for mark in marks}, Path(name)

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def add_marker(self, mark):
        self.marks[mark.name] = mark.mark


LONG, PROOF, GPU = pytest.mark.long("killed workers").mark, pytest.mark.proof.mark, pytest.mark.gpu.mark


@pytest.fixture
def hooks(request, monkeypatch):
    """The suite's own hooks, which have left nothing out yet."""
    files = ((plugin, getattr(plugin, "__file__", None)) for plugin in request.config.pluginmanager.get_plugins())
    module = next(plugin for plugin, file in files if file and Path(file).resolve() == ROOT / "tests" / "conftest.py")
    monkeypatch.setattr(module, "_left", Counter())
    return module


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 3]),
        ({"long": True}, [0, 1, 3, 4]),
        ({"all": True}, [0, 1, 3, 4]),
        ({"proofs": True}, [0, 2, 3]),
        ({"long": True, "proofs": True}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_what_runs(hooks, options, kept):
    every = [Item(), Item(LONG), Item(PROOF), Item(GPU), Item(name="a.ipynb"), Item(LONG, PROOF)]
    config, items = Config(**options), list(every)
    hooks.pytest_collection_modifyitems(config, items)
    assert items == [every[i] for i in kept]
    assert config.gone == [item for item in every if item not in items]


def test_a_run_of_everything_fails_where_anything_but_proofs_is_left_out(hooks):
    def ended(*items):
        hooks._left.clear()
        hooks.pytest_deselected(list(items))
        session = SimpleNamespace(config=Config(all=True), exitstatus=0)
        hooks.pytest_sessionfinish(session)
        return session.exitstatus

    assert ended() == ended(Item(PROOF)) == 0
    assert ended(Item(LONG)) == ended(Item()) == pytest.ExitCode.TESTS_FAILED


def test_processes_of_tests_say_what_they_left_out(hooks):
    for _ in range(2):  # each of them leaves out the same
        hooks.pytest_testnodedown(SimpleNamespace(workeroutput={"left": {"killed workers": 3}}))
    hooks.pytest_testnodedown(SimpleNamespace())
    assert hooks._left == {"killed workers": 3}


def test_amounts(monkeypatch):
    monkeypatch.setenv("SELFSPEC_TEST_ALL", "0")
    assert not whole()
    assert [examples(n) for n in (1, 3, 8, 100)] == [1, 3, 3, 20]
    assert some(20, 3) == 3
    set_whole(True)
    assert [examples(n) for n in (1, 3, 8, 100)] == [1, 3, 8, 100]
    assert some(20, 3) == 20


def test_unmarked_tests_that_take_long_are_listed_and_none_fails():
    def report(name, seconds, **keywords):
        return SimpleNamespace(nodeid=name, keywords=keywords, user_properties=[("processor_seconds", seconds)])

    class Reporter:
        stats = {"": [report("slow", 2 * MUCH), report("slower", 3 * MUCH), report("marked", 2 * MUCH, long=1)],
                 "passed": [report("quick", MUCH / 2), object()]}  # fmt: skip
        lines = []

        def section(self, title):
            self.lines.append(title)

        def write_line(self, line):
            self.lines.append(line.split()[-1])

    summary_of_time(Reporter())
    assert Reporter.lines[1:] == ["slower", "slow"]


def test_commands_are_what_they_are_said_to_be():
    makefile, gate = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text()
    assert "$(BIN)/pytest $(PYTEST) --all" in makefile
    assert "$(BIN)/pytest $(PYTEST) --long --proofs -m proof" in makefile, "some proofs are long, too"
    assert gate.index("make test ") < gate.index("make test-all ")
