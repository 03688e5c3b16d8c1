"""The command `selfspec audit`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from selfspec.cli.common import (
    chosen,
    drafted_with,
    print_json,
    printable,
    progress,
    quiet,
    set_threads,
    stderr,
    stdout,
)
from selfspec.cli.options import AuditCommand

if TYPE_CHECKING:
    from selfspec.llm.llm import LLM
    from selfspec.measure.audit import Audit, Difference


def run(options: AuditCommand) -> int:
    """Validate the options before loading the model, then audit; return 1 if a bug was found."""
    quiet()
    model, profile, spec = chosen(options.drafting)
    read = options.data.read(held_out=True)
    set_threads(options.where.threads)

    from selfspec.basics.machine import machine
    from selfspec.llm.llm import load
    from selfspec.llm.options import Options
    from selfspec.llm.prompt_encoding import check_chat
    from selfspec.measure.audit import audit

    Options(temperature=options.temperature).check()
    if options.data.chat:
        check_chat(model)
    llm = load(model, profile="none", device=options.where.place, dtype=options.where.dtype, drafting=True)
    drafting = drafted_with(llm.identity, profile, options.drafting.profile, spec, options.drafting.store)
    drafter = llm.drafts_with(drafting.profile)
    given = options.data.given(llm, read, limit=options.limit, max_new_tokens=options.max_new_tokens)
    with progress(stderr()) as bar:
        task = bar.add_task("auditing", total=len(given.prompts))
        found = audit(
            llm,
            drafter,
            given.prompts,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            seed=options.seed,
            on_prompt=lambda so_far: bar.update(task, completed=so_far.prompts),
        )
    where = {
        "model": llm.name,
        "machine": machine(llm.runtime.device),
        "device": llm.runtime.device.type,
        "dtype": str(llm.runtime.dtype).removeprefix("torch."),
        "skip": drafting.source,
        "prompt_source": given.source,
    }
    if options.json:
        print_json({**where, "chat": given.chat, "temperature": options.temperature, **found.as_dict()})
    else:
        _report(llm, found, where, given.said)
    return 1 if found.bugs else 0


def _report(llm: LLM, found: Audit, where: dict[str, str], prompts: str) -> None:
    console = stdout()
    for prompt, difference in found.differences:
        line = f"prompt {prompt + 1}, {_words(llm, difference)}"
        console.print(line, markup=False, soft_wrap=True, style=None if difference.near_tie else "bold red")
    s = found.stats
    console.print(f"{where['model']}, {where['machine']}, {where['dtype']}; drafts: {where['skip']}", soft_wrap=True)
    console.print(f"prompts: {prompts}", markup=False, soft_wrap=True)
    console.print(
        f"{found.prompts} prompts, {found.tokens} tokens, {s.drafted} drafted, {s.accepted} accepted "
        f"({s.acceptance_rate:.0%}): {found.near_ties} near-ties, {found.bugs} bugs",
        soft_wrap=True,
    )


def _words(llm: LLM, difference: Difference) -> str:
    """Describe a difference in words, with the texts of the tokens."""
    ids = (difference.plain, difference.other)
    mine, theirs = ("nothing" if i is None else repr(printable(llm.tokenizer.decode([i]))) for i in ids)
    return f"{difference}: {mine} when decoded plainly, {theirs} when drafted"
