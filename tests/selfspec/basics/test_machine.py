from __future__ import annotations

import itertools
import sys
import threading
from contextlib import suppress
from threading import Event
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch

from selfspec.basics import machine as machines
from selfspec.basics.errors import SelfspecError
from selfspec.basics.machine import clock, clock_stopped, machine, peak_growth, process_peak, read_bandwidth
from selfspec.models.loading import _readable, check_at_hand

CPU = torch.device("cpu")


def test_the_fastest_reading_counts(monkeypatch):
    """On a clock by which reading takes a second, but once, the fifth time, half of one."""
    took = [1.0, 1.0, 1.0, 1.0, 0.5, 1.0]  # three ways, twice
    moments = itertools.accumulate(passed for seconds in took for passed in (0.0, seconds))
    monkeypatch.setattr(machines.time, "perf_counter", lambda: next(moments))
    assert read_bandwidth(4_000_000, CPU, repeats=2) == 976 * 1024 * 4 / 0.5  # whole rows of 1024
    assert next(moments, None) is None


def test_growth_is_a_gpu_s():
    with peak_growth(CPU) as grown:
        pass
    assert grown == []


def test_the_machine_has_a_name():
    assert machine(CPU)


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_what_was_held_at_most_is_in_bytes(monkeypatch, platform, unit):
    resource = pytest.importorskip("resource", reason="this system does not say how much memory a process held")
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5000))
    monkeypatch.setattr(sys, "platform", platform)
    assert process_peak() == 5000 * unit


def test_a_containers_limit_bounds_what_is_available(monkeypatch, tmp_path):
    files = [tmp_path / name for name in ("max", "current", "stat")]
    monkeypatch.setattr(machines, "CONTAINERS", ([tmp_path / "none"] * 3, files))
    for limit, left in (("5000\n", 5000 - 4000 + 300), ("1000\n", 0.0)):
        for file, text in zip(files, (limit, "4000\n", "cache 900\ninactive_file 300\nactive_file 5\n"), strict=True):
            file.write_text(text)
        assert machines.available_memory() == left
    files[0].write_text("max\n")
    assert machines.available_memory() > 5000, "what the machine has"


def test_what_was_held_is_unknown_where_the_system_does_not_say(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    assert process_peak() is None


class Session:
    """One that answers, or does not."""

    asked: list[tuple[str, float]]
    error: Exception | None = None

    def head(self, url: str, *, timeout: float) -> None:
        self.asked.append((url, timeout))
        if self.error is not None:
            raise self.error


@pytest.fixture
def session(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(machines, "_silent", {})
    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    Session.asked, Session.error = [], None
    return Session


def test_one_that_answers(session):
    assert machines.unreachable() is None
    check_at_hand("org/model")
    assert len(session.asked) == 2


def test_one_that_does_not(session):
    session.error = OSError("no route")
    with pytest.raises(
        SelfspecError, match=r"models/mistyped cannot be loaded: there is no such folder; https://\S+ can"
    ):
        check_at_hand("models/mistyped")
    assert session.asked == [(huggingface_hub.constants.ENDPOINT, machines.PATIENCE)]


def test_one_that_must_not_be(session, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SelfspecError, match="no such folder; HF_HUB_OFFLINE is set"):
        check_at_hand("models/mistyped")
    assert not session.asked


def test_what_is_here_needs_none(session, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in ("builtin", str(tmp_path)):
        check_at_hand(name)
    assert not session.asked


def test_a_copy_is_read_without_a_hub_that_does_not_answer(session, monkeypatch, tmp_path):
    """Or that must not be asked; from_pretrained would wait for it, some requests without a timeout."""
    copy = tmp_path / "models--org--model" / "snapshots" / "1"
    copy.mkdir(parents=True)
    (copy / "config.json").write_text("{}")
    (copy.parents[1] / "refs").mkdir()
    (copy.parents[1] / "refs" / "main").write_text("1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert _readable("org/model") == "org/model"
    session.error = OSError("no route")
    assert _readable("org/model") == str(copy)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert _readable("org/model") == str(copy)


def test_a_name_that_never_resolves_is_not_waited_for(session, monkeypatch):
    """And the hub is not asked again at once."""
    never = Event()
    monkeypatch.setattr(machines, "PATIENCE", 0.01)
    monkeypatch.setattr(
        Session, "head", lambda self, url, *, timeout: self.asked.append((url, timeout)) or never.wait()
    )
    for _ in range(2):
        assert str(machines.unreachable()).endswith("cannot be reached, and the cache has no copy")
    never.set()
    assert len(session.asked) == 1
    monkeypatch.setattr(machines, "MEMORY", 0.0)
    monkeypatch.setattr(machines, "PATIENCE", 60.0)
    assert machines.unreachable() is None


def test_the_clock_stands_still_in_its_own_thread(monkeypatch):
    now, others = [100.0], []
    monkeypatch.setattr(machines.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(machines, "_stopped", threading.local())
    assert clock() == 100.0
    with clock_stopped():
        now[0] += 7
        with clock_stopped():  # nested: not counted twice
            now[0] += 2
    now[0] += 1
    assert clock() == 101.0
    thread = threading.Thread(target=lambda: others.append(clock()))
    thread.start()
    thread.join()
    assert others == [110.0]
    with suppress(ValueError), clock_stopped():
        now[0] += 5
        raise ValueError
    assert clock() == 101.0
