"""The command `selfspec export`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from selfspec.cli.common import checked_profile, model_for, print_json, quiet, set_threads, stage_line, stderr
from selfspec.cli.options import ExportCommand

if TYPE_CHECKING:
    from selfspec.export.exporting import Exported


def run(given: ExportCommand) -> None:
    """Validate the options before loading the model, rehearse, and write. Raises `SelfspecError`."""
    quiet()
    profile = checked_profile(given.profile)
    name = model_for(given.model, profile)
    read = given.data.read(held_out=True) if given.limit else None
    set_threads(given.where.threads)

    from selfspec.export.exporting import check, export
    from selfspec.llm.llm import load

    check(given.to, profile, given.out, type_name=given.type, force=given.force)
    console = stderr()
    stage_line(console, f"loading {name} ...")
    llm = load(name, profile="none", device=given.where.place, dtype=given.where.dtype, layout="rows")
    prompts = []
    if given.limit:
        chosen = given.data.given(llm, read, limit=given.limit, max_new_tokens=given.max_new_tokens)
        prompts = [llm.encode(prompt) for prompt in chosen.prompts]
        stage_line(console, f"rehearsing on {len(prompts)} prompts ...")
    done = export(
        llm,
        profile,
        given.to,
        given.out,
        prompts=prompts,
        new=given.max_new_tokens,
        tokens=given.tokens,
        type_name=given.type,
        force=given.force,
        name=given.profile,
    )
    if given.json:
        print_json(_told(done, given.to))
    _report(done, console)


def _told(done: Exported, engine: str) -> dict[str, object]:
    return {
        "engine": engine,
        "out": str(done.out),
        "files": list(done.files),
        "drafted": done.drafted,
        "commands": dict(done.written.commands),
        "lost": list(done.lost),
        "tokens": done.expected.tokens,
        "acceptance": done.expected.acceptance,
        "tokens_per_pass": done.expected.per_pass,
        "source": done.expected.source,
    }


def _report(done: Exported, console: Console) -> None:
    lines = [f"saved {done.out}: {done.drafted}", f"expect {done.expected.said}"]
    lines += [f"lost: {one}" for one in done.lost]
    for what, command in done.written.commands:
        lines.append(f"{what}:\n{command}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
