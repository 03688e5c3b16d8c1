"""`selfspec profile diff`: what two profiles say differently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from selfspec.basics.errors import short
from selfspec.cli.common import LayerMap, checked_profile, print_json, printable, skip_map, stdout
from selfspec.cli.facts import facts, label
from selfspec.profile.schema import Profile

BY_BOTH, BY_NONE, BY_A, BY_B = ".", "#", "A", "B"
STYLES = {BY_BOTH: "red", BY_NONE: "bold green", BY_A: "bold cyan", BY_B: "bold magenta"}
Difference = tuple[str, Any, Any]  # where, and what stands there in either; None: nothing


def run(a: str, b: str, *, as_json: bool) -> int:
    """Say what differs between two profiles, by file or name: 0 when nothing does, 1 otherwise."""
    one, other = checked_profile(a), checked_profile(b)
    found = list(_differences(one.model_dump(mode="json"), other.model_dump(mode="json")))
    if as_json:
        print_json(_as_json({"a": a, "b": b}, one, other, found))
    elif found:
        _print(stdout(), {"A": a, "B": b}, one, other, found)
    else:
        stdout().print(f"{a} and {b}: no difference", markup=False, soft_wrap=True)
    return 1 if found else 0


def _differences(a: Any, b: Any, where: str = "") -> Iterator[Difference]:
    """Every value that differs; a record or a list of which only one has any is one value."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            yield from _differences(a.get(key), b.get(key), f"{where}.{key}" if where else key)
    elif _records(a) and _records(b):
        yield from _differences(dict(enumerate(a)), dict(enumerate(b)), where)
    elif a != b:
        yield where, a, b


def _records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _as_json(names: dict[str, str], a: Profile, b: Profile, found: list[Difference]) -> dict[str, Any]:
    return {
        "equal": not found,
        **names,
        "skipped_by_a_alone": _alone(a, b),
        "skipped_by_b_alone": _alone(b, a),
        "differences": [{"key": where, "a": x, "b": y} for where, x, y in found],
    }


def _alone(a: Profile, b: Profile) -> dict[str, list[int]]:
    """The layers of each part that `a` skips and `b` does not."""
    mine, theirs = a.skip_set, b.skip_set
    return {
        "attention": sorted(set(mine.attention) - set(theirs.attention)),
        "mlp": sorted(set(mine.mlp) - set(theirs.mlp)),
    }


def _print(console: Console, names: dict[str, str], a: Profile, b: Profile, found: list[Difference]) -> None:
    for side, name in names.items():
        console.print(f"{side}: {printable(name)}", markup=False)
    if a.model.layers != b.model.layers:
        console.print(skip_map(a), skip_map(b), sep="\n")
    elif a.skip_set != b.skip_set:
        rows = {part: _marks(a, b, part) for part in ("attention", "mlp")}
        console.print(LayerMap(rows, STYLES))
        by_a, by_b, by_both = ("".join(rows.values()).count(mark) for mark in (BY_A, BY_B, BY_BOTH))
        legend = f"bypassed: {by_a} by A alone, {by_b} by B alone, {by_both} by both (.); # runs in both"
        console.print(Text(legend, style="dim"))
    rest = [difference for difference in found if not f"{difference[0]}.".startswith("draft.skip.")]
    if rest:
        console.print(_table(a, b, rest))


def _marks(a: Profile, b: Profile, part: str) -> str:
    marks = {(True, True): BY_BOTH, (False, False): BY_NONE, (True, False): BY_A, (False, True): BY_B}
    mine, theirs = set(getattr(a.skip_set, part)), set(getattr(b.skip_set, part))
    return "".join(marks[i in mine, i in theirs] for i in range(a.model.layers))


def _table(a: Profile, b: Profile, found: list[Difference]) -> Table:
    """Each field that differs, as `show` puts it; what it would not show, by its key in the file."""
    table = Table("", "A", "B", box=None, padding=(0, 2, 0, 0), header_style="bold")
    one, other = facts(a), facts(b)
    told = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    for key in told:
        table.add_row(printable(label(key)), _lines(one.get(key, [])), _lines(other.get(key, [])))
    for where, x, y in found:
        if not any(f"{where}.".startswith(f"{key}.") for key in told):
            table.add_row(printable(where), _value(x), _value(y))
    return table


def _lines(lines: list[str]) -> Text:
    return Text("\n".join(map(printable, lines)) or "-", overflow="fold")


def _value(value: Any) -> Text:
    return Text("-" if value is None else printable(short(value)), overflow="fold")
