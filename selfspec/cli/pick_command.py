"""The command `selfspec profile pick`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import check_writable
from selfspec.cli.common import print_json, printable, quiet, skip_map, stderr
from selfspec.cli.file_kinds import open_study
from selfspec.profile.reading import write_profile

if TYPE_CHECKING:
    from rich.table import Table

    from selfspec.search.ledger import Entry


def run(
    study: str,
    storage: str | None,
    max_draft_cost: float | None,
    out: Path,
    *,
    extra_memory: float | None = None,
    as_json: bool,
) -> None:
    """Show a study's Pareto front; save a profile of its fastest trial within the limits of draft cost and memory."""
    quiet()
    if max_draft_cost is not None and not max_draft_cost > 0:
        raise SelfspecError(f"--max-draft-cost {max_draft_cost:g}: expected more than 0, as a share of a plain step")
    if extra_memory is not None and not extra_memory >= 0:
        raise SelfspecError(f"--extra-memory {extra_memory:g}: expected 0 or more, as a share of the model's bytes")
    check_writable(out)
    from selfspec.search.front_pick import as_profile, best_within, memory_of, pareto

    ledger = open_study(study, storage)
    best, memory_share = best_within(ledger, max_draft_cost, extra_memory), memory_of(ledger)
    front = pareto(ledger.entries, memory_share)
    profile = as_profile(ledger, best)
    write_profile(profile, out)
    if as_json:
        rows = [_row(entry, memory_share(entry)) for entry in front]
        summary = {"out": str(out), "pareto": rows, "profile": profile.model_dump(mode="json", exclude_none=True)}
        print_json(summary)
        return
    console = stderr()
    shown = [(entry, memory_share(entry)) for entry in (front if best in front else [*front, best])]
    console.print(_table(shown, best, printable(ledger.description)))
    console.print(skip_map(profile))
    command = f"selfspec bench --profile {shlex.quote(str(out))}"
    console.print(f"saved {out}, not measured; measure it with: {command}", markup=False, soft_wrap=True)


def _row(entry: Entry, memory: float | None) -> dict[str, float | int | None]:
    score = entry.score
    return {
        "draft_cost": entry.draft_cost,
        "memory": memory,
        "acceptance_rate": score.acceptance_rate,
        "tokens_per_round": score.tokens_per_round,
        "speedup": score.speedup,
        "skipped": len(score.skip),
    }


def _table(front: list[tuple[Entry, float | None]], best: Entry, place: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(f"acceptance against draft cost and memory, {place}"), caption="> saved: fastest within the limits"
    )
    for name in ("", "draft cost", "memory", "acceptance", "tokens a pass", "predicted", "skipped"):
        table.add_column(name, justify="right")
    for entry, memory in front:
        row, cost = _row(entry, memory), entry.draft_cost
        table.add_row(
            ">" if entry is best else "",
            "-" if cost is None else f"{cost:.3f}",
            "-" if memory is None else f"{memory:.0%}",
            f"{row['acceptance_rate']:.0%}",
            f"{row['tokens_per_round']:.2f}",
            f"{row['speedup']:.2f}x",
            f"{row['skipped']}",
        )
    return table
