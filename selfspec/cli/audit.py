"""`selfspec audit`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec import builtin
from selfspec.cli.common import (
    checked_profile,
    model_for,
    print_json,
    printable,
    progress,
    quiet,
    set_threads,
    stderr,
    stdout,
)
from selfspec.controllers import parse_controller
from selfspec.errors import SelfspecError
from selfspec.loading import check_dtype
from selfspec.skip import SkipSet

if TYPE_CHECKING:
    from selfspec.api import LLM
    from selfspec.audit import Audit, Difference
    from selfspec.profile import Profile


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """The command's options, as given."""

    model: str | None
    profile: str
    prompts: Path | None
    limit: int
    max_new_tokens: int
    temperature: float
    seed: int
    controller: str | None
    device: str
    dtype: str
    threads: int | None
    json: bool


def run(options: AuditOptions) -> int:
    """Check everything that can be checked before the model is loaded, then audit. 1 when a bug was found."""
    quiet()
    profile = None if options.profile == "auto" else checked_profile(options.profile)
    model = model_for(options.model, profile)
    check_dtype(options.dtype)
    spec = None if options.controller is None else parse_controller(options.controller)
    from selfspec.search.calibration import read_prompts

    prompts = builtin.prompts("heldout") if options.prompts is None else read_prompts(options.prompts)
    prompts = prompts[: options.limit]
    set_threads(options.threads)

    from selfspec.api import load
    from selfspec.audit import audit
    from selfspec.bench import machine
    from selfspec.options import Options

    Options(temperature=options.temperature).check()
    llm = load(model, profile="none", device=options.device, dtype=options.dtype)
    skip, source = _skip(llm, profile, options.profile)
    drafter = llm.layer_skip(skip, spec)
    for prompt in prompts:
        llm.check(prompt, options.max_new_tokens)
    with progress(stderr()) as bar:
        task = bar.add_task("auditing", total=len(prompts))
        found = audit(
            llm,
            drafter,
            prompts,
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
        "skip": source,
    }
    if options.json:
        print_json({**where, "temperature": options.temperature, **found.as_dict()})
    else:
        _report(llm, found, where)
    return 1 if found.bugs else 0


def _skip(llm: LLM, profile: Profile | None, name: str) -> tuple[SkipSet, str]:
    """What to bypass, and where that comes from: a profile, one made for this model, or every second layer."""
    from selfspec.api import check_profile, shipped_for

    if profile is not None:
        check_profile(profile, llm.identity)
    else:
        name, profile = next(iter(shipped_for(llm.identity).items()), ("", None))
    if profile is not None and len(profile.skip_set):
        return profile.skip_set, f"profile {name}, {len(profile.skip_set)} sub-layers"
    if profile is not None:
        raise SelfspecError(f"profile {name} skips nothing, so there is nothing to audit; want another")
    half = tuple(range(1, llm.runtime.layers, 2))
    return SkipSet(half, half), "every second layer, as there is no profile"


def _report(llm: LLM, found: Audit, where: dict[str, str]) -> None:
    console = stdout()
    for prompt, difference in found.differences:
        line = f"prompt {prompt + 1}, {_words(llm, difference)}"
        console.print(line, markup=False, soft_wrap=True, style=None if difference.near_tie else "bold red")
    s = found.stats
    console.print(f"{where['model']}, {where['machine']}, {where['dtype']}; bypassed: {where['skip']}", soft_wrap=True)
    console.print(
        f"{found.prompts} prompts, {found.tokens} tokens, {s.drafted} drafted, {s.accepted} accepted "
        f"({s.acceptance_rate:.0%}): {found.near_ties} near-ties, {found.bugs} bugs",
        soft_wrap=True,
    )


def _words(llm: LLM, difference: Difference) -> str:
    """The difference for people, with the tokens' texts."""
    ids = (difference.plain, difference.other)
    mine, theirs = ("nothing" if i is None else repr(printable(llm.tokenizer.decode([i]))) for i in ids)
    return f"{difference}: {mine} when decoded plainly, {theirs} when drafted"
