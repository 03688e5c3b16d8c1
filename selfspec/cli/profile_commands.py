"""The commands `selfspec profile list`, `show`, `validate`, `join`, `import`, `schema` and `pick`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from selfspec.basics.errors import SelfspecError, short
from selfspec.basics.files import check_not_read, check_writable, files_in
from selfspec.cli.common import checked_profile, print_json, printable, quiet, skip_map, stderr, stdout
from selfspec.cli.plot import open_study
from selfspec.cli.profile_text import facts, label, measurement_status, source
from selfspec.models.loading import check_model_name, read_identity, stored_config
from selfspec.profile.published_skip_sets import check_format, published_profile, read_published
from selfspec.profile.reading import placed, profile_schema, profile_text, write_profile
from selfspec.profile.schema import Profile, Published
from selfspec.profile.shipped import shipped_profiles
from selfspec.types.identity import Identity

if TYPE_CHECKING:
    from selfspec.search.ledger import Entry


def show(file: str) -> None:
    """Print a profile as a skip map and a table of its fields."""
    profile = checked_profile(file)
    console = stdout()
    if profile.path.cheaper:
        console.print(skip_map(profile))
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, lines in facts(profile).items():
        for head, line in zip((label(key), *[""] * len(lines)), lines, strict=False):
            table.add_row(printable(head), Text(printable(line)))
    console.print(table)


def validate(file: str, model: str | None) -> None:
    """Check that a profile is valid and, with `model`, that it fits that model. Raises `SelfspecError`."""
    quiet()
    profile = checked_profile(file)
    if model is not None:
        check_model_name(model)
        if difference := profile.model.mismatch(read_identity(model)):
            raise SelfspecError(f"{file}: is of another model than {model}: {difference}")
    fits = f", fits {model}" if model else ""
    only = f", {measurement_status(profile)}" if profile.published and not profile.measured else ""
    stdout().print(f"{file}: valid, {profile.draft.summary}{fits}{only}", markup=False, soft_wrap=True)


def list_profiles(folder: Path | None, *, as_json: bool) -> None:
    """Print the shipped profiles, or the profiles in `folder`; invalid files are named on standard error."""
    profiles = shipped_profiles() if folder is None else _profiles_in(folder)
    if as_json:
        print_json({"profiles": [_summary(name, profile) for name, profile in profiles.items()]})
    else:
        stdout().print(_table(profiles))


def join(files: Sequence[str], out: Path) -> None:
    """Join several profiles of one model into one profile and write that. Raises `SelfspecError`."""
    quiet()
    if len(files) < 2:
        raise SelfspecError(f"{files[0]}: one profile; expected two or more to join")
    check_writable(out)
    check_not_read(out, *files)
    first, *others = (checked_profile(file) for file in files)
    for file, profile in zip(files, (first, *others), strict=True):
        if difference := first.model.mismatch(profile.model):
            raise SelfspecError(f"{file}: is of another model than {files[0]}: {difference}")
        if profile.parts:
            raise SelfspecError(f"{file}: has trained modules in other files; expected a profile without modules")
    first, *others = (placed(profile, out.parent) for profile in (first, *others))
    write_profile(first.with_alternatives(others), out)
    summaries = "; ".join(profile.draft.summary for profile in (first, *others))
    stderr().print(f"saved {out}: {len(files)} ways to draft ({summaries})", markup=False, soft_wrap=True)


def schema() -> None:
    """Print the JSON schema of a profile."""
    sys.stdout.write(json.dumps(profile_schema(), indent=2) + "\n")


def import_profile(
    file: Path, *, format_name: str, model: str, key: str | None, layers: int | None, out: Path | None
) -> None:
    """Write a profile of a published skip set to standard output or `out`. Raises `SelfspecError`."""
    quiet()
    check_format(format_name)
    check_model_name(model)
    if out is not None:
        check_writable(out)
        check_not_read(out, file, model)
    key, skip = read_published(file, key, format_name=format_name)
    identity = _identity(model, layers)
    try:
        profile = published_profile(skip, identity, Published(file=file.name, key=key))
    except SelfspecError as error:
        raise SelfspecError(f"{file}: {short(key)}: {error}") from None
    if out is None:
        sys.stdout.write(profile_text(profile))
        return
    write_profile(profile, out)
    saved = f"saved {out}: {len(skip)} of {2 * identity.layers} sub-layers skipped, {measurement_status(profile)}"
    stderr().print(saved, markup=False, soft_wrap=True)


def _identity(model: str, layers: int | None) -> Identity:
    """Return a model's identity: from its configuration if that is on this machine, else from name and `layers`."""
    folder = stored_config(model)
    if folder is None:
        if layers is None:
            raise SelfspecError(f"model {model} is not on this machine; expected --layers, its number of layers")
        return Identity(layers=layers, name=model)
    identity = read_identity(folder).model_copy(update={"name": model})
    if layers not in (None, identity.layers):
        raise SelfspecError(f"--layers {layers}: model {model} has {identity.layers} layers; leave the option out")
    return identity


