"""`selfspec generate`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import read_text
from selfspec.cli.color import colored, legend, show
from selfspec.cli.common import SEARCH_HINT, checked_profile, model_for, print_json, quiet, set_threads, stderr, stdout
from selfspec.cli.options import GenerateCommand
from selfspec.controllers import parse_controller
from selfspec.profile.schema import Profile
from selfspec.text.prompt import is_unicode

if TYPE_CHECKING:
    from selfspec.facts.controller import ControllerSpec
    from selfspec.llm.llm import LLM
    from selfspec.llm.options import Options
    from selfspec.llm.stream import Generation
    from selfspec.measure.timing import Comparison
    from selfspec.speculation.drafter import Drafter
    from selfspec.text.prompt import Prompt

COMPARE_ROUNDS = 3
OWN_CONFIG = "model"  # --generation-config: the checkpoint's own


def run(options: GenerateCommand) -> None:
    """Check everything that can be checked before the model is loaded, then generate."""
    quiet()
    profile: str | Profile = options.profile
    if options.profile not in ("auto", "none"):
        profile = checked_profile(options.profile)
    model = model_for(options.model, profile if isinstance(profile, Profile) else None)
    spec = None if options.controller is None else parse_controller(options.controller)
    for stop in options.stop or ():
        if not stop or not is_unicode(stop):
            raise SelfspecError(
                f"--stop: the text is {'no valid Unicode' if stop else 'empty'}; want at least one character"
            )
    text = _text(options)
    schema = None if options.json_schema is None else read_text(options.json_schema)
    set_threads(options.where.threads)

    from selfspec.llm.llm import load
    from selfspec.llm.prompts import check_chat, encode
    from selfspec.text.guided import check_guide

    how = _how(options)
    how.check()
    guided = options.regex is not None or schema is not None
    if guided:
        check_guide(regex=options.regex, json_schema=schema)
    if options.chat:
        check_chat(model)
    load_model = partial(load, model, device=options.where.place, dtype=options.where.dtype)
    llm = load_model(profile=profile)
    prompt = encode(llm, text, chat=True) if options.chat else text
    if options.generation_config == OWN_CONFIG:
        how = replace(how, config=llm.model.generation_config)
    if guided:
        how = replace(how, guide=llm.guide(regex=options.regex, json_schema=schema))
    _say_what_is_idle(options, greedy=llm.plan(prompt, how).sampler.greedy)
    if llm.profile is None and options.profile == "auto":
        stderr().print(SEARCH_HINT.format(model=model), markup=False, soft_wrap=True)
    drafter = _drafter(llm, spec)
    if options.compare:
        as_loaded = llm if llm.layout == "rows" else load_model(profile="none", layout="rows")
        _compare(llm, as_loaded, prompt, drafter, how, as_json=options.json, color=options.color)
    elif options.json:
        generation = llm.run(prompt, how, drafter=drafter, probabilities=options.color)
        print_json(_as_json(generation, events=options.color))
    else:
        _stream(llm, prompt, drafter, how, stats=options.stats, color=options.color)


def _say_what_is_idle(options: GenerateCommand, *, greedy: bool) -> None:
    """Name the options that say how to sample, where nothing is sampled."""
    given = {"--seed": options.how.seed, "--top-k": options.how.top_k, "--top-p": options.how.top_p}
    idle = [name for name, value in given.items() if value is not None]
    if greedy and idle:
        stderr().print(
            f"{', '.join(idle)}: no effect on greedy decoding; --temperature above 0 samples", soft_wrap=True
        )


def _drafter(llm: LLM, spec: ControllerSpec | None) -> Drafter:
    """The profile's drafter, perhaps with another controller."""
    if spec is None:
        return llm.drafter
    if llm.profile is None or not llm.profile.drafts:
        stderr().print("--controller has no effect: without a profile that drafts, nothing is drafted")
        return llm.drafter
    return llm.guarded(llm.profile.controlled_by(spec))


def _text(options: GenerateCommand) -> str:
    if options.prompt is not None:
        prompt = options.prompt
    elif sys.stdin is None or sys.stdin.isatty():
        raise SelfspecError("no prompt: give it as an argument or on standard input")
    else:
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise SelfspecError(f"standard input: not UTF-8 text (byte {error.start})") from None
    if not prompt:
        raise SelfspecError("the prompt is empty; give at least one character")
    if not is_unicode(prompt):
        raise SelfspecError("the prompt is not valid Unicode text; give UTF-8")
    return prompt


