"""The command `selfspec chat`: a conversation in the terminal or through a pipe; each line is a message."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import json_line, kind, write_text
from selfspec.cli.color import legend, write
from selfspec.cli.common import held_note, prompt_progress, quiet, speed_line, stats_line, stderr
from selfspec.cli.decoding_options import decoding
from selfspec.cli.options import ChatCommand
from selfspec.types.stats import Stats

if TYPE_CHECKING:
    from selfspec.llm.conversation import Conversation
    from selfspec.llm.llm import LLM
    from selfspec.llm.options import Options
    from selfspec.llm.sampling_plan import Plan
    from selfspec.llm.stream import Generation
    from selfspec.speculation.drafter import Drafter
    from selfspec.text.prompt_template import Prompt

NEW_TOKENS = 1024  # default length of an answer
ASK = "> "


def run(command: ChatCommand) -> int:
    """Validate the options before loading the model, then chat; return the exit code.

    The exit code is 2 if a message or command from a pipe failed.
    """
    quiet()
    request = decoding(command.decoding)
    request.run_as_worker()
    if sys.stdin is None:
        raise SelfspecError("standard input is closed; give it messages, each on a line")
    how = request.check()
    request.check_chat(chat=True, system=command.system)
    llm = request.load()
    how = request.complete(llm, how)
    if how.config is None and how.max_new_tokens is None and not {"max_new_tokens", "max_length"} & set(how.settings):
        how = replace(how, max_new_tokens=NEW_TOKENS)
    conversation = llm.conversation(system=command.system)
    first = conversation.prompt("x")
    request.hint(llm, llm.plan(first, llm.fit_options(first, how)), how)
    talk = _ChatSession(
        llm, conversation, how, request.drafter(llm), color=command.color, interactive=sys.stdin.isatty()
    )
    return talk.run()


@dataclass(slots=True)
class _ChatSession:
    """A conversation with a terminal or a pipe. Only the answers go to standard output."""

    llm: LLM
    conversation: Conversation
    how: Options
    drafter: Drafter
    color: bool
    interactive: bool  # standard input is a terminal
    generations: list[Generation] = field(default_factory=list)  # the answers since the start or the last /reset
    saved: set[Path] = field(default_factory=set)  # files that this chat wrote and may overwrite
    ended: bool = False

    def run(self) -> int:
        """Process lines until the input ends or the user types `/exit`; return the exit code."""
        if self.interactive:
            _say(f"{self.llm.name}: /help lists the commands, Ctrl-C ends an answer, Ctrl-D the chat", style="dim")
            if held := held_note(self.llm.held):
                _say(held.removeprefix("; "), style="dim")
        refused = False
        for line in _terminal_lines() if self.interactive else _pipe_lines():
            try:
                if isinstance(line, SelfspecError):
                    raise line
                self._handle_line(line)
            except SelfspecError as error:
                _say(f"error: {' '.join(str(error).split())}")
                refused = True
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                _say("interrupted", style="dim")
            if self.ended:
                break
        return 2 if refused and not self.interactive else 0

    def _handle_line(self, line: str) -> None:
        """Run a command or answer a message; an empty line is ignored."""
        if line.startswith("/"):
            name, _, rest = line.partition(" ")
            if name not in COMMANDS:
                raise SelfspecError(
                    f"there is no command {name}; known: {', '.join(COMMANDS)}; put a space before a message "
                    "that begins with a slash"
                )
            COMMANDS[name].handler(self, rest.strip())
        elif text := line.strip():
            self._answer(text)

    def _answer(self, text: str) -> None:
        prompt, before, interrupted = self.conversation.prompt(text), self.conversation.answers, False
        how = self._fitted_options(prompt)
        planned = self.llm.plan(prompt, how)
        with prompt_progress() as shown:
            stream = self.conversation.start(text, how, planned=planned, drafter=self.drafter, on_prefill=shown)
            try:
                write(stream, color=self.color, fold=True)
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                interrupted = True
            finally:
                answer = stream.result
                if answer.tokens:
                    self.generations.append(answer)
        if self.conversation.answers == before:
            _say("interrupted before the answer began: the message is not kept", style="dim")
            return
        ended = self._cut_reason(answer, planned) if not interrupted else "interrupted"
        _say(", ".join(part for part in (speed_line(answer.stats), ended) if part), style="dim")

    def _cut_reason(self, answer: Generation, planned: Plan) -> str:
        """Return why an answer was cut; empty if it ended before its token limit or with an end token."""
        if len(answer.tokens) < planned.max_new_tokens or answer.tokens[-1] in planned.final_tokens:
            return ""
        full = planned.max_new_tokens == self.llm.max_new(answer.stats.prompt)
        return "cut: the context is full, /reset clears it" if full else "cut: a larger --max-new-tokens allows more"

    def _fitted_options(self, prompt: Prompt) -> Options:
        """Return the options for an answer, with its seed, and with new tokens limited to the free context.

        The seed is `--seed` plus the number of earlier answers, so the first answer is that of `generate --chat`.
        """
        how = self.how
        if how.seed is not None:
            how = replace(how, seed=how.seed + self.conversation.answers)
        try:
            return self.llm.fit_options(prompt, how)
        except SelfspecError as error:
            raise SelfspecError(f"{error}; the conversation is kept: /save writes it, /reset clears it") from None

    def reset(self, rest: str) -> None:
        """Run `/reset`: begin a new conversation."""
        _no_more("/reset", rest)
        self.conversation.reset()
        self.generations.clear()
        _say("a new conversation begins", style="dim")

    def stats(self, rest: str) -> None:
        """Run `/stats`: show statistics of the answers so far."""
        _no_more("/stats", rest)
        if not self.generations:
            _say("no answers yet")
            return
        last = self.generations[-1].stats
        total = Stats.total(generation.stats for generation in self.generations)
        read = last.prompt - last.num_cached
        _say(f"{len(self.generations)} {'answer' if len(self.generations) == 1 else 'answers'}: {stats_line(total)}")
        _say(
            f"the last answer prefilled {read} of its prompt's {last.prompt} tokens, the KV cache held the others; "
            f"{last.prompt + last.tokens} of {self.llm.runtime.skeleton.context} positions are taken"
        )
        if self.color:
            legend(
                stderr(always=True),
                list(chain.from_iterable(generation.events for generation in self.generations)),
                total,
                self.llm.profile,
            )

    def save(self, rest: str) -> None:
        """Run `/save FILE`: write the messages as JSON lines. Raises `SelfspecError`."""
        if not rest:
            raise SelfspecError("/save: expected a file, such as /save chat.jsonl")
        if not self.conversation.answers:
            raise SelfspecError("/save: there are no answers yet; expected a message first")
        try:
            path = Path(rest).expanduser().absolute()
        except RuntimeError as error:  # unknown home directory
            raise SelfspecError(f"/save {rest}: {error}") from None
        if kind(path) != "missing" and path not in self.saved:
            raise SelfspecError(f"/save {rest}: the path exists; expected a new one, as files are not overwritten")
        messages = self.conversation.messages
        try:
            write_text(path, "".join(f"{json_line(message)}\n" for message in messages))
        except OSError as error:
            raise SelfspecError(f"{rest}: cannot be written ({error.strerror or error})") from None
        self.saved.add(path)
        _say(f"{len(messages)} messages are in {rest}, as JSON lines", style="dim")

    def help(self, rest: str) -> None:
        """Run `/help`: list the commands."""
        _no_more("/help", rest)
        for name, command in COMMANDS.items():
            _say(f"{f'{name} {command.argument}'.strip():12} {command.description}")
        _say("Ctrl-C ends an answer; its text so far stays in the conversation", style="dim")

    def exit(self, rest: str) -> None:
        """Run `/exit`: end the chat."""
        _no_more("/exit", rest)
        self.ended = True


@dataclass(frozen=True, slots=True)
class _Command:
    handler: Callable[[_ChatSession, str], None]
    description: str
    argument: str = ""


COMMANDS = {
    "/reset": _Command(_ChatSession.reset, "begin a new conversation; a system message stays"),
    "/stats": _Command(_ChatSession.stats, "rounds, acceptance and speed so far, and how much of the context is taken"),
    "/save": _Command(_ChatSession.save, "write the messages to a new file, each a line of JSON", argument="FILE"),
    "/help": _Command(_ChatSession.help, "this list"),
    "/exit": _Command(_ChatSession.exit, "end the chat, as Ctrl-D does"),
}


def _terminal_lines() -> Iterator[str]:
    """Yield the lines typed in a terminal; Ctrl-C discards the current line."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  importing it enables line editing and history
    while True:
        try:
            if not sys.stdout.isatty():  # the prompt must not go into redirected output
                sys.stderr.write(ASK)
                sys.stderr.flush()
            yield input(ASK if sys.stdout.isatty() else "")
        except KeyboardInterrupt:
            _say("\nCtrl-D or /exit ends the chat", style="dim")
        except UnicodeDecodeError:
            _say("error: that is not UTF-8 text")
        except EOFError:
            _say("")
            return


def _pipe_lines() -> Iterator[str | SelfspecError]:
    """Yield the lines of a pipe; for a line that is not UTF-8, an error."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            yield SelfspecError(f"standard input, line {number}: not UTF-8 text")


def _no_more(name: str, rest: str) -> None:
    if rest:
        raise SelfspecError(f"{name}: got {rest} after it; expected nothing")


def _say(text: str, *, style: str = "") -> None:
    console = stderr(always=not style)  # a dim line is a note; others are errors, or answers to commands
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)