def _profiles_in(folder: Path) -> dict[str, Profile]:
    profiles, wrong = {}, []
    for file in files_in(folder):
        if file.suffix in (".yaml", ".yml"):
            try:
                profiles[file.name] = checked_profile(str(file))
            except SelfspecError as error:
                wrong.append(printable(str(error)))
    if not profiles:
        raise SelfspecError(f"{folder} holds no profile: {wrong[0] if wrong else 'no .yaml files'}")
    for why in wrong:
        stderr().print(f"invalid profile: {why}", markup=False, soft_wrap=True)
    return profiles


def _table(profiles: Mapping[str, Profile]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("name\n model", overflow="fold")
    table.add_column("layers", justify="right")
    table.add_column("skipped", justify="right")
    table.add_column("measured speedup\nsource", overflow="fold")
    for name, profile in profiles.items():
        measured = [f"{m.speedup:g}x, temperature {m.temperature:g}" for m in profile.measured] or [
            measurement_status(profile)
        ]
        table.add_row(
            Text(printable(name) + "\n " + printable(profile.model.name or "any of this size")),
            str(profile.model.layers),
            _skipped(profile),
            Text("\n".join(map(printable, filter(None, [*measured, source(profile)])))),
        )
    table.caption = "skipped: attention + MLP sub-layers"
    if any(profile.path.low_precision for profile in profiles.values()):
        table.caption += "; below it, how many run quantised"
    table.caption_justify = "left"
    return table


def _skipped(profile: Profile) -> str:
    """Format the numbers of skipped attention and MLP sub-layers, then of quantised ones, then the head's mode."""
    path = profile.path
    if profile.drafts and not path.cheaper:
        return profile.draft.kind
    lines = [f"{len(path.skip.attention)} + {len(path.skip.mlp)}"]
    lines += [f"{len(sublayers)} {mode}" for mode, sublayers in path.quantized_sets]
    return "\n".join(lines if path.head == "full" else [*lines, f"head {path.head}"])


def _summary(name: str, profile: Profile) -> dict[str, Any]:
    skip, model, read = profile.skip_set, profile.model, profile.bits_read
    modes = profile.path.modes(model.layers)
    return {
        "name": name,
        "model": model.name,
        "layers": model.layers,
        "draft": profile.draft.kind,
        "skipped": {"attention": len(skip.attention), "mlp": len(skip.mlp)},
        "modes": {"attention": modes[: model.layers], "mlp": modes[model.layers :], "head": profile.path.head},
        "bits_per_weight": None if read is None else read.draft,
        "standing": measurement_status(profile),
        "measured": [
            {"temperature": m.temperature, "speedup": m.speedup, "interval": m.interval} for m in profile.measured
        ],
        "source": source(profile),
        "published": None if profile.published is None else profile.published.model_dump(exclude_none=True),
    }


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
    check_not_read(out, study, storage)
    from selfspec.search.trial_tables import as_profile, best_within, memory_of, pareto

    ledger = open_study(study, storage)
    best, memory_share = best_within(ledger, max_draft_cost, extra_memory), memory_of(ledger)
    front = pareto(ledger.entries, memory_share)
    profile = write_profile(as_profile(ledger, best), out)
    if as_json:
        rows = [_row(entry, memory_share(entry)) for entry in front]
        summary = {"out": str(out), "pareto": rows, "profile": profile.model_dump(mode="json", exclude_none=True)}
        print_json(summary)
        return
    console = stderr()
    shown = [(entry, memory_share(entry)) for entry in (front if best in front else [*front, best])]
    console.print(_front_table(shown, best, printable(ledger.description)))
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


def _front_table(front: list[tuple[Entry, float | None]], best: Entry, place: str) -> Table:
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
