"""The command `selfspec profile diff`: differences between two profiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from selfspec.basics.errors import short
from selfspec.cli.common import (
    SIGN_STYLES,
    LayerMap,
    checked_profile,
    print_json,
    printable,
    skip_map,
    stdout,
)
from selfspec.cli.profile_text import facts, label
from selfspec.profile.schema import Profile
from selfspec.types.draft_path import MODES, SIGNS, WORDS, Mode

BY_BOTH, BY_NONE, BY_A, BY_B = ".", "#", "A", "B"
STYLES = {BY_BOTH: "red", BY_NONE: "bold green", BY_A: "bold cyan", BY_B: "bold magenta"}
PARTS = ("attention", "mlp")
MODES_OF = ("draft.skip.", "draft.int8.", "draft.int4.")  # keys that the skip maps show
Difference = tuple[str, Any, Any]  # key, and its value in A and in B; None if missing


def run(a: str, b: str, *, as_json: bool) -> int:
    """Print the differences between two profiles, by file or name; return 0 if there are none, 1 otherwise."""
    profile_a, profile_b = checked_profile(a), checked_profile(b)
    differences = list(_differences(profile_a.model_dump(mode="json"), profile_b.model_dump(mode="json")))
    if as_json:
        print_json(_as_json({"a": a, "b": b}, profile_a, profile_b, differences))
    elif differences:
        _print(stdout(), {"A": a, "B": b}, profile_a, profile_b, differences)
    else:
        stdout().print(f"{a} and {b}: no difference", markup=False, soft_wrap=True)
    return 1 if differences else 0


def _differences(a: Any, b: Any, where: str = "") -> Iterator[Difference]:
    """Yield every value that differs, with its key `where`; a dict or list that only one side has is one value."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            yield from _differences(a.get(key), b.get(key), f"{where}.{key}" if where else key)
    elif _records(a) and _records(b):
        yield from _differences(dict(enumerate(a)), dict(enumerate(b)), where)
    elif a != b:
        yield where, a, b


def _records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _as_json(names: dict[str, str], a: Profile, b: Profile, differences: list[Difference]) -> dict[str, Any]:
    return {
        "equal": not differences,
        **names,
        "skipped_by_a_alone": _only_in_first(a, b),
        "skipped_by_b_alone": _only_in_first(b, a),
        "modes": [asdict(change) for change in _changes(a, b)],
        "differences": [{"key": where, "a": x, "b": y} for where, x, y in differences],
    }


def _only_in_first(a: Profile, b: Profile) -> dict[str, list[int]]:
    """Return, for attention and for MLP, the layers that `a` skips and `b` does not."""
    mine, theirs = a.skip_set, b.skip_set
    return {
        "attention": sorted(set(mine.attention) - set(theirs.attention)),
        "mlp": sorted(set(mine.mlp) - set(theirs.mlp)),
    }


@dataclass(frozen=True, slots=True)
class _Change:
    """Layers whose sub-layer `part` (attention or MLP) has mode `a` in profile A and mode `b` in profile B."""

    part: str
    layers: tuple[int, ...]
    a: Mode
    b: Mode

    def __str__(self) -> str:
        return f"{self.part} {', '.join(map(str, self.layers))}: {self.a} -> {self.b}"


def _changes(a: Profile, b: Profile) -> list[_Change]:
    """Return the sub-layers whose modes differ, grouped by change; layers that only one model has are left out."""
    layers_by_change: dict[tuple[str, Mode, Mode], list[int]] = {}
    for first, part in enumerate(PARTS):
        mine, theirs = (p.path.modes(p.model.layers)[first * p.model.layers :] for p in (a, b))
        for layer in range(min(a.model.layers, b.model.layers)):
            if mine[layer] != theirs[layer]:
                layers_by_change.setdefault((part, mine[layer], theirs[layer]), []).append(layer)
    return [_Change(part, tuple(layers), x, y) for (part, x, y), layers in layers_by_change.items()]


