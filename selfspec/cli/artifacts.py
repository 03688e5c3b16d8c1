"""Commands that write weights, stores and files for engines: `train`, `convert`, `quantize`, `index` and `export`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import TextColumn

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import check_not_read, check_writable, kind
from selfspec.cli.command_options import QuantizeCommand
from selfspec.cli.common import (
    checked_profile,
    load_llm,
    model_for,
    print_json,
    profile_named,
    progress,
    quiet,
    say_how_to_resume,
    stage_line,
    stderr,
    stdout,
)
from selfspec.cli.input_options import unescape_newlines
from selfspec.cli.options import ConvertCommand, ExportCommand, IndexCommand, TrainCommand
from selfspec.cli.search import SearchWatch
from selfspec.models.loading import check_at_hand, load_tokenizer, read_identity
from selfspec.proposers.history import AnswerHistory, keeps_answers
from selfspec.proposers.store import Store, write_store
from selfspec.text.datasets_prompts import text_files
from selfspec.text.prompt_files import read_texts
from selfspec.training.options import PUBLISHED, check_kind

if TYPE_CHECKING:
    from selfspec.export.exporting import Exported
    from selfspec.training.fit import Fitted


PROGRESS_SECONDS = 30  # seconds between two progress lines where there is no progress bar


def run_train(command: TrainCommand) -> int:
    """Validate the options before loading the model, then train; return 130 after an interrupt."""
    quiet()
    kind = check_kind(command.kind)
    model = model_for(command.model, profile_named(command.profile))
    if kind in ("distill", "layerskip") and Path(model).resolve() == (command.out / kind).resolve():
        raise SelfspecError(f"--out {command.out} would write over the model; expected another folder")
    _check_profile_kept(command.out, command.profile, kind)
    if command.train_options.student is not None:
        check_at_hand(command.train_options.student)
    prompts = command.data.read()
    command.device_options.set_threads()

    from selfspec.training.fit import check_folder, fit

    check_folder(command.out)
    console = stderr()
    llm = load_llm(model, command.profile, command.device_options)
    with _Watch(console) as watch:
        fitted = fit(
            llm,
            part=kind,
            out=command.out,
            prompts=None if prompts is None else prompts.texts,
            chat=command.data.chat,
            profile=llm.known_profile,
            options=command.train_options,
            callbacks=watch,
        )
    _report(fitted, console)
    if command.json:
        files = {"part": str(fitted.part), "profiles": [str(path) for path in fitted.profiles]}
        print_json({**files, **fitted.record, "interrupted": fitted.interrupted})
    if fitted.interrupted:
        say_how_to_resume(console)
        return 130
    return 0


class _Watch:
    """Progress bar of a training: the current stage and its figures; periodic lines if there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console, self._last_printed = console, time.monotonic()
        self._bar = progress(console, TextColumn("{task.fields[said]}"))
        self._task = self._bar.add_task("loading the model", total=None, said="")

    def __enter__(self) -> _Watch:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, name: str, total: float | None) -> None:
        """Begin a stage of `total` steps; None: unknown."""
        stage_line(self._console, f"{name} ...")
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(name, total=total, said="")

    def step(self, done: float, message: str) -> None:
        """Show that `done` steps of the stage are complete, with `message`, a line of figures so far."""
        self._bar.update(self._task, completed=done, said=message)
        if message and time.monotonic() > self._last_printed + PROGRESS_SECONDS:
            stage_line(self._console, message)
            self._last_printed = time.monotonic()


def _report(fitted: Fitted, console: Console) -> None:
    done, agrees = fitted.progress, fitted.record.get("right")
    places = ", ".join(f"{share:.0%}" for share in done.acceptance)
    if agrees is None:
        brought = f"{done.best:.2f} tokens a pass on held-out texts, greedy drafts; right up to each position: {places}"
    else:
        (before, after), (other, shared) = agrees, fitted.record["shared"]
        brought = (
            f"the draft path's best token is the model's at {after:.1%} of held-out positions ({before:.1%} without); "
            f"it shares {shared:.1%} of the model's probability ({other:.1%} without)"
        )
    steps = f"{done.steps} steps on " if done.steps else ""
    console.print(f"{brought}; {steps}{fitted.texts} texts", markup=False, soft_wrap=True)
    console.print(f"saved {fitted.part}", markup=False, soft_wrap=True)
    if fitted.changed:
        before, after = fitted.record["perplexity"]
        message = f"training changed the model: perplexity on held-out answers {after:.2f}, before {before:.2f}"
        console.print(message, soft_wrap=True)
    print_usage(fitted.profiles, console, model=fitted.part if fitted.changed else None)


def print_usage(profiles: Sequence[Path], console: Console, *, model: Path | None = None) -> None:
    """Print how saved profiles are used; `model`: the folder of their model, if training changed it."""
    model_option = "" if model is None else f"--model {quote(str(model))} "
    for path in profiles:
        command = f"selfspec generate {model_option}--profile {quote(str(path))} 'your prompt'"
        console.print(f"saved {path}; use it with: {command}", markup=False, soft_wrap=True)


def _check_profile_kept(out: Path, profile: str | None, *kinds: str) -> None:
    """Raise `SelfspecError` if the profiles of a draft module of one of `kinds` in `out` would replace `profile`."""
    for name in kinds:
        for file in (f"{name}.yaml", f"{name}-below.yaml"):
            check_not_read(out / file, profile, what="the profile that is given")


