"""Helpers of all commands: consoles, profiles, progress bars, skip maps, threads, and warnings on one line each."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from selfspec import builtin
from selfspec.basics.errors import SelfspecError
from selfspec.cli.options import DraftingOptions
from selfspec.controllers import make_controller, parse_controller
from selfspec.models.loading import check_at_hand
from selfspec.profile.draft_spec import LayerSkipSpec, Skip
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import find_profile_file
from selfspec.proposers.store import Store
from selfspec.show.markup import by_source
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import MODES, SIGNS, WORDS
from selfspec.types.identity import Identity
from selfspec.types.stats import Finish, Stats

SIGN_STYLES = {"#": "bold green", "8": "bold cyan", "4": "bold yellow", ".": "red"}  # styles of a skip map's signs
SEARCH_HINT = "no profile known to be faster: decoding plainly. Search one with: selfspec search --model {model}"


def stderr() -> Console:
    """Return a console on standard error."""
    return Console(stderr=True, highlight=False)


def stdout() -> Console:
    """Return a console on standard output."""
    return Console(highlight=False)


def checked_profile(name: str) -> Profile:
    """Return a profile by file or name, with its controller checked. Raises `SelfspecError` that names the file."""
    profile = find_profile_file(name)
    try:
        make_controller(profile.layer_skip.controller)
    except SelfspecError as error:
        raise SelfspecError(f"{name}: {error}") from None
    return profile


def resolve_drafting(options: DraftingOptions) -> tuple[str, Profile | None, ControllerSpec | None]:
    """Return model name, profile (None: `auto`) and controller of a command that drafts, each checked.

    Raises `SelfspecError`.
    """
    profile = None if options.profile == "auto" else checked_profile(options.profile)
    name = model_for(options.model, profile)
    if options.store is not None:
        Store(options.store)
    return name, profile, None if options.controller is None else parse_controller(options.controller)


def model_for(model: str | None, profile: Profile | None) -> str:
    """Return the named model, else the profile's, else the built-in one. Raises `SelfspecError` if unavailable."""
    named = profile.model.name if profile is not None else None
    name = model if model is not None else named or builtin.NAME
    check_at_hand(name)
    return name


@dataclass(frozen=True, slots=True)
class Drafting:
    """A profile to draft with, and a description of its source."""

    profile: Profile
    source: str


def select_drafting(
    identity: Identity,
    profile: Profile | None,
    name: str,
    controller: ControllerSpec | None = None,
    store: Path | None = None,
) -> Drafting:
    """Return the profile to draft with: the given one, else one shipped for this model, else every second layer.

    `controller` replaces the profile's; `store` adds a retrieval store. Raises `SelfspecError` for a profile of another
    model, and for a profile that drafts nothing.
    """
    from selfspec.profile.choosing import check_profile, shipped_for

    if profile is not None:
        check_profile(profile, identity)
    else:
        name, profile = next(iter(shipped_for(identity).items()), ("", None))
    if profile is None:
        half = list(range(1, identity.layers, 2))
        profile = Profile(model=identity, draft=LayerSkipSpec(skip=Skip(attention=half, mlp=half)))
        source = "every second layer, as there is no profile"
    elif not profile.drafts:
        raise SelfspecError(f"profile {name} drafts nothing; expected another")
    else:
        source = f"profile {name}, {profile.draft.summary}"
    if controller is not None:
        profile = profile.with_controller(controller)
    if store is not None:
        profile, source = profile.with_proposers(store=store), f"{source}, and what {store} holds"
    return Drafting(profile, source)


def progress(console: Console, *columns: ProgressColumn) -> Progress:
    """Return a progress bar: description, bar, counts, `columns`, time left; disabled unless on a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        _Counts(),
        *columns,
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def stage_line(console: Console, line: str) -> None:
    """Print a line if the console is not a terminal, where progress bars are disabled."""
    if not console.is_terminal:
        console.print(line, soft_wrap=True, markup=False)


class _Counts(MofNCompleteColumn):
    """Column of completed and total steps; empty if the total is unknown."""

    def render(self, task: Task) -> Text:
        return Text("") if task.total is None else super().render(task)


def printable(text: str) -> str:
    """Replace every character that a terminal would act on or cannot show."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


