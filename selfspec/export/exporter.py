"""The interface of exporters, one for each engine, and the types of their inputs and outputs."""

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
    """The input of an export: the target, its profile, and the output folder.

    `drafts`: the kind of drafts that the profile describes. `type_name`: the type of the target's weights in GGUF
    files, such as `q8_0`; None: the model's dtype.
    """

    llm: LLM
    profile: Profile
    drafts: Drafts
    out: Path
    type_name: str | None = None


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The result of writing an export: `commands` as pairs (description, command to run), and notes on their use."""

    commands: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The drafts that an engine can run for an export, and how to write and rehearse them.

    `drafted`: a description of the drafts. `write(folder, tokens)`: writes the engine's files, for drafts of `tokens`
    tokens. The rehearsal, a test run of the drafts, drafts with `draft()`, a model with the weights as the engine will
    store them. If `draft` is None, it drafts with the target along `path`; if `path` is None too, with the profile's
    drafter.
    `most`: the longest draft, in tokens. `limitations`: features of the profile that the engine lacks, one line each.
    `itself`: whether the engine runs selfspec, which drafts exactly as the profile says.
    """

    drafted: str
    write: Callable[[Path, int], ExportResult]
    path: DraftPath | None = None
    draft: Callable[[], Any] | None = None
    most: int = 2**16
    limitations: tuple[str, ...] = ()
    itself: bool = False


class Exporter(Protocol):
    """An exporter for one engine: a program or library other than selfspec that runs models, such as vLLM.

    `name`: the name of the engine. `read`: the sources of the engine's file formats, with versions. `tried`: how the
    exports were tested. All three are texts for the README.
    """

    name: str
    read: str
    tried: str

    def plan_export(self, job: ExportJob) -> ExportPlan:
        """Return the plan of exporting `job` to this exporter's engine: which drafts, and how to write them.

        The plan's drafts are those that the engine can run for `job.profile`. Raises `SelfspecError`, whose message
        names an alternative, if the engine cannot run this kind of drafts.
        """
        ...


def refused(engine: str, drafts: str, instead: str) -> SelfspecError:
    """Return the error for an engine that cannot run `drafts`; `instead`: an alternative that it can run."""
    return SelfspecError(f"{engine} cannot run {drafts}; it could run instead: {instead}")
