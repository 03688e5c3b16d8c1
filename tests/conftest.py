from __future__ import annotations

import os
import shutil
from collections import Counter
from typing import Any

from kept import keep, make_cache

os.environ["SELFSPEC_CACHE"] = str(make_cache())  # before anything is imported that reads it
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or every process that tests start compiles torch anew
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of the processes that tests start: threads wait for each other

import hypothesis
import layouts
import pytest
import torch
from amount import examples, set_whole
from spent import pytest_runtest_makereport as pytest_runtest_makereport
from spent import pytest_runtest_protocol as pytest_runtest_protocol
from spent import summary_of_time
from wants import is_there, missing, summary_of_skipped
from warm import WarmShell

import selfspec
from selfspec import builtin

keep()  # what collecting the tests has compiled, for the processes that they start
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The layout that tests take for the fastest."""
    parser.addoption(
        "--layout", choices=layouts.CHOOSABLE, default="rows", help="what layout 'auto' is in tests (rows)"
    )
    parser.addoption("--long", action="store_true", help="run tests marked `long` too, and every example")
    parser.addoption(
        "--all", action="store_true", help="the same, and fail where anything else is left out than proofs"
    )
    parser.addoption("--proofs", action="store_true", help="run tests marked `proof` too")


def pytest_configure(config: pytest.Config) -> None:
    """Say how much is tested before test modules are imported."""
    set_whole(config.getoption("--long") or config.getoption("--all"))
    hypothesis.settings.register_profile(  # how long an example takes is the machine's, not the code's
        "any machine",
        deadline=None,
        max_examples=examples(100),
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("any machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `long` or `proof` and was not asked for; skip what is marked `gpu` without one."""
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.long("notebooks"))
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    asked = {
        "long": config.getoption("--long") or config.getoption("--all"),
        "proof": config.getoption("--proofs"),
    }
    left = [item for item in items if any(item.get_closest_marker(mark) and not asked[mark] for mark in asked)]
    if left:
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]


_left: Counter[str] = Counter()  # tests that were left out, by what they are


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count what is left out, by the reason that its mark gives."""
    for item in items:
        marks = (item.get_closest_marker(name) for name in ("proof", "long"))
        mark = next((mark for mark in marks if mark is not None), None)
        _left["others" if mark is None else "proofs" if mark.name == "proof" else str(*mark.args)] += 1


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Learn from a process of tests what it left out: each of them leaves out the same."""
    _left.update(Counter(getattr(node, "workeroutput", {}).get("left", {})) - _left)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run of everything that left anything out but proofs."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left"] = dict(_left)
    if session.config.getoption("--all") and _left.keys() - {"proofs"}:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What was skipped and why, what was left to which target, and what took long without a mark."""
    summary_of_skipped(terminalreporter)
    summary_of_time(terminalreporter)
    proofs, _ = _left.pop("proofs", 0), _left.pop("others", 0)
    left = ", ".join(f"{what} {count}" for what, count in _left.most_common())
    if left or proofs:
        terminalreporter.section("left out")
    if left:
        terminalreporter.write_line(f"left to make test-all: {sum(_left.values())} tests ({left})")
    if proofs:
        terminalreporter.write_line(f"left to make proof: {proofs} tests")


@pytest.fixture(scope="session", autouse=True)
def told_layout(request) -> None:
    """What `auto` measures is what --layout says: another machine's fastest is none of a test's business.

    Nor is what rounds take there: with a seed, they cost what the profile says.
    """
    times = layouts.fastest(request.config.getoption("layout"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selfspec.models.layout.measure_layouts", lambda model: times)
        patch.setattr("selfspec.models.layout._UNTIMED", False)
        patch.setattr("selfspec.models.layout.measure_as_stored", lambda linears: times)
        patch.setattr("selfspec.llm.local_costs.measure_shares", lambda runtime, path: {})
        yield


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """Programs that begin at once, as everything is imported already."""
    shell = WarmShell(tmp_path_factory.mktemp("warm"))
    yield shell
    shell.close()


@pytest.fixture
def auto(monkeypatch, tmp_path):
    """Say which layout `auto` takes, for plain decoding and for drafting: `auto("columns", "onednn")`."""

    def say(plain: str, drafting: str | None = None) -> None:
        monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "told"))
        monkeypatch.setattr("selfspec.models.layout.measure_layouts", lambda model: layouts.fastest(plain, drafting))

    return say


@pytest.fixture(params=layouts.CHOOSABLE)
def each_layout(request, auto) -> str:
    """The test is run once with each layout as what `auto` takes."""
    auto(request.param)
    return request.param


@pytest.fixture(scope="session")
def llm() -> selfspec.LLM:
    """The built-in model in float32, without a profile."""
    return selfspec.load("builtin", profile="none")


@pytest.fixture(scope="session")
def llm64() -> selfspec.LLM:
    """The built-in model in float64, without a profile."""
    return selfspec.load("builtin", profile="none", dtype="float64")


@pytest.fixture(scope="session")
def held_out() -> list[str]:
    """The held-out prompts."""
    return builtin.prompts("heldout")


@pytest.fixture(scope="module")
def browser():
    """A real browser. While it is open, no other event loop can run in this thread: so not for the whole session."""
    if not is_there("playwright"):
        missing("Playwright")
    from playwright import sync_api

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        missing("Chromium")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()
