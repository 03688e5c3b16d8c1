"""`selfspec profile show` and `selfspec profile validate`."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from selfspec.cli.common import checked_profile, printable, quiet, skip_map, stdout
from selfspec.costs import CostModel
from selfspec.errors import SelfspecError
from selfspec.loading import check_model_name, read_identity
from selfspec.profile import Profile


def show(file: str) -> None:
    """Print a profile for people."""
    profile = checked_profile(file)
    console = stdout()
    console.print(skip_map(profile))
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _facts(profile):
        table.add_row(name, Text(printable(value)))
    console.print(table)


def validate(file: str, model: str | None) -> None:
    """Check a profile, and with `model` that it fits that model's configuration."""
    quiet()
    profile = checked_profile(file)
    if model is not None:
        check_model_name(model)
        if difference := profile.model.mismatch(read_identity(model)):
            raise SelfspecError(f"{file}: is of another model than {model}: {difference}")
    fits = f", fits {model}" if model else ""
    stdout().print(f"{file}: valid, {len(profile.skip_set)} sub-layers bypassed{fits}", markup=False, soft_wrap=True)


def _facts(profile: Profile) -> list[tuple[str, str]]:
    model, search = profile.model, profile.search
    sizes = {"layers": model.layers, "hidden": model.hidden, "heads": model.heads, "vocabulary": model.vocabulary}
    options = ", ".join(f"{name} {value:g}" for name, value in profile.controller.options.items())
    facts = [
        ("model", " ".join(filter(None, (model.name, f"({model.model_type})" if model.model_type else "")))),
        ("", ", ".join(f"{name} {value}" for name, value in sizes.items() if value is not None)),
        ("controller", f"{profile.controller.name}{f' ({options})' if options else ''}"),
    ]
    if profile.siblings > 1:
        facts.append(("candidates", f"{profile.siblings} for each drafted position at most"))
    if profile.draft_vocabulary is not None:
        facts.append(("drafted from", f"{len(profile.draft_vocabulary)} tokens"))
    if profile.acceptance is not None:
        a = profile.acceptance
        some = sorted({0, len(a.confidence) // 2, len(a.confidence) - 1})
        facts.append(("accepted", ", ".join(f"{a.accepted[i]:.0%} at confidence {a.confidence[i]:.2g}" for i in some)))
    if profile.calibration:
        c = profile.calibration
        of = f" of {c.drawn_from}" if c.drawn_from else ""
        facts.append(("calibration", f"{c.source}: {c.prompts}{of} prompts, {c.tokens} tokens"))
        shape = f"template {c.template!r}" if c.template else f"column {c.column}" if c.column else ""
        if said := ", ".join(filter(None, (shape, "as chat messages" if c.chat else ""))):
            facts.append(("", said))
    if search:
        kv = ", drafts with a cache of their own" if search.kv == "own" else ""
        facts.append(
            ("search", f"{search.strategy}, {search.objective}: {search.trials} trials in {search.seconds:g} s{kv}")
        )
    if profile.costs:
        facts += _costs(profile.costs)
    if profile.predicted:
        p = profile.predicted
        facts.append(("predicted", f"{p.speedup:g}x plain decoding, acceptance {p.acceptance_rate:.0%}"))
    for m in profile.measured:
        low, high = m.interval
        facts.append(
            ("measured", f"{m.speedup:g}x plain decoding ({low:g} to {high:g}), acceptance {m.acceptance_rate:.0%}")
        )
        where = "held-out prompts" if m.held_out else "the search's own prompts"
        facts.append(("", f"{m.prompts} {where} x {m.max_new_tokens} tokens, temperature {m.temperature:g}"))
        facts.append(("", f"{m.machine}, {m.device}, {m.dtype}, {m.threads} threads"))
    if not profile.measured:
        facts.append(("measured", "no"))
    if profile.note:
        facts.append(("note", profile.note))
    return facts


def _costs(costs: CostModel) -> list[tuple[str, str]]:
    base, attention, mlp = (f"{seconds * 1e3:.3f}" for seconds in (costs.base, costs.attention, costs.mlp))
    widths = [width for width in (2, 4, 8) if width <= costs.widths[-1]]
    wider = ", ".join(f"{width} {costs.verification(width) / costs.verify[0]:.2f}" for width in widths)
    return [
        ("costs", f"plain step {costs.plain * 1e3:.3g} ms over {costs.context} keys"),
        ("", f"draft step {base} ms, + {attention} for each attention, + {mlp} for each MLP"),
        ("", f"verifying more tokens than one, in times as much: {wider}"),
    ]
