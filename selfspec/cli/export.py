"""The command `selfspec export`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from selfspec.cli.common import checked_profile, model_for, print_json, quiet, set_threads, stage_line, stderr
from selfspec.cli.options import ExportCommand

if TYPE_CHECKING:
    from selfspec.export.exporting import Exported


def run(command: ExportCommand) -> None:
    """Validate the options before loading the model, measure acceptance on prompts, and export the profile."""
    quiet()
    profile = checked_profile(command.profile)
    name = model_for(command.model, profile)
    raw_prompts = command.data.read(held_out=True) if command.limit else None
    set_threads(command.device_options.threads)

    from selfspec.export.exporting import check, export
    from selfspec.llm.llm import load

    check(command.to, profile, command.out, type_name=command.type, force=command.force)
    console = stderr()
    stage_line(console, f"loading {name} ...")
    llm = load(
        name, profile="none", device=command.device_options.placement, dtype=command.device_options.dtype, layout="rows"
    )
    prompts = []
    if command.limit:
        encoded = command.data.encode_prompts(
            llm, raw_prompts, limit=command.limit, max_new_tokens=command.max_new_tokens
        )
        prompts = [llm.encode(prompt) for prompt in encoded.prompts]
        stage_line(console, f"measuring acceptance on {len(prompts)} prompts ...")
    done = export(
        llm,
        profile,
        command.to,
        command.out,
        prompts=prompts,
        new=command.max_new_tokens,
        tokens=command.tokens,
        type_name=command.type,
        force=command.force,
        name=command.profile,
    )
    if command.json:
        print_json(_as_json(done, command.to))
    _report(done, console)


def _as_json(done: Exported, engine: str) -> dict[str, object]:
    return {
        "engine": engine,
        "out": str(done.out),
        "files": list(done.files),
        "drafted": done.drafted,
        "commands": dict(done.written.commands),
        "lost": list(done.limitations),
        "tokens": done.expected.tokens,
        "acceptance": done.expected.acceptance,
        "tokens_per_pass": done.expected.per_pass,
        "source": done.expected.source,
    }


def _report(done: Exported, console: Console) -> None:
    lines = [f"saved {done.out}: {done.drafted}", f"expected: {done.expected.summary}"]
    lines += [f"limitation: {limitation}" for limitation in done.limitations]
    for what, command in done.written.commands:
        lines.append(f"{what}:\n{command}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