_FINISH: dict[Finish | None, str] = {
    None: "",
    "end": "; the model ended the text",
    "stop": "; ended at a stop string",
    "guide": "; ended as the guide has it",
    "length": "; cut at the token limit",
    "time": "; cut as time was up",
}


def stats_line(stats: Stats) -> str:
    """Format time, rounds and acceptance of one or several generations as one line."""
    return (
        f"{stats.tokens} tokens in {stats.seconds:.2f} s ({stats.tokens_per_second:.1f} a second), "
        f"{stats.rounds} rounds, {stats.drafted} drafted, {stats.accepted} accepted ({stats.acceptance_rate:.0%}"
        f"{by_source(stats)}), "
        f"{stats.tokens_per_round:.2f} tokens a round{_FINISH[stats.finish]}"
    )


def speed_line(stats: Stats) -> str:
    """Format the speed of a generation briefly."""
    a_pass = f", {stats.tokens_per_round:.1f} a pass" if stats.drafted else ""
    return f"{stats.tokens_per_second:.1f} tokens/s, {stats.tokens} tokens{a_pass}"


def print_json(data: dict[str, Any]) -> None:
    """Print one JSON object on standard output."""
    sys.stdout.write(json.dumps(data, ensure_ascii=False) + "\n")


def quiet() -> None:
    """Silence the libraries' log messages; print each warning as one line on standard error."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch: huge pages make reading weights faster
    console = stderr()

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        if issubclass(category, UserWarning) and not issubclass(category, (DeprecationWarning, FutureWarning)):
            console.print(f"warning: {message}", markup=False, soft_wrap=True)

    warnings.showwarning = show


def set_threads(threads: int | None) -> None:
    """Set PyTorch's number of CPU threads; None keeps its default."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Rows with one mark per layer, under a ruler, split into blocks that fit the console's width."""

    rows: Mapping[str, str]  # marks by the row's name; all of the same length
    styles: Mapping[str, str]  # by mark

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        layers = max(map(len, self.rows.values()))
        layers_per_block = max((options.max_width - self._name_width - 1) // 10 * 10, 10)
        for first in range(0, layers, layers_per_block):
            if first:
                yield Text("")
            yield from self._block(first, min(first + layers_per_block, layers), tens=layers > 10)

    @property
    def _name_width(self) -> int:
        return max(10, *map(len, self.rows))

    def _block(self, first: int, last: int, *, tens: bool) -> RenderResult:
        name_width = self._name_width
        lines = (
            [Text(f"{'':{name_width}} " + "".join(_tens_digit(i) for i in range(first, last)), style="dim")]
            if tens
            else []
        )
        lines.append(Text(f"{'layer':{name_width}} " + "".join(str(i % 10) for i in range(first, last)), style="dim"))
        for name, row in self.rows.items():
            line = Text(f"{name:{name_width}} ")
            for mark in row[first:last]:
                line.append(mark, style=self.styles.get(mark, ""))
            lines.append(line)
        for line in lines:
            line.no_wrap = True
            line.overflow = "fold"
        yield from lines


def skip_map(profile: Profile) -> Group:
    """Return the skip map, a ruler of layers above rows of attention and MLP with a sign per mode, and its legend."""
    attention, mlp = profile.path.rows(profile.model.layers)
    marks = LayerMap({"attention": attention, "mlp": mlp}, SIGN_STYLES)
    return Group(marks, Text("\n".join(map_legend(profile)), style="dim"))


def map_legend(profile: Profile) -> list[str]:
    """Return the lines on sub-layers per mode with its sign, the head's mode, and the bits that a draft step reads."""
    path, layers = profile.path, profile.model.layers
    counts = Counter(path.modes(layers))
    if path.low_precision:
        parts = (f"{counts[mode]} {WORDS[mode]} ({SIGNS[mode]})" for mode in MODES if counts[mode])
        lines = [f"{2 * layers} sub-layers: {', '.join(parts)}"]
    else:
        lines = [f"{counts['skip']} of {2 * layers} sub-layers skipped (# runs, . skipped)"]
    more = [] if path.head == "full" else [f"the head {WORDS[path.head]}"]
    if path.cheaper and (read := profile.bits_read) is not None:
        more.append(read.summary)
    return [*lines, "; ".join(more)] if more else lines


def _tens_digit(layer: int) -> str:
    return str(layer // 10 % 10) if layer % 10 == 0 and layer else " "