def _print(console: Console, names: dict[str, str], a: Profile, b: Profile, differences: list[Difference]) -> None:
    for side, name in names.items():
        console.print(f"{side}: {printable(name)}", markup=False)
    changes = _changes(a, b)
    if drawn := bool(changes) or a.model.layers != b.model.layers:
        _draw(console, a, b, changes)
    rest = [difference for difference in differences if not (drawn and f"{difference[0]}.".startswith(MODES_OF))]
    if rest or _reads(a) != _reads(b):
        console.print(_table(a, b, rest))


def _draw(console: Console, a: Profile, b: Profile, changes: list[_Change]) -> None:
    """Print the skip maps of two profiles.

    Models of different numbers of layers get a map each. If no sub-layer is quantised, the maps are joined into one;
    else each row of A stands above the row of B, with the changes in words below.
    """
    if a.model.layers != b.model.layers:
        console.print(skip_map(a), skip_map(b), sep="\n")
    elif not (a.path.quantized_sets or b.path.quantized_sets):
        rows = {part: _marks(a, b, part) for part in PARTS}
        console.print(LayerMap(rows, STYLES))
        by_a, by_b, by_both = ("".join(rows.values()).count(mark) for mark in (BY_A, BY_B, BY_BOTH))
        legend = f"skipped: {by_a} by A alone, {by_b} by B alone, {by_both} by both (.); # runs in both"
        console.print(Text(legend, style="dim"))
    else:
        sides = {"A": a.path.rows(a.model.layers), "B": b.path.rows(b.model.layers)}
        each = {f"{side} {part}": rows[i] for i, part in enumerate(PARTS) for side, rows in sides.items()}
        console.print(LayerMap(each, SIGN_STYLES))
        used = set("".join(each.values()))
        lines = [", ".join(f"{SIGNS[mode]} {WORDS[mode]}" for mode in MODES if SIGNS[mode] in used)]
        lines += [f"A: {a.path.summary}", f"B: {b.path.summary}"]
        console.print(Text("\n".join(lines), style="dim"))
        for change in changes:
            console.print(str(change), highlight=False)


def _marks(a: Profile, b: Profile, part: str) -> str:
    marks = {(True, True): BY_BOTH, (False, False): BY_NONE, (True, False): BY_A, (False, True): BY_B}
    mine, theirs = set(getattr(a.skip_set, part)), set(getattr(b.skip_set, part))
    return "".join(marks[i in mine, i in theirs] for i in range(a.model.layers))


def _table(a: Profile, b: Profile, differences: list[Difference]) -> Table:
    """Return a table of the fields that differ: fields of `facts` with their lines, other fields by their key."""
    table = Table("", "A", "B", box=None, padding=(0, 2, 0, 0), header_style="bold")
    if _reads(a) != _reads(b):
        table.add_row("a draft step reads", _lines(_reads(a)), _lines(_reads(b)))
    facts_a, facts_b = facts(a), facts(b)
    differing_keys = [key for key in {**facts_a, **facts_b} if facts_a.get(key) != facts_b.get(key)]
    for key in differing_keys:
        table.add_row(printable(label(key)), _lines(facts_a.get(key, [])), _lines(facts_b.get(key, [])))
    for where, x, y in differences:
        if not any(f"{where}.".startswith(f"{key}.") for key in differing_keys):
            table.add_row(printable(where), _value(x), _value(y))
    return table


def _reads(profile: Profile) -> list[str]:
    read = profile.bits_read
    return [] if read is None else [f"{read.draft:.3g} of {read.plain:.3g} bits per weight"]


def _lines(lines: list[str]) -> Text:
    return Text("\n".join(map(printable, lines)) or "-", overflow="fold")


def _value(value: Any) -> Text:
    return Text("-" if value is None else printable(short(value)), overflow="fold")
