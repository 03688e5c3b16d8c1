"""The command `selfspec compare`: benchmark all methods that apply to a model, and recommend one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from selfspec.basics.files import check_not_read, check_writable
from selfspec.cli.bench_command import check_named, method_table, ratio, read_temperatures, run_benchmark, texts_line
from selfspec.cli.common import drafting_with, model_for, print_json, profile_named, quiet, size, stdout
from selfspec.cli.options import CompareCommand
from selfspec.measure.bench_methods import OF_PROFILE, check_methods, check_supported, is_profile, supported
from selfspec.models.loading import read_identity
from selfspec.profile.reading import write_profile
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import check_profile
from selfspec.types.methods import DRAFT_MODEL

if TYPE_CHECKING:
    from rich.console import Console

    from selfspec.llm.llm import LLM
    from selfspec.measure.bench import BenchTask
    from selfspec.measure.comparing import Recommendation
    from selfspec.measure.model_copies import ModelCopies
    from selfspec.text.prompt_files import Prompts

PROMPTS = 24


def run(options: CompareCommand) -> int:
    """Validate the options before loading the model, then measure; return 130 after an interrupt."""
    quiet()
    named_profile = profile_named(options.profile)
    name = model_for(options.model, named_profile)
    temperatures = read_temperatures(options.temperature)
    if options.out is not None:
        check_writable(options.out)
        options.data.check_not_written(options.out, f"--out {options.out}")
    identity = read_identity(name)
    if named_profile is not None:
        check_profile(named_profile, identity)
    named_methods = _named(options)
    if options.out is not None:
        check_not_read(options.out, options.model, options.draft_model, options.profile, *(named_methods or ()))
    raw_prompts = options.data.read(held_out=True)
    options.device_options.set_threads()

    from selfspec.llm.prompt_encoding import check_chat
    from selfspec.measure.comparing import applicable, recommend
    from selfspec.measure.model_copies import load_model_copies
    from selfspec.speculation.sampling import check_sampling

    for temperature in temperatures:
        check_sampling(temperature, None, None)
    if options.data.chat:
        check_chat(name)
    subjects = load_model_copies(
        name,
        named_methods or ["profile", *applicable(Profile(model=identity), options.draft_model)],
        device=options.device_options.placement,
        dtype=options.device_options.dtype,
        profile=named_profile or options.profile,
    )
    drafting = drafting_with(subjects.profile, subjects.identity, options.profile, default=subjects.has_default_profile)
    profile = drafting.profile
    methods = named_methods or supported(applicable(profile, options.draft_model), subjects.plain, profile)
    for method in methods:
        check_supported(method, subjects.plain, profile)
    task, metadata = _task(options, raw_prompts, subjects, profile, methods)
    bench, interrupted = run_benchmark(subjects, task, temperatures, {**metadata, "source": drafting.source})
    best = recommend(bench["temperatures"])
    bench["recommended"] = best.as_dict()
    if options.json:
        print_json(bench)
    else:
        _report(bench, _prepared(subjects.drafting, task), stdout())
        _recommend(best, options, name, stdout())
    if options.out is not None:
        _save(subjects.drafting, best, task, bench, options)
    return 130 if interrupted else 0


def _named(options: CompareCommand) -> list[str] | None:
    """Return the methods that the options name, always with `plain`; None, for all that apply, if they name none.

    Raises `SelfspecError` for an unknown method.
    """
    model = [] if options.draft_model is None else [f"{DRAFT_MODEL}{options.draft_model}"]
    named = [part.strip() for part in (options.methods or "plain").split(",")]
    named = [*named, *model] if "plain" in named else ["plain", *named, *model]
    check_methods(named)
    check_named(named)
    return None if options.methods is None else named


def _task(
    options: CompareCommand,
    raw_prompts: Prompts | None,
    subjects: ModelCopies,
    profile: Profile,
    methods: list[str],
) -> tuple[BenchTask, dict[str, Any]]:
    """Return what the benchmark is to run, and the fields of its results that describe the prompts.

    The prompts are ordered so that they alternate between their tasks, such as `translation`.
    """
    from selfspec.measure.bench import BenchTask
    from selfspec.measure.comparing import by_turns

    encoded = options.data.encode_prompts(
        subjects.plain,
        raw_prompts,
        limit=options.limit or PROMPTS,
        max_new_tokens=options.max_new_tokens,
        last=raw_prompts is None,
    )
    order = by_turns(encoded.tasks or [""] * len(encoded.prompts))
    prompts, tasks = (
        [column[number] for number in order] if column else [] for column in (encoded.prompts, encoded.tasks)
    )
    task = BenchTask(
        tuple(methods),
        prompts,
        options.max_new_tokens,
        options.rounds,
        profile if profile.drafts else Profile(model=subjects.identity),
        [str(task_name) for task_name in tasks],
        patience=options.patience,
    )
    return task, {"prompt_source": encoded.source, "chat": encoded.chat}


def _prepared(llm: LLM, task: BenchTask) -> dict[str, float]:
    """Return the minutes that search and training of each method's profile took, by method, where known."""
    from selfspec.measure.comparing import preparation, profile_of

    own = [name for name in task.methods if name in OF_PROFILE or is_profile(name)]
    minutes_by_method = {name: preparation(profile_of(llm, name, task.profile)) for name in own}
    return {name: minutes for name, minutes in minutes_by_method.items() if minutes is not None}