def _how(options: GenerateCommand) -> Options:
    """The options of decoding, but for what needs the model."""
    from selfspec.model.loading import read_generation_config

    named = options.generation_config
    return replace(
        options.how,
        config=None if named is None or named == OWN_CONFIG else read_generation_config(Path(named)),
        stop=tuple(options.stop or ()),
        settings=dict(_setting(text) for text in options.settings or ()),
    )


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    parsed: Any = None
    try:
        parsed = json.loads(value)  # which, unlike YAML, reads 3e-4 as a number
    except ValueError:
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError:
            equals = ""
    if not equals or not name.strip():
        raise SelfspecError(f"--set {text}: want NAME=VALUE, such as min_p=0.05")
    return name.strip(), parsed


def _as_json(generation: Generation, *, events: bool) -> dict[str, Any]:
    data = {"text": generation.text, "tokens": generation.tokens, "stats": generation.stats.as_dict()}
    return {**data, "events": [event.as_dict() for event in generation.events]} if events else data


def _stream(llm: LLM, prompt: Prompt, drafter: Drafter, how: Options, *, stats: bool, color: bool) -> None:
    stream = llm.start(prompt, how, drafter=drafter)
    console = stdout()
    try:
        if color and console.is_terminal:
            for origin, text in stream.spans():
                show(console, origin, text)
        else:
            for piece in stream:
                sys.stdout.write(piece)
                sys.stdout.flush()
    finally:
        stream.close()
        sys.stdout.write("\n")
        sys.stdout.flush()
        if color:
            legend(stderr(), stream.result.events, stream.result.stats)
        if stats:
            _print_stats(stream.result)


def _print_stats(generation: Generation) -> None:
    s = generation.stats
    stderr().print(
        f"{s.tokens} tokens in {s.seconds:.2f} s ({s.tokens_per_second:.1f} a second), {s.rounds} rounds, "
        f"{s.drafted} drafted, {s.accepted} accepted ({s.acceptance_rate:.0%}), "
        f"{s.tokens_per_round:.2f} tokens a round",
        soft_wrap=True,
    )


def _compare(
    llm: LLM, as_loaded: LLM, prompt: Prompt, drafter: Drafter, how: Options, *, as_json: bool, color: bool
) -> None:
    from selfspec.measure.timing import compare

    result = compare(llm, prompt, drafter, how, rounds=COMPARE_ROUNDS, as_loaded=as_loaded)
    if as_json:
        print_json({**_as_json(result.draft, events=color), "compare": result.as_dict()})
    else:
        _print_comparison(result, color=color)
        if color:
            legend(stderr(), result.draft.events, result.draft.stats)


def _print_comparison(result: Comparison, *, color: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="plain and speculative decoding, interleaved", show_lines=True)
    table.add_column("")
    table.add_column("plain", ratio=1, overflow="fold")
    table.add_column("speculative", ratio=1, overflow="fold")
    plain, draft = result.plain.stats, result.draft.stats
    console = stdout()
    text = colored(console, result.draft.events) if color else Text(result.draft.text)
    table.add_row("text", Text(result.plain.text), text)
    table.add_row("tokens/s", f"{result.plain_tokens_per_second:.1f}", f"{result.tokens_per_second:.1f}")
    table.add_row("full passes", f"{plain.rounds}", f"{draft.rounds}")
    table.add_row("tokens a pass", f"{plain.tokens_per_round:.2f}", f"{draft.tokens_per_round:.2f}")
    table.add_row("acceptance", "-", f"{draft.acceptance_rate:.0%} ({draft.accepted} of {draft.drafted})")
    console.print(table)
    theirs = result.transformers_tokens_per_second
    console.print(f"speedup: {result.speedup:.2f}x over plain decoding (median of {result.rounds} interleaved runs)")
    plain_ratio, draft_ratio = result.plain_tokens_per_second / theirs, result.tokens_per_second / theirs
    console.print(
        f"beside them: transformers' generate, {theirs:.1f} tokens/s; "
        f"plain is {plain_ratio:.2f} times as fast, speculative {draft_ratio:.2f}",
        soft_wrap=True,
    )
    console.print(f"identical output: {result.verdict}", soft_wrap=True)
