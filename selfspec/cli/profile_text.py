"""Profiles formatted as lines of text, and the command `selfspec profile diff` on the differences between two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from selfspec.controllers.batch_scheduler import most_paying_sequences
from selfspec.profile.draft_spec import Below, DraftSpec, ProposerSpec
from selfspec.profile.schema import Calibration, Measurement, Prediction, Profile, Published, SearchRecord
from selfspec.types.acceptance import Confidence
from selfspec.types.controller import ControllerSpec
from selfspec.types.costs import CostModel, PassCosts
from selfspec.types.draft_path import MODES, SIGNS, WORDS, DraftPath, Mode
from selfspec.types.methods import MOST_ROWS

LABELS = {"draft.kind": "draft", "draft.vocabulary": "drafted from", "acceptance": "accepted"}
SKIP_MAP_FIELDS = ("skip", "int8", "int4")  # fields of the draft that the skip map shows


def facts(profile: Profile) -> dict[str, list[str]]:
    """Return the lines that describe each field of a profile, by the field's key in the profile's file.

    Empty fields, and fields that the skip map shows, are left out.
    """
    lines_by_key = {
        "model": _model(profile),
        **_draft(profile.draft),
        "parts": [f"{name}: {part.file}" for name, part in profile.parts.items()],
        "acceptance": _acceptance(profile),
        "published": _published(profile.published) if profile.published else [],
        "calibration": _calibration(profile.calibration) if profile.calibration else [],
        "search": _search(profile.search) if profile.search else [],
        "costs": _costs(profile.costs) if profile.costs else [],
        "predicted": _predicted(profile.predicted, profile.costs, profile.path) if profile.predicted else [],
        "measured": [line for m in profile.measured for line in _measured(m)] or [measurement_status(profile)],
        "note": [profile.note] if profile.note else [],
        "also": [other.draft.summary for other in profile.also],
    }
    return {field: lines for field, lines in lines_by_key.items() if lines}


def label(key: str) -> str:
    """Return the heading of a field's lines, given the field's key in the profile's file."""
    return LABELS.get(key, key.removeprefix("draft."))


def measurement_status(profile: Profile) -> str:
    """Return whether a profile was measured, as a few words."""
    if profile.measured:
        return "measured"
    return "published, not measured here" if profile.published else "not measured"


def source(profile: Profile) -> str:
    """Return the source of a profile's skip set, as a few words; empty if unknown."""
    if published := profile.published:
        return next(filter(None, (published.paper, published.repository, published.file)), "")
    if profile.search is None:
        return ""
    return f"search on {profile.calibration.source}" if profile.calibration else "search"


def _model(profile: Profile) -> list[str]:
    model = profile.model
    sizes = {"layers": model.layers, "hidden": model.hidden, "heads": model.heads, "vocabulary": model.vocabulary}
    return [
        " ".join(filter(None, (model.name, f"({model.model_type})" if model.model_type else ""))),
        ", ".join(f"{name} {value}" for name, value in sizes.items() if value is not None),
    ]


def _draft(draft: DraftSpec) -> dict[str, list[str]]:
    """Return the lines of the draft's fields, without the modes of sub-layers, which the skip map shows."""
    fields = [name for name in type(draft).model_fields if name not in SKIP_MAP_FIELDS]
    values = {name: getattr(draft, name) for name in fields if getattr(draft, name) is not None}
    return {f"draft.{name}": [_FORMATTERS.get(name, str)(value)] for name, value in values.items()}


def _controller(controller: ControllerSpec) -> str:
    options = ", ".join(f"{name} {value:g}" for name, value in controller.options.items())
    return f"{controller.name}{f' ({options})' if options else ''}"


def _candidates(count: int) -> str:
    return "1, no token tree" if count == 1 else f"at most {count} per position"


def _head(mode: Mode) -> str:
    return WORDS[mode]


def _confidence(confidence: Confidence) -> str:
    if confidence.plain:
        return "the draft's probability"
    if confidence.inputs == "nothing":
        return f"always {confidence.estimate(0.5, 1.0):.2g}"
    by = {"both": "probability and gap", "gap": "gap of the two best logits", "probability": "probability"}
    weights = ", ".join(f"{name} {value:g}" for name, value in confidence.model_dump().items() if value)
    return f"by {by[confidence.inputs]} ({weights})"


def _vocabulary(tokens: Sequence[int]) -> str:
    return f"{len(tokens)} tokens"


def _proposers(proposers: Sequence[ProposerSpec]) -> str:
    return ", ".join(
        proposer.kind if proposer.path is None else f"{proposer.kind} {proposer.path}" for proposer in proposers
    )


def _drafters(drafters: Sequence[DraftSpec]) -> str:
    return "; ".join(drafter.summary for drafter in drafters)


def _below(below: Below) -> str:
    return f"the trained head {below.part}, {below.step:g} of a draft step"