def _report(bench: Mapping[str, Any], prepared: Mapping[str, float], console: Console) -> None:
    threads = "1 thread" if bench["threads"] == 1 else f"{bench['threads']} threads"
    lines = [
        f"{bench['model']}; {bench['machine']}; {threads}; {bench['dtype']}; {bench['prompts']} prompts x "
        f"{bench['max_new_tokens']} tokens x {bench['rounds']} rounds",
        f"prompts: {bench['prompt_source']}{', as chat messages' * bench['chat']}",
        f"drafts: {bench['source']}",
    ]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
    for result in bench["temperatures"]:
        console.print()
        console.print(_table(result, prepared))
        for line in _notes(result):
            console.print(line, soft_wrap=True, markup=False)


def _table(result: Mapping[str, Any], prepared: Mapping[str, float]) -> Table:
    """Return the table of methods at one temperature, fastest first, within 80 columns."""
    from selfspec.measure.comparing import fastest_first

    names = ("/ plain", "tok/pass", "accept", "draft", "memory", "minutes")
    table = method_table(f"temperature {result['temperature']:g}", *names)
    least = result["methods"]["plain"]["memory_bytes"]
    for name in fastest_first(result):
        m = result["methods"][name]
        more = m["memory_bytes"] - least
        table.add_row(
            Text(Path(name).name if is_profile(name) else name),
            "1" if name == "plain" else ratio(m["ratio"]["plain"]),
            f"{m['tokens_per_round']:.2f}",
            "-" if m["acceptance_rate"] is None else f"{m['acceptance_rate']:.0%}",
            "-" if m["draft_cost"] is None else f"{m['draft_cost']:.2f}",
            f"+{size(more)}" if more > 0 else "-",
            f"{prepared[name]:.1f}" if name in prepared else "-",
        )
    return table


def _notes(result: Mapping[str, Any]) -> list[str]:
    """Return notes on columns, dropped methods, the fastest methods by task, and identical output."""
    from selfspec.measure.comparing import fastest_by_task

    lines = [
        "/ plain: median over prompts of the speed over plain decoding's, and its 95% interval",
        "draft: cost of drafting a token, in steps of plain decoding; memory: in addition to plain decoding's; "
        "minutes: search and training, where known",
    ]
    dropped = [
        f"{name} ({m['dropped_after']})" for name, m in result["methods"].items() if m["dropped_after"] is not None
    ]
    if dropped:
        lines.append(f"slower than plain decoding, dropped after this number of prompts: {', '.join(dropped)}")
    for row in fastest_by_task(result):
        speedups = [f"{name} {speedup:.2f}" for name, speedup in list(row["speedups"].items())[:3]]
        lines.append(f"{row['task']} ({row['prompts']}): {', '.join(speedups)}")
    verdicts = [m["same_text"] for m in result["methods"].values() if m["same_text"] is not None]
    if not verdicts:
        return [*lines, "output: sampled; the methods of selfspec have plain decoding's distribution"]
    if all(counts["same"] == sum(counts.values()) for counts in verdicts):
        return [*lines, "output: every method gave the same tokens as plain decoding on every prompt"]
    return [*lines, *texts_line(result)]


def _recommend(best: Recommendation, options: CompareCommand, model: str, console: Console) -> None:
    """Print the recommendation and the command that uses it."""
    speedups = ", ".join(
        f"{median:.2f} ({low:.2f}-{high:.2f}) at temperature {temperature:g}"
        for temperature, (median, low, high) in best.speedups.items()
    )
    console.print()
    if best.method == "plain":
        console.print("recommended: plain decoding, as nothing was faster", soft_wrap=True, markup=False)
        return
    rivals = f"; methods with overlapping intervals: {', '.join(best.rivals)}" if best.rivals else ""
    console.print(
        f"recommended: {best.method}; speedup over plain decoding: {speedups}{rivals}", soft_wrap=True, markup=False
    )
    if not best.faster:
        console.print("it is not faster at every temperature; the guard bounds the loss", soft_wrap=True)
    command = f"selfspec generate --model {quote(model)} {_use(best.method, options)}"
    console.print(command, soft_wrap=True, markup=False)


def _use(method: str, options: CompareCommand) -> str:
    """Return the options of `generate` that select a method."""
    if options.out is not None:
        return f"--profile {quote(str(options.out))}"
    if is_profile(method):
        return f"--profile {quote(method)}"
    if method in ("profile", "guarded"):
        return f"--profile {quote(options.profile)}"
    own = "" if options.profile == "auto" and method != "path" else f"--profile {quote(options.profile)} "
    return f"{own}--method {quote(method)}"  # the profile's costs and proposers were measured with the method


def _save(llm: LLM, best: Recommendation, task: BenchTask, bench: Mapping[str, Any], options: CompareCommand) -> None:
    """Write the profile of the recommended method, with its measurements."""
    from selfspec.measure.comparing import measurements, profile_of

    assert options.out is not None
    profile = profile_of(llm, best.method, task.profile)
    held_out = options.data.held_out
    if best.method != "plain":
        profile = profile.model_copy(update={"measured": measurements(bench, best.method, held_out=held_out)})
    write_profile(profile, options.out)
