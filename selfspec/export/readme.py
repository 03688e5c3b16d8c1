"""The README.md that an export writes into its folder."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from selfspec.export.expected import Expected
from selfspec.export.exporter import Exporter, ExportPlan, ExportResult
from selfspec.llm.llm import LLM


def page(
    engine: Exporter,
    llm: LLM,
    profile: str,
    offer: ExportPlan,
    written: ExportResult,
    expected: Expected,
    lost: Sequence[str],
) -> str:
    """Return the README in Markdown: drafts, commands, expected acceptance, limitations, versions and tests.

    `profile`: the name of the profile. `lost`: the limitations, one line each.
    """
    language = "python" if engine.name == "hf" else "bash"
    lines = [
        f"# {llm.name} for {engine.name}",
        "",
        f"Written by `selfspec export` (selfspec {version('selfspec')}) from the profile `{profile}`: {offer.drafted}.",
        "",
        "## To run",
        "",
    ]
    for what, command in written.commands:
        lines += [f"{what[0].upper()}{what[1:]}:", "", f"```{language}", command, "```", ""]
    lines += [f"{note}\n" for note in written.notes]
    tokens = "by the profile's controller" if expected.tokens is None else expected.tokens
    drafts = "The profile's controller ends drafts." if expected.tokens is None else f"Drafts of {tokens} tokens."
    lines += ["## What to expect", "", drafts, ""]
    if expected.acceptance is None or expected.per_pass is None:
        lines += [f"The acceptance is unknown: {expected.source}.", ""]
    else:
        lines += [
            "| draft length | accepted | tokens a pass of the model |",
            "|---|---|---|",
            f"| {tokens} | {expected.acceptance:.1%} | {expected.per_pass:.2f} |",
            "",
            f"Source: {expected.source}. For greedy decoding; sampled drafts are accepted less often.",
            "",
        ]
    lines += ["## Limitations", "", *(f"- {limitation}" for limitation in lost), ""]
    lines += ["## Versions", "", f"Written against {engine.read}. {engine.tried[0].upper()}{engine.tried[1:]}.", ""]
    return "\n".join(lines)