def run_convert(command: ConvertCommand) -> None:
    """Check the folders, load the model, and write the draft module and its profiles. Raises `SelfspecError`."""
    quiet()
    _check_profile_kept(command.out, command.profile, *PUBLISHED)
    model = model_for(command.model, profile_named(command.profile))
    command.device_options.set_threads()

    from selfspec.training.fit import check_folder
    from selfspec.training.profiles import convert

    check_folder(command.out)
    llm = load_llm(model, command.profile, command.device_options)
    part, profiles, kind, megabytes = convert(llm, command.folder, command.out, llm.known_profile)
    if command.json:
        files = [str(path) for path in profiles]
        print_json({"part": str(part), "kind": kind, "megabytes": megabytes, "profiles": files})
    console = stderr()
    console.print(f"saved {part}: {kind}, {megabytes:.1f} MB while drafting", markup=False, soft_wrap=True)
    print_usage(profiles, console)


def run_quantize(command: QuantizeCommand) -> int:
    """Validate the options before loading the model, then quantise; return 130 after an interrupt."""
    quiet()
    from selfspec.search.quantizing import check_quantized_out, quantize

    model = model_for(command.model, profile_named(command.profile))
    check_quantized_out(command.out, command.profile)
    command.data.check_not_written(command.out, f"--out {command.out}")
    prompts = command.data.read()
    command.device_options.set_threads()

    console = stderr()
    llm = load_llm(model, command.profile, command.device_options)
    try:
        with SearchWatch(console) as watch:
            made = quantize(
                llm,
                command.out,
                command.quantize_options,
                watch,
                prompts=prompts,
                chat=command.data.chat,
                profile=llm.known_profile,
            )
    except KeyboardInterrupt:
        say_how_to_resume(console)
        return 130
    texts = made.settings["texts"]
    console.print(
        f"saved {made.weights}: {made.settings['method']}, groups of {made.settings['group']}, from {texts['count']} "
        f"texts of together {texts['tokens']:,} tokens, in {made.seconds:.1f} s",
        markup=False,
        soft_wrap=True,
    )
    print_usage([made.profile], console)
    if command.json:
        print_json(
            {"weights": str(made.weights), "profile": str(made.profile), **made.settings, "seconds": made.seconds}
        )
    return 0


BATCH = 64  # texts encoded per call of the tokenizer


def run_index(options: IndexCommand) -> None:
    """Validate the options, read the texts, and write the store. Raises `SelfspecError`."""
    begun = time.perf_counter()
    quiet()
    model = model_for(options.model, None)
    check_writable(options.out)
    if not options.add:
        for path in options.texts:
            check_not_read(options.out, *(text_files(Path(path)) if kind(Path(path)) == "folder" else [path]))
    existing: list[tuple[int, ...]] = []
    vocabulary = read_identity(model).vocabulary or 0
    store = Store(options.out) if kind(options.out) == "file" else None  # no other file is written over
    if options.add and store is not None:
        store.check(vocabulary)
        existing = list(store)
    template = unescape_newlines(options.template)
    texts = list[str]()
    for path in options.texts:
        if keeps_answers(path):
            existing += AnswerHistory(path, vocabulary)
        else:
            more, note = read_texts(path, column=options.column, template=template)
            texts += more
            if note is not None:
                warnings.warn(note, stacklevel=2)
    encoded = list(_encoded(model, texts))
    tokens = write_store(options.out, [*existing, *encoded], vocabulary=vocabulary)
    stats = {
        "store": str(options.out),
        "model": model,
        "texts": sum(map(bool, [*existing, *encoded])),
        "tokens": tokens,
        "bytes": options.out.stat().st_size,
        "seconds": round(time.perf_counter() - begun, 2),
    }
    if options.json:
        print_json(stats)
        return
    stdout().print(
        f"{stats['texts']} texts, {tokens:,} tokens, {stats['bytes']:,} bytes, in {stats['seconds']} s: {options.out}. "
        f"Use it with: selfspec generate --model {quote(model)} --store {quote(str(options.out))}",
        soft_wrap=True,
        markup=False,
    )


def _encoded(model: str, texts: list[str]) -> Iterator[list[int]]:
    """Yield the texts' token ids, without special tokens."""
    tokenizer = load_tokenizer(model)
    with progress(stderr()) as shown:
        task = shown.add_task("encoding", total=len(texts))
        for first in range(0, len(texts), BATCH):
            batch = texts[first : first + BATCH]
            yield from tokenizer(batch, add_special_tokens=False).input_ids
            shown.advance(task, len(batch))


def run_export(command: ExportCommand) -> None:
    """Validate the options before loading the model, measure acceptance on prompts, and export the profile."""
    quiet()
    profile = checked_profile(command.profile)
    name = model_for(command.model, profile)
    raw_prompts = command.data.read(held_out=True) if command.limit else None
    command.device_options.set_threads()

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
    _report_export(done, console)


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


def _report_export(done: Exported, console: Console) -> None:
    lines = [f"saved {done.out}: {done.drafted}", f"expected: {done.expected.summary}"]
    lines += [f"limitation: {limitation}" for limitation in done.limitations]
    for what, command in done.written.commands:
        lines.append(f"{what}:\n{command}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
