"""Profiles formatted as lines of text, for `selfspec profile show`, `diff` and `list`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from selfspec.controllers.batch_scheduler import most_paying_sequences
from selfspec.profile.draft_spec import Below, DraftSpec, ProposerSpec
from selfspec.profile.schema import Calibration, Measurement, Prediction, Profile, Published, SearchRecord
from selfspec.types.confidence import Confidence
from selfspec.types.controller import ControllerSpec
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import WORDS, Mode
from selfspec.types.limits import MOST_ROWS
from selfspec.types.round_costs import PassCosts

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
        "predicted": _predicted(profile.predicted, profile.costs) if profile.predicted else [],
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


def _predicted(p: Prediction, costs: CostModel | None) -> list[str]:
    lines = [f"{p.speedup:g}x plain decoding, acceptance {p.acceptance_rate:.0%}"]
    if costs is not None:
        prices = PassCosts.from_cost_model(costs, p.draft_cost * costs.plain)
        most = most_paying_sequences(prices, p.acceptance_rate, most=MOST_ROWS)
        more = " or more" if most == MOST_ROWS else ""
        lines.append(
            f"drafting pays for up to {most}{more} sequences decoded together" if most else "drafting never pays"
        )
    return lines


def _measured(m: Measurement) -> list[str]:
    low, high = m.interval
    where = "held-out prompts" if m.held_out else "prompts of the search"
    return [
        f"{m.speedup:g}x plain decoding ({low:g} to {high:g}), acceptance {m.acceptance_rate:.0%}",
        f"{m.prompts} {where} x {m.max_new_tokens} tokens, temperature {m.temperature:g}",
        f"{m.machine}, {m.device}, {m.dtype}, {m.threads} threads",
    ]
