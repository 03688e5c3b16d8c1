"""What some tests want of a machine: they are skipped where it is missing, and the summary says what to install."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any, NoReturn

import pytest

INSTALL = {
    "PostgreSQL": "apt-get install postgresql",
    "PostgreSQL's driver": "pip install 'psycopg[binary]'",
    "Chromium": "apt-get install chromium",
    "Playwright": "pip install playwright",
    "llguidance": "pip install llguidance",
    "lm-evaluation-harness": "pip install lm_eval",
    "torchao": "pip install torchao",
    "bitsandbytes": "pip install bitsandbytes",
    "Triton": "pip install triton",
    "PEFT": "pip install peft",
    "a C++ compiler": "apt-get install g++",
    "an emulated ARM processor": "apt-get install g++-aarch64-linux-gnu qemu-user",
    "oneDNN": "install a PyTorch that is built with it",
}
MARK = "wants "


def reason(what: str) -> str:
    """Why a test is skipped that wants one of `INSTALL`."""
    return f"{MARK}{what}: {INSTALL[what]}"


def missing(what: str) -> NoReturn:
    """Skip the test, which wants one of `INSTALL`."""
    pytest.skip(reason(what))


def is_there(module: str) -> bool:
    """Whether a Python module is installed."""
    return find_spec(module) is not None


def needs(module: str, what: str) -> pytest.MarkDecorator:
    """Marks tests that want a module, which comes with one of `INSTALL`."""
    return pytest.mark.skipif(not is_there(module), reason=reason(what))


def summary(reasons: Iterable[str]) -> list[str]:
    """Skipped tests, counted by what they want, most first, each with what to install; other reasons as they are."""
    counted = Counter(reasons).most_common()
    width = max((len(str(n)) for _, n in counted), default=0)
    return [
        f"{n:{width}} skipped, {why.replace(': ', '; to run them: ', 1) if why.startswith(MARK) else why}"
        for why, n in counted
    ]


def summary_of_skipped(terminalreporter: Any) -> None:
    """One line for everything that tests were skipped for."""
    reports = terminalreporter.stats.get("skipped", [])
    lines = summary(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    if lines:
        terminalreporter.section("skipped tests")
        for line in lines:
            terminalreporter.write_line(line)
