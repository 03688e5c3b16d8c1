"""What tests take of a processor: those that take long without being marked `long` are listed at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

MUCH = 5.0  # seconds of a processor, of the processes that a test starts too
_KEY = "processor_seconds"
_BEGUN = pytest.StashKey[float]()


def _seconds() -> float:
    """Return the seconds that this process and those that it has waited for have taken of processors."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note when a test and its fixtures begin."""
    item.stash[_BEGUN] = _seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Let a test's last report say what it took, to the process that sums up."""
    report = yield
    if call.when == "teardown":
        report.user_properties = [*report.user_properties, (_KEY, _seconds() - item.stash[_BEGUN])]
    return report


def took(report: Any) -> float:
    """Return the seconds that a report says; 0 where it says none."""
    return next((value for name, value in report.user_properties if name == _KEY), 0.0)


def summary_of_time(terminalreporter: Any) -> None:
    """List unmarked tests that took more than `MUCH`, the longest first. Nothing fails for time."""
    reports = [
        report for each in terminalreporter.stats.values() for report in each if hasattr(report, "user_properties")
    ]
    slow = [report for report in reports if took(report) > MUCH and not {"long", "proof"} & {*report.keywords}]
    if slow:
        terminalreporter.section(f"unmarked tests that took more than {MUCH:g} s of a processor")
        for report in sorted(slow, key=took, reverse=True):
            terminalreporter.write_line(f"{took(report):6.1f} s  {report.nodeid}")
