"""A hub that does not answer is asked once, and one that must not be is not asked."""

from __future__ import annotations

from threading import Event

import huggingface_hub
import pytest

from selfspec.basics import hub
from selfspec.basics.errors import SelfspecError
from selfspec.models.loading import _readable, check_at_hand


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
    monkeypatch.setattr(hub, "_silent", {})
    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    Session.asked, Session.error = [], None
    return Session


def test_one_that_answers(session):
    assert hub.unreachable() is None
    check_at_hand("org/model")
    assert len(session.asked) == 2


def test_one_that_does_not(session):
    session.error = OSError("no route")
    with pytest.raises(
        SelfspecError, match=r"models/mistyped cannot be loaded: there is no such folder; https://\S+ can"
    ):
        check_at_hand("models/mistyped")
    assert session.asked == [(huggingface_hub.constants.ENDPOINT, hub.PATIENCE)]


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
    monkeypatch.setattr(hub, "PATIENCE", 0.01)
    monkeypatch.setattr(
        Session, "head", lambda self, url, *, timeout: self.asked.append((url, timeout)) or never.wait()
    )
    for _ in range(2):
        assert str(hub.unreachable()).endswith("cannot be reached, and the cache has no copy")
    never.set()
    assert len(session.asked) == 1
    monkeypatch.setattr(hub, "MEMORY", 0.0)
    monkeypatch.setattr(hub, "PATIENCE", 60.0)
    assert hub.unreachable() is None