# Formatters of the draft's fields; other fields are formatted by `str`.
_FORMATTERS: dict[str, Callable[[Any], str]] = {
    "head": _head,
    "confidence": _confidence,
    "controller": _controller,
    "candidates": _candidates,
    "vocabulary": _vocabulary,
    "proposers": _proposers,
    "drafters": _drafters,
    "below": _below,
}


def _acceptance(profile: Profile) -> list[str]:
    if profile.acceptance is None:
        return []
    a = profile.acceptance
    indices = sorted({0, len(a.confidence) // 2, len(a.confidence) - 1})
    return [", ".join(f"{a.accepted[i]:.0%} at confidence {a.confidence[i]:.2g}" for i in indices)]


def _published(p: Published) -> list[str]:
    place = [p.repository, p.commit and f"commit {p.commit}", p.file, p.key and f"key {p.key}"]
    lines = [p.paper, ", ".join(filter(None, place)), p.calibration and f"searched on {p.calibration}"]
    return [line for line in lines if line]


def _calibration(c: Calibration) -> list[str]:
    total = f" of {c.drawn_from}" if c.drawn_from else ""
    shape = f"template {c.template!r}" if c.template else f"column {c.column}" if c.column else ""
    details = ", ".join(filter(None, (shape, "as chat messages" if c.chat else "")))
    return list(filter(None, (f"{c.source}: {c.prompts}{total} prompts, {c.tokens} tokens", details)))


def _search(search: SearchRecord) -> list[str]:
    kv = ", drafts with a separate KV cache" if search.kv == "own" else ""
    lines = [f"{search.strategy}, {search.objective}: {search.trials} trials in {search.seconds:g} s{kv}"]
    if search.extra_bytes:
        lines.append(f"quantised weights take {search.extra_bytes / 1e6:.3g} MB in addition to the model's")
    return lines


def plain_step(costs: CostModel) -> str:
    """Format the time of a plain decoding step in the fastest weight layout.

    If costs were measured in another layout, the one chosen for drafting, the time in that layout is added.
    """
    ours = f"{costs.plain * 1e3:.3g} ms"
    return ours if costs.fastest is None else f"{costs.fastest * 1e3:.3g} ms ({ours} in the weight layout for drafting)"


def _costs(costs: CostModel) -> list[str]:
    base, attention, mlp = (f"{seconds * 1e3:.3f}" for seconds in (costs.base, costs.attention, costs.mlp))
    widths = [width for width in (2, 4, 8) if width <= costs.widths[-1]]
    wider = ", ".join(f"{width} {costs.verification(width) / costs.verify[0]:.2f}" for width in widths)
    return [
        f"plain step {plain_step(costs)} over {costs.context} keys",
        f"draft step {base} ms, + {attention} for each attention, + {mlp} for each MLP",
        f"verification of several tokens, in times the cost of one: {wider}",
    ]


def _predicted(p: Prediction, costs: CostModel | None, path: DraftPath) -> list[str]:
    lines = [f"{p.speedup:g}x plain decoding, acceptance {p.acceptance_rate:.0%}"]
    if costs is not None:
        prices = PassCosts.from_cost_model(costs.along(path), p.draft_cost * costs.plain)
        most = most_paying_sequences(prices, p.acceptance_rate, most=MOST_ROWS)
        more = " or more" if most == MOST_ROWS else ""
        further = "" if more else "; for more, decode plainly or export to an engine"
        lines.append(
            f"drafting pays for up to {most}{more} sequences decoded together{further}"
            if most
            else "drafting is not expected to pay in batches"
        )
    return lines


def _measured(m: Measurement) -> list[str]:
    low, high = m.interval
    noun = "prompt" if m.prompts == 1 else "prompts"
    prompts = f"{m.prompts} held-out {noun}" if m.held_out else f"{m.prompts} {noun}, not held out,"
    threads = "1 thread" if m.threads == 1 else f"{m.threads} threads"
    return [
        f"{m.speedup:g}x plain decoding ({low:g} to {high:g}), acceptance {m.acceptance_rate:.0%}",
        f"{prompts} x {m.max_new_tokens} tokens, temperature {m.temperature:g}",
        f"{m.machine}, {m.device}, {m.dtype}, {threads}",
    ]


BY_BOTH, BY_NONE, BY_A, BY_B = ".", "#", "A", "B"
STYLES = {BY_BOTH: "red", BY_NONE: "bold green", BY_A: "bold cyan", BY_B: "bold magenta"}
PARTS = ("attention", "mlp")
MODES_OF = ("draft.skip.", "draft.int8.", "draft.int4.")  # keys that the skip maps show
Difference = tuple[str, Any, Any]  # key, and its value in A and in B; None if missing


def run_diff(a: str, b: str, *, as_json: bool) -> int:
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
