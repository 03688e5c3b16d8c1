"""The interface of an engine's exporter, with its inputs and outputs."""

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
    """An export: model, profile, kind of drafts, output folder, and the type of the target's weights in GGUF files."""

    llm: LLM
    profile: Profile
    drafts: Drafts
    out: Path
    type_name: str | None = None


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The result of an export: pairs of a description and its command, and notes on their use."""

    commands: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The part of a job that an engine can run; `drafted` describes its drafts in words.

    `write(folder, tokens)` writes the files for drafts of `tokens` tokens. The rehearsal runs `draft()`, a model with
    the weights as the engine will store them; without `draft` it drafts along `path`, without `path` with the profile's
    own drafter. `most`: the longest draft, in tokens. `limitations`: limitations of the engine. `itself`: the engine
    runs selfspec, which drafts as it does here.
    """

    drafted: str
    write: Callable[[Path, int], ExportResult]
    path: DraftPath | None = None
    draft: Callable[[], Any] | None = None
    most: int = 2**16
    limitations: tuple[str, ...] = ()
    itself: bool = False


class Exporter(Protocol):
    """An exporter for one engine.

    `name`: the engine. `read`: the sources, with versions, of its file formats. `tried`: how its exports were tested.
    """

    name: str
    read: str
    tried: str

    def plan_export(self, job: ExportJob) -> ExportPlan:
        """Return what the engine can run. Raises `SelfspecError`, with an alternative, if nothing fits."""
        ...


def refused(engine: str, drafts: str, instead: str) -> SelfspecError:
    """Return the error for an engine that lacks a kind of drafts."""
    return SelfspecError(f"{engine} has nothing for {drafts}; it could run instead: {instead}")
