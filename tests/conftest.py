from __future__ import annotations

import atexit
import os
import shutil
import tempfile

os.environ["SELFSPEC_CACHE"] = tempfile.mkdtemp(prefix="selfspec-tests-")  # no test reads or writes the user's cache
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or every process that tests start compiles torch anew
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of the processes that tests start: threads wait for each other

import hypothesis
import layouts
import pytest
import torch
from wants import is_there, missing
from wants import pytest_terminal_summary as pytest_terminal_summary  # pytest finds it here

import selfspec
from selfspec import builtin

atexit.register(shutil.rmtree, os.environ["SELFSPEC_CACHE"], ignore_errors=True)
torch.set_num_threads(1)
hypothesis.settings.register_profile(  # how long an example takes is the machine's, not the code's
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The layout that tests take for the fastest."""
    parser.addoption(
        "--layout", choices=layouts.CHOOSABLE, default="rows", help="what layout 'auto' is in tests (rows)"
    )
    parser.addoption("--proofs", action="store_true", help="run tests marked `proof` too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` run where there is one, those marked `proof` where they are asked for."""
    if not config.getoption("--proofs"):
        proofs = [item for item in items if item.get_closest_marker("proof") is not None]
        config.hook.pytest_deselected(items=proofs)
        items[:] = [item for item in items if item.get_closest_marker("proof") is None]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def told_layout(request) -> None:
    """What `auto` measures is what --layout says: another machine's fastest is none of a test's business.

    Nor is what rounds take there: with a seed, they cost what the profile says.
    """
    times = layouts.fastest(request.config.getoption("layout"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selfspec.model.layout.measure_layouts", lambda model: times)
        patch.setattr("selfspec.llm.here.measured", lambda runtime, path: {})
        yield


@pytest.fixture
def auto(monkeypatch, tmp_path):
    """Say which layout `auto` takes, for plain decoding and for drafting: `auto("columns", "onednn")`."""

    def say(plain: str, drafting: str | None = None) -> None:
        monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "told"))
        monkeypatch.setattr("selfspec.model.layout.measure_layouts", lambda model: layouts.fastest(plain, drafting))

    return say


@pytest.fixture(params=layouts.CHOOSABLE)
def each_layout(request, auto) -> str:
    """The test is run once with each layout as what `auto` takes."""
    auto(request.param)
    return request.param


@pytest.fixture(scope="session")
def llm() -> selfspec.LLM:
    """The built-in model in float32, without a profile."""
    return selfspec.load(profile="none")


@pytest.fixture(scope="session")
def llm64() -> selfspec.LLM:
    """The built-in model in float64, without a profile."""
    return selfspec.load(profile="none", dtype="float64")


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
