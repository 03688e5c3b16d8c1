"""What every engine's exporter is, and what it is told and tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from selfspec.basics.errors import SelfspecError
from selfspec.export.draft_export import Drafts
from selfspec.llm.llm import LLM
from selfspec.profile.schema import Profile
from selfspec.types.draft_path import DraftPath


@dataclass(frozen=True, slots=True)
class ExportJob:
    """What is to be exported: the profile, what it drafts with, the model, and the type of the target's weights."""

    llm: LLM
    profile: Profile
    drafts: Drafts
    out: Path
    type_name: str | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: commands by what they do, and notes on how to use it."""

    commands: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """What an engine can run of a job, `drafted` in words.

    Rehearsed is `draft()`, a model with weights as the engine will hold them; without one, drafting along the `path`;
    without that, the profile's own drafter. `itself`: selfspec runs there, and drafts as it does here. `most`: tokens
    that it drafts in a row. `write(folder, tokens)` writes the files for drafts of so many. `lost`: what is not as it
    was.
    """

    drafted: str
    write: Callable[[Path, int], Written]
    path: DraftPath | None = None
    draft: Callable[[], Any] | None = None
    most: int = 2**16
    lost: tuple[str, ...] = ()
    itself: bool = False


class Exporter(Protocol):
    """An engine: its `name`, and what was `read` to write its files, with versions."""

    name: str
    read: str
    tried: str

    def offer(self, job: ExportJob) -> Offer:
        """What it can run. Raises `SelfspecError` where it has nothing of the kind, with what it could run instead."""
        ...


def refused(engine: str, drafts: str, instead: str) -> SelfspecError:
    """That an engine has nothing of the kind."""
    return SelfspecError(f"{engine} has nothing for {drafts}; it could run instead: {instead}")
