"""A hub that does not answer is asked once, and one that must not be is not asked."""

from __future__ import annotations

import huggingface_hub
import pytest

from selfspec.basics import hub
from selfspec.basics.errors import SelfspecError
from selfspec.models.loading import check_at_hand


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
