"""`selfspec chat` with a pipe, and in a real terminal; `generate --system`."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys

import command
import pytest
from chats import save_with_template, with_template
from terminal import ESCAPES, Terminal

import selfspec
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.reading import write_profile
from selfspec.profile.schema import Profile
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.controller import ControllerSpec
from selfspec.types.identity import Identity

SKIP = selfspec.SkipSet((3, 5, 9), (7, 11))
TEXTS = ["import os", "def main(args):", "class Parser:"]


@pytest.fixture(scope="module")
def model(llm, tmp_path_factory):
    """A folder that holds the built-in model with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "m"
    save_with_template(llm, folder)
    return folder


@pytest.fixture(scope="module")
def profile(model):
    """A file with a profile that drafts."""
    spec = LayerSkipSpec.from_path(SKIP, ControllerSpec(name="fixed", options={"k": 3}))
    write_profile(Profile(model=Identity(layers=16), draft=spec), model.parent / "p.yaml")
    return model.parent / "p.yaml"


@pytest.fixture
def chat(llm):
    return with_template(llm)


@pytest.fixture
def cli(cli, monkeypatch):
    """The command, to which lines, bytes or a stream are said."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*args, said=None):
        return cli(*args, stdin="".join(f"{one}\n" for one in said).encode() if isinstance(said, list) else said)

    return run


@pytest.fixture
def say(cli, model):
    """`selfspec chat` with the model, plainly: what each line that is said gives."""
    return lambda said, *args: cli(
        "chat", "--model", model, "--profile", "none", "--max-new-tokens", 9, *args, said=said
    )


class TestPiped:
    def test_each_line_is_a_message(self, say, chat):
        """Standard output holds the answers, standard error a quiet line for each."""
        conversation = chat.conversation()
        answers = [conversation.send(text, max_new_tokens=9).text for text in TEXTS]
        code, out, err = say([TEXTS[0], "", *TEXTS[1:]])
        assert (code, out) == (0, "".join(f"{answer}\n" for answer in answers))
        cut = r"\d+\.\d tokens/s, 9 tokens, cut: a larger --max-new-tokens allows more\n"
        assert re.fullmatch(cut * 3, err)

    def test_the_last_line_needs_no_end(self, say):
        assert say(b"import os\r\ndef main(args):")[1] == say(TEXTS[:2])[1]

    def test_drafting_changes_nothing_and_is_told(self, say, profile):
        plain, drafted = say(TEXTS), say([*TEXTS, "/stats"], "--profile", profile)
        assert drafted[:2] == plain[:2]
        assert err_numbers(drafted[2], r"(\d+) drafted") > 0

    def test_a_system_message(self, say, chat, cli, model):
        conversation = chat.conversation(system="Write Python.")
        expected = [conversation.send(text, max_new_tokens=9).text for text in TEXTS[:2]]
        out = say(TEXTS[:2], "--system", "Write Python.")[1]
        assert out.splitlines() == "\n".join(expected).splitlines()
        generate = ("generate", TEXTS[0], "--chat", "--model", model, "--max-new-tokens", 9, "--profile", "none")
        assert cli(*generate, "--system", "Write Python.")[1] == f"{expected[0]}\n"
        assert cli(*generate)[1] == f"{chat.conversation().send(TEXTS[0], max_new_tokens=9).text}\n"

    def test_a_seed_makes_it_repeatable_and_each_answer_its_own(self, say, chat, profile):
        """The first answer has the seed, each further one the next; after a reset they begin anew."""
        options = ("--temperature", 0.9, "--seed", 5)
        conversation = chat.conversation()
        expected = [
            conversation.send(TEXTS[0], max_new_tokens=9, temperature=0.9, seed=5 + turn).text for turn in range(3)
        ]
        once = say([TEXTS[0]] * 3, *options)[1]
        assert once == "".join(f"{answer}\n" for answer in expected)
        assert say([TEXTS[0]] * 3, *options, "--profile", profile)[1] == once
        again = say([TEXTS[0], "/reset", *[TEXTS[0]] * 3], *options)[1]
        assert again == f"{expected[0]}\n{once}"

    def test_stats(self, say):
        """How much of the context is taken, and how little was read; before anything was said, that."""
        _, _, err = say(["/stats", *TEXTS, "/stats"])
        assert err.startswith("no answers yet\n")
        assert re.search(r"\n3 answers: 27 tokens in \d+\.\d\d s \(.* a second\), 27 rounds, 0 drafted", err)
        found = re.search(
            r"\nthe last answer prefilled (\d+) of its prompt's (\d+) tokens, the KV cache held the others; "
            r"(\d+) of 1024 positions are taken\n",
            err,
        )
        read, prompt, taken = map(int, found.groups())
        assert read < prompt / 2
        assert taken == prompt + 9

    def test_stats_with_colour_tell_where_tokens_came_from(self, say, profile):
        _, out, err = say([*TEXTS, "/stats"], "--profile", profile, "--color", "--temperature", 0.9, "--seed", 3)
        legend = err[err.index("positions are taken\n") :].splitlines()[1:]
        assert sum(int(line[16:].split()[0]) for line in legend[:-1]) == 27
        assert legend[-1].startswith("acceptance ")
        assert "\x1b" not in out

    def test_colours_where_it_is_shown(self, say, profile, monkeypatch):
        """Tokens that were drafted look otherwise than those that were not; the text is the same."""
        options = ("--profile", profile, "--temperature", 0.9, "--seed", 3)
        out = say(TEXTS, *options)[1]
        for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm-256color")):
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("NO_COLOR", raising=False)
        _, colored, err = say(TEXTS, *options, "--color")
        assert re.search(r"\x1b\[3;38;[25];[\d;]+m", colored)
        assert ESCAPES.sub("", colored) == out
        assert re.match(r"\x1b\[2m\d+\.\d tokens/s, .*\x1b\[0m\n", err)  # dim

    def test_help_names_all_commands(self, say):
        code, out, err = say(["/help"])
        assert (code, out) == (0, "")
        assert re.findall(r"^/\w+", err, flags=re.MULTILINE) == ["/reset", "/stats", "/save", "/help", "/exit"]

    def test_exit_ends_it(self, say):
        assert say([TEXTS[0], "/exit", TEXTS[1]])[:2] == say(TEXTS[:1])[:2]

    def test_a_reset_begins_anew(self, say):
        first = say(TEXTS[:1])[1]
        code, out, err = say([TEXTS[0], TEXTS[1], "/reset", TEXTS[0]])
        assert (code, out[-len(first) :]) == (0, first)
        assert "a new conversation begins\n" in err

    def test_a_message_that_begins_with_a_slash(self, say, chat):
        code, out, _ = say([" /etc/passwd"])
        assert (code, out) == (0, chat.conversation().send("/etc/passwd", max_new_tokens=9).text + "\n")

    @pytest.mark.parametrize(
        ("line", "told"),
        [
            (
                "/what now",
                "error: there is no command /what; known: /reset, /stats, /save, /help, /exit; put a space",
            ),
            ("/reset now", "error: /reset: got now after it; expected nothing"),
            ("/save", "error: /save: expected a file, such as /save chat.jsonl"),
            ("/save x.jsonl", "error: /save: there are no answers yet"),
            ("x = 1 " * 600, "no new token fits after this prompt; the conversation is kept: /save writes it"),
        ],
        ids=["command", "more", "no file", "too early", "too long"],
    )
    def test_what_cannot_be_done_gets_a_line_and_the_chat_goes_on(self, say, line, told):
        """Nothing is lost, and the exit code says that something was refused."""
        code, out, err = say([line, TEXTS[0]])
        assert (code, out) == (2, say(TEXTS[:1])[1])
        assert told in err.splitlines()[0]

    def test_no_text(self, say):
        assert say(b"\xff\xfe\n") == (2, "", "error: standard input, line 1: not UTF-8 text\n")
        code, out, err = say(b"\xff\n" + TEXTS[0].encode() + b"\n")
        assert (code, out) == (2, say(TEXTS[:1])[1])
        assert err.startswith("error: standard input, line 1: not UTF-8 text\n")

    def test_a_byte_order_mark_is_no_text(self, say):
        assert say(b"\xef\xbb\xbf/help\n") == say(b"/help\n")

    def test_the_end_of_the_context(self, say, chat):
        """The last answer has what room is left; then the line says so, until a reset."""
        long = "x = 1 " * 300
        left = chat.runtime.skeleton.context - len(chat.conversation().prompt(long.strip())) + 1
        code, out, err = say([long, TEXTS[0], "/reset", TEXTS[0]], "--max-new-tokens", 500)
        assert f"{left} tokens, cut: the context is full, /reset clears it\n" in err
        assert "error: a prompt of " in err
        assert code == 2
        assert out.endswith(say(TEXTS[:1], "--max-new-tokens", 500)[1])

    def test_ctrl_c_ends_all(self, model, warm, tmp_path):
        """What was said stays, no traceback, exit code 130."""
        done = subprocess.run(
            [warm.python, command.__file__, "interrupted-text:6", "chat", "--model", str(model), "--threads", "1"],
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            input="import os\nclass A:\n",
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
        assert done.returncode == 130
        assert done.stdout.strip()
        assert done.stderr.splitlines()[-1] == "interrupted"
        assert "Traceback" not in done.stderr


class Keyboard(io.StringIO):
    """Standard input of a terminal."""

    def isatty(self):
        return True


class TestTyped:
    @pytest.fixture
    def typed(self, cli, model, monkeypatch):
        """What each line that is typed gives, or an exception in place of it; where standard output is a file."""

        def run(*lines, options=()):
            left, asked = list(lines), []

            def read(prompt):
                asked.append(prompt)
                one = left.pop(0) if left else EOFError()
                if isinstance(one, BaseException):
                    raise one
                return one

            monkeypatch.setattr("builtins.input", read)
            args = ("chat", "--model", model, "--profile", "none", "--max-new-tokens", 9, *options)
            return *cli(*args, said=Keyboard()), asked

        return run

    def test_the_prompt_is_no_part_of_the_answers(self, typed, say):
        code, out, err, asked = typed(TEXTS[0], "/what")
        assert (code, out) == (0, say(TEXTS[:1])[1])  # an error changes no exit code here
        assert asked == [""] * 3
        assert err.count("> ") == 3

    def test_ctrl_c_at_the_prompt_drops_a_line(self, typed, say):
        code, out, err, _ = typed(KeyboardInterrupt(), TEXTS[0], KeyboardInterrupt())
        assert (code, out) == (0, say(TEXTS[:1])[1])
        assert err.count("\nCtrl-D or /exit ends the chat\n") == 2

    def test_ctrl_c_before_the_first_token(self, typed, say, monkeypatch):
        """The message is not kept, and the chat goes on as if it had not been said."""
        forward, calls = LeanRuntime.forward, []

        def interrupted(*given, **options):
            calls.append(1)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return forward(*given, **options)

        with monkeypatch.context() as patch:
            patch.setattr(LeanRuntime, "forward", interrupted)
            code, out, err, _ = typed(TEXTS[1], TEXTS[0])
        assert "interrupted before the answer began: the message is not kept\n" in err
        assert (code, out) == (0, "\n" + say(TEXTS[:1])[1])

    def test_what_is_no_text(self, typed, say):
        code, out, err, _ = typed(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "\udcff", TEXTS[0])
        assert (code, out) == (0, say(TEXTS[:1])[1])
        assert "error: that is not UTF-8 text\n" in err
        assert "error: the user's message is not valid Unicode text; give UTF-8\n" in err


def err_numbers(err, pattern):
    return sum(map(int, re.findall(pattern, err)))


class TestSave:
    def test_messages_as_json_lines(self, say, tmp_path, chat):
        conversation = chat.conversation(system="é ☃")
        for text in TEXTS[:2]:
            conversation.send(text, max_new_tokens=9)
        code, _, err = say([*TEXTS[:2], "/save my chat.jsonl"], "--system", "é ☃")
        assert (code, "5 messages are in my chat.jsonl, as JSON lines\n" in err) == (0, True)
        lines = (tmp_path / "my chat.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == conversation.messages
        assert "☃" in lines[0]

    def test_again_by_the_same_chat(self, say, tmp_path):
        code, _, _ = say([TEXTS[0], "/save a.jsonl", TEXTS[1], "/save a.jsonl"])
        assert (code, len((tmp_path / "a.jsonl").read_text().splitlines())) == (0, 4)

    def test_nothing_is_written_over(self, say, tmp_path):
        (tmp_path / "a.jsonl").write_text("mine")
        code, _, err = say([TEXTS[0], "/save a.jsonl", "/save .", "/save no/a.jsonl", f"/save {tmp_path}/b.jsonl"])
        assert code == 2
        assert "error: /save a.jsonl: the path exists; expected a new one, as files are not overwritten\n" in err
        assert "error: /save .: the path exists" in err
        assert re.search(r"error: \S*no/a.jsonl: the folder \S*no does not exist; make it first\n", err)
        assert (tmp_path / "a.jsonl").read_text() == "mine"
        assert len((tmp_path / "b.jsonl").read_text().splitlines()) == 2
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((), "model builtin: the tokenizer has no chat template"),
        (("--model", "/no/such"), "model /no/such: no such folder"),
        (("--system", ""), "model builtin: the tokenizer has no chat template"),
        (("--system", "\udcff"), "the system's message is not valid Unicode text"),
        (("--temperature", "-1"), "'--temperature'"),
        (("--set", "minp=1"), "GenerationConfig has no field 'minp'"),
        (("--controller", "fixed:k=0"), "expected a whole number from 1 to 64"),
        (("--profile", "no.yaml"), "profile no.yaml: no such file"),
        (("hello",), "unexpected extra argument"),
    ],
    ids=str,
)
def test_wrong_options_are_told_before_anything_is_loaded(cli, monkeypatch, args, told):
    monkeypatch.setattr("selfspec.llm.llm.load", lambda *_, **__: pytest.fail("loaded"))
    code, out, err = cli("chat", *args, said=TEXTS)
    assert (code, out) == (2, "")
    assert told in err
    assert len(err.splitlines()) == 1


def test_a_template_without_system_messages(cli, llm, tmp_path):
    save_with_template(llm, tmp_path / "m", "{{ messages[-1]['content'] }}")
    for args in (("chat",), ("generate", "x", "--chat")):
        code, _, err = cli(*args, "--model", "m", "--system", "Be brief.", said=TEXTS)
        told = "error: model m: the tokenizer's chat template leaves system messages out; do without one"
        assert (code, err.splitlines()[-1]) == (2, told)


def test_a_system_message_is_of_chats(cli):
    code, _, err = cli("generate", "x", "--system", "Be brief.")
    assert (code, err) == (2, "error: --system is for chats; expected --chat with it\n")
    code, _, err = cli("chat")
    assert (code, err) == (2, "error: standard input is closed; give it messages, each on a line\n")


@pytest.fixture
def terminal(tmp_path):
    """Open a terminal in which the chat is interrupted when so many tokens have come."""
    made = []

    def open_one(event, *args):
        program = [sys.executable, command.__file__, event, "chat", *map(str, args)]
        made.append(Terminal(program, cwd=tmp_path))
        return made[-1]

    yield open_one
    for one in made:
        one.kill()


def up_to(end):
    return lambda shown: shown.endswith(end)


def test_in_a_terminal(terminal, model, chat, tmp_path):
    """Prompts, answers and quiet lines; Ctrl-C ends an answer, whose beginning stays; Ctrl-D ends the chat with 0."""
    (tmp_path / "m").symlink_to(model)
    options = ("--model", "m", "--profile", "none", "--threads", "1", "--max-new-tokens", 30)
    shown = terminal("interrupted-text:36", *options)  # the sixth token of the second answer
    greeting = shown.until(up_to("> ")).replace("weights held in bfloat16, exactly\n", "")  # by the fastest layout
    assert greeting == "m: /help lists the commands, Ctrl-C ends an answer, Ctrl-D the chat\n> "
    conversation = chat.conversation()
    first = conversation.send(TEXTS[0], max_new_tokens=30).text
    shown.type(f"{TEXTS[0]}\n")
    answered = shown.until(up_to("allows more\n> "))
    assert re.fullmatch(
        rf"{TEXTS[0]}\n{re.escape(first)}\n\d+\.\d tokens/s, 30 tokens, cut: a larger --max-new-tokens allows more\n> ",
        answered,
    )
    assert re.search(r"\x1b\[2m\d+\.\d tokens/s, .*\x1b\[0m", shown.raw)  # dim
    shown.type(f"{TEXTS[1]}\n")
    broken = shown.until(up_to("interrupted\n> "))
    whole = conversation.send(TEXTS[1], max_new_tokens=30).text
    said = broken.removeprefix(f"{TEXTS[1]}\n").rsplit("\n", 2)[0]
    assert whole.startswith(said)
    assert 0 < len(said) < len(whole)
    shown.type("half a line\x03")
    assert "Ctrl-D or /exit ends the chat\n> " in shown.until(up_to("ends the chat\n> "))
    shown.type("/what\n")
    assert "error: there is no command /what" in shown.until(up_to("\n> "))
    shown.type("/save a.jsonl\n")
    shown.until(up_to("as JSON lines\n> "))
    shown.type("\x04")
    assert shown.end() == 0
    assert shown.shown().endswith("> \n")
    messages = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [one["content"] for one in messages] == [TEXTS[0], first, TEXTS[1], said]


def test_in_a_terminal_a_long_prompt_shows_how_far_it_is_read(terminal, model, chat, tmp_path):
    """The bar comes before the answer and is erased; the answer is that without chunks."""
    (tmp_path / "m").symlink_to(model)
    options = ("--model", "m", "--profile", "none", "--threads", "1", "--max-new-tokens", 5)
    shown = terminal("chunks:16", *options)
    shown.until(up_to("> "))
    text = " ".join(TEXTS * 4)
    shown.type(f"{text}\n")
    answered = shown.until(up_to("allows more\n> "))
    assert "reading the prompt" in answered
    answer = chat.conversation().send(text, max_new_tokens=5).text
    before, erased, after = shown.raw.rpartition("\x1b[1A\x1b[2K")
    assert "reading the prompt" in before
    assert erased
    assert ESCAPES.sub("", after).lstrip().startswith(answer.lstrip())
    shown.type("\x04")
    assert shown.end() == 0
