"""The command `selfspec generate`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from selfspec.basics.errors import SelfspecError
from selfspec.cli.color import colored, legend, write
from selfspec.cli.command_options import GenerateCommand
from selfspec.cli.common import (
    difference_line,
    held_note,
    print_json,
    progress,
    prompt_progress,
    quiet,
    stage_line,
    stats_line,
    stderr,
    stdout,
)
from selfspec.cli.decoding_options import DecodingRequest, decoding
from selfspec.text.prompt_template import is_unicode

if TYPE_CHECKING:
    from selfspec.llm.llm import LLM
    from selfspec.llm.options import Options
    from selfspec.llm.stream import Generation, Stream
    from selfspec.measure.audit import Comparison
    from selfspec.speculation.drafter import Drafter
    from selfspec.text.prompt_template import Prompt
    from selfspec.types.stats import Stats

COMPARE_ROUNDS = 3
_COMPARED = {"plain": "plain decoding", "draft": "drafts", "transformers": "transformers' generate"}


def run(options: GenerateCommand) -> int:
    """Validate the options before loading the model, then generate; return the exit code."""
    if options.data.source is not None:
        from selfspec.cli.generate_file import run_many

        return run_many(options)
    quiet()
    _check_one(options)
    chat = options.data.chat
    request = decoding(options.decoding)
    request.run_as_worker()
    text = _text(options)
    how = request.check()
    request.check_chat(chat=chat, system=options.system)

    from selfspec.llm.prompt_encoding import encode

    llm = request.load()
    prompt = encode(llm, text, chat=True, system=options.system) if chat else text
    how = request.complete(llm, how)
    planned = llm.plan(prompt, how)
    request.hint(llm, planned, how)
    drafter = request.drafter(llm)
    if options.compare:
        _compare(llm, request, prompt, drafter, how, as_json=options.json, color=options.color)
    elif options.json:
        with_events = replace(how, probabilities=options.color)
        with prompt_progress() as shown:
            stream = llm.start(prompt, with_events, planned=planned, drafter=drafter, pieces=False, on_prefill=shown)
            generation = stream.wait()
        _warn(generation, how, chat=chat)
        print_json(_as_json(generation, events=options.color))
    else:
        with prompt_progress() as shown:
            stream = llm.start(prompt, how, planned=planned, drafter=drafter, on_prefill=shown)
            generation = _write(llm, stream, stats=options.stats, color=options.color)
        _warn(generation, how, chat=chat)
    return 0


def _check_one(options: GenerateCommand) -> None:
    """Raise `SelfspecError` for options that need many prompts, and for a system message without a chat."""
    options.data.read()
    many = {
        "--out": options.out,
        "--memory": options.memory,
        "--batch-size": options.batch_size,
        "--num-prompts": options.limit,
    }
    for name, given in many.items():
        if given is not None:
            raise SelfspecError(f"{name} is for many prompts; expected --prompts FILE with it")
    if options.compare and options.decoding.device_options.tensor_parallel:
        raise SelfspecError("--compare loads the model more than once; expected it without --tensor-parallel")
    if options.system is not None and not options.data.chat:
        raise SelfspecError("--system is for chats; expected --chat with it")


def _text(options: GenerateCommand) -> str:
    if options.prompt is not None:
        prompt = options.prompt
    elif sys.stdin is None or sys.stdin.isatty():
        raise SelfspecError("no prompt: give it as an argument or on standard input")
    else:
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise SelfspecError(f"standard input: not UTF-8 text (byte {error.start})") from None
    if not prompt:
        raise SelfspecError("the prompt is empty; give at least one character")
    if not is_unicode(prompt):
        raise SelfspecError("the prompt is not valid Unicode text; give UTF-8")
    return prompt


def _as_json(generation: Generation, *, events: bool) -> dict[str, Any]:
    data: dict[str, Any] = {"text": generation.text, "tokens": generation.tokens, "finish": generation.finish}
    data["stats"] = generation.stats.as_dict()
    return {**data, "events": [event.as_dict() for event in generation.events]} if events else data


def _write(llm: LLM, stream: Stream, *, stats: bool, color: bool) -> Generation:
    try:
        write(stream, color=color)
    finally:
        if color:
            legend(stderr(always=True), stream.result.events, stream.result.stats, llm.profile)
        if stats:
            stderr(always=True).print(f"{stats_line(stream.result.stats)}{held_note(llm.held)}", soft_wrap=True)
    return stream.result


def _warn(generation: Generation, how: Options, *, chat: bool) -> None:
    """Warn if the text was cut before its guide was complete, and if it is empty."""
    if generation.finish == "end" and not generation.text.strip() and not chat:
        stderr().print("the model ended the text at once; an instruct model needs --chat", soft_wrap=True)
    if how.guide is not None and generation.finish in ("length", "time"):
        stderr().print("the text was cut before the guide was complete; give more --max-new-tokens", soft_wrap=True)


def _compare(
    llm: LLM, request: DecodingRequest, prompt: Prompt, drafter: Drafter, how: Options, *, as_json: bool, color: bool
) -> None:
    """Run and print a comparison with plain decoding in its fastest weight layout, and with `transformers`' generate.

    `transformers` runs on the weight layout `rows`, in which weights are loaded.
    """
    from selfspec.measure.audit import compare
    from selfspec.measure.cost_fitting import fastest_plain

    stage_line(stderr(), f"comparing {', '.join(_COMPARED.values())}; a warm-up and {COMPARE_ROUNDS} runs of each ...")
    loaded = [llm] if llm.layout == llm.plain_layout else [request.load_plain(layout=llm.plain_layout or "auto"), llm]
    plain = fastest_plain(loaded)
    as_loaded = next((model for model in loaded if model.layout == "rows"), None) or request.load_plain(layout="rows")
    with progress(stderr()) as bar:
        task = bar.add_task("comparing", total=len(_COMPARED) * COMPARE_ROUNDS)

        def on_warm(name: str, stats: Stats) -> None:
            stage_line(stderr(), f"warm-up, {_COMPARED[name]}: {stats.tokens_per_second:.1f} tokens/s")

        result = compare(
            llm,
            prompt,
            drafter,
            how,
            rounds=COMPARE_ROUNDS,
            plain_llm=plain,
            as_loaded=as_loaded,
            on_warm=on_warm,
            on_run=lambda name, prompt: bar.advance(task),
        )
        bar.remove_task(task)
    if as_json:
        print_json({**_as_json(result.draft, events=color), "compare": result.as_dict()})
    else:
        _print_comparison(llm, result, request.drafts_by(llm), color=color)
        if color:
            legend(stderr(always=True), result.draft.events, result.draft.stats, llm.profile)


def _print_comparison(llm: LLM, result: Comparison, drafts_by: str, *, color: bool) -> None:
    """Print the text with the figures of plain and speculative decoding beside it, and how the texts differ.

    `drafts_by`: what drafted, in words.
    """
    from rich.table import Table
    from rich.text import Text

    plain, draft = result.plain.stats, result.draft.stats
    figures = Table(box=None, pad_edge=False)
    for heading in ("", "plain", "drafted"):
        figures.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    figures.add_row("tokens/s", f"{result.plain_tokens_per_second:.1f}", f"{result.tokens_per_second:.1f}")
    figures.add_row("first token", f"{result.plain_first_token * 1e3:.0f} ms", f"{result.first_token * 1e3:.0f} ms")
    figures.add_row("full passes", f"{plain.rounds}", f"{draft.rounds}")
    figures.add_row("tokens a pass", f"{plain.tokens_per_round:.2f}", f"{draft.tokens_per_round:.2f}")
    figures.add_row("accepted", "-", f"{draft.acceptance_rate:.0%}")
    console = stdout()
    text = colored(console, result.draft.events) if color else Text(result.draft.text, overflow="fold")
    page = Table.grid(padding=(0, 3), expand=True)
    page.add_column(ratio=1, overflow="fold")
    page.add_column()
    page.add_row(text, figures)
    console.print(page)
    theirs = result.transformers_tokens_per_second
    for line in (
        "",
        f"speedup: {result.speedup:.2f}x over plain decoding (median of {result.rounds} interleaved runs); "
        f"transformers' generate: {theirs:.1f} tokens/s",
        f"drafts: {drafts_by}",
        f"identical output: {_verdict(llm, result)}",
    ):
        console.print(line, soft_wrap=True, markup=False)


def _verdict(llm: LLM, result: Comparison) -> str:
    """Return whether the texts are equal, in words, with the first difference and its margin if they are not."""
    if not result.comparable:
        return "not comparable (sampled texts are equal only by rule match, else only their distribution)"
    return "yes" if result.difference is None else f"no: {difference_line(llm, result.difference)}"
