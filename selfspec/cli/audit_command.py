"""The command `selfspec audit`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from selfspec.basics.errors import SelfspecError
from selfspec.cli.common import (
    check_named_method,
    difference_line,
    drafting_with,
    print_json,
    progress,
    quiet,
    resolve_drafting,
    stderr,
    stdout,
)
from selfspec.cli.options import AuditCommand

if TYPE_CHECKING:
    from selfspec.llm.llm import LLM
    from selfspec.measure.audit import Audit


def run(options: AuditCommand) -> int:
    """Validate the options before loading the model, then audit; return 1 if a bug was found."""
    quiet()
    model, profile, controller = resolve_drafting(options.drafting)
    check_named_method(options.method)
    raw_prompts = options.data.read(held_out=True)
    options.device_options.set_threads()

    from selfspec.basics.machine import machine
    from selfspec.llm.llm import load
    from selfspec.llm.options import Options
    from selfspec.llm.prompt_encoding import check_chat
    from selfspec.measure.audit import audit

    Options(temperature=options.temperature).check()
    if options.data.chat:
        check_chat(model)
    llm = load(
        model,
        profile=profile or options.drafting.profile,
        store=options.drafting.store,
        method=options.method,
        device=options.device_options.placement,
        dtype=options.device_options.dtype,
        drafting=True,
    )
    drafting = drafting_with(
        llm.profile,
        llm.identity,
        options.drafting.profile,
        default=llm.has_default_profile,
        method=options.method,
        controller=controller,
        store=options.drafting.store,
    )
    if not drafting.profile.drafts:
        raise SelfspecError(f"{drafting.source}; expected --profile with one that drafts, as selfspec search finds")
    drafter = llm.drafter_for(drafting.profile)
    encoded = options.data.encode_prompts(llm, raw_prompts, limit=options.limit, max_new_tokens=options.max_new_tokens)
    with progress(stderr()) as bar:
        task = bar.add_task("auditing", total=len(encoded.prompts))
        result = audit(
            llm,
            drafter,
            encoded.prompts,
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
        "drafts": drafting.source,
        "prompt_source": encoded.source,
    }
    if options.json:
        print_json({**where, "chat": encoded.chat, "temperature": options.temperature, **result.as_dict()})
    else:
        _report(llm, result, where, encoded.summary)
    return 1 if result.bugs else 0


def _report(llm: LLM, result: Audit, where: dict[str, str], prompts: str) -> None:
    console = stdout()
    for prompt, difference in result.differences:
        line = f"prompt {prompt + 1}, {difference_line(llm, difference)}"
        console.print(line, markup=False, soft_wrap=True, style=None if difference.near_tie else "bold red")
    s = result.stats
    about = f"{where['model']}, {where['machine']}, {where['dtype']}; drafts: {where['drafts']}"
    console.print(about, markup=False, soft_wrap=True)
    console.print(f"prompts: {prompts}", markup=False, soft_wrap=True)
    console.print(
        f"{result.prompts} prompts, {result.tokens} tokens, {s.drafted} drafted, {s.accepted} accepted "
        f"({s.acceptance_rate:.0%}): {result.near_ties} near-ties, {result.bugs} bugs",
        soft_wrap=True,
    )
