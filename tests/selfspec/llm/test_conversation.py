"""A conversation says what `chat` says of the same messages, and reads only what is new of them."""

from __future__ import annotations

import inspect

import pytest
from chats import TEMPLATE, with_template

import selfspec
from selfspec.basics.errors import BusyError, SelfspecError
from selfspec.drafters import PlainDrafter
from selfspec.llm.options import GenerateOptions

SKIP = selfspec.SkipSet((3, 5, 9), (7, 11))
TEXTS = ["import os", "def main(args):\n    x = 1", "class Parser:", "é\t☃ and 12"]
SAMPLED = {"temperature": 0.9, "top_p": 0.95}


@pytest.fixture
def chat(llm64):
    return with_template(llm64)


@pytest.fixture(scope="module")
def other(llm64):
    """The same model with another cache, for what is expected."""
    return with_template(llm64)


@pytest.fixture(params=["plain", "layer skip"])
def drafter(request, chat):
    return PlainDrafter() if request.param == "plain" else chat.layer_skip(SKIP, "fixed:k=4")


@pytest.fixture
def read(chat, monkeypatch):
    """How many tokens the prompts' passes read, one after the other."""
    forward, found = chat.runtime.forward, []

    def counting(tokens, *rest, **options):
        if options.get("logits", "all") != "all":
            found.append(tokens.numel())
        return forward(tokens, *rest, **options)

    monkeypatch.setattr(chat.runtime, "forward", counting)
    return found


def new_tokens(llm, text):
    """About as many as a message's own."""
    return len(llm.tokenizer(f"\n# user:\n{text}\n# assistant:\n").input_ids) + 3


class TestChat:
    def test_it_continues_what_the_template_makes_of_the_messages(self, chat):
        messages = [
            {"role": "system", "content": "Code."},
            {"role": "user", "content": "import os"},
            {"role": "assistant", "content": "import sys"},
            {"role": "user", "content": "class A:"},
        ]
        bos = chat.tokenizer.bos_token
        text = f"{bos}# system:\nCode.\n# user:\nimport os\n# assistant:\nimport sys\n# user:\nclass A:\n# assistant:\n"
        expected = chat.generate(text, max_new_tokens=20)
        assert chat.chat(messages, max_new_tokens=20).tokens == expected.tokens
        assert "".join(chat.chat_stream(messages, max_new_tokens=20)) == expected.text
        again = chat.chat(messages, max_new_tokens=20, drafter=chat.layer_skip(SKIP, "fixed:k=4"), probabilities=True)
        assert again.tokens == expected.tokens
        assert again.stats.drafted > 0
        assert all(event.probability is not None for event in again.events)

    def test_it_takes_the_fields_of_the_options(self, chat):
        fields = list(inspect.signature(GenerateOptions).parameters)
        for call in (selfspec.LLM.chat, selfspec.LLM.chat_stream):
            assert list(inspect.signature(call).parameters)[:2] == ["llm", "messages"]
            assert list(inspect.signature(call).parameters)[2:] == fields
            assert "messages" in call.__doc__ or "`chat`" in call.__doc__
        for call in (type(chat.conversation()).send, type(chat.conversation()).stream):
            assert list(inspect.signature(call).parameters) == ["conversation", "text", *fields]

    def test_nothing_of_it_is_kept(self, chat, read):
        for _ in range(2):
            chat.chat([{"role": "user", "content": "import os"}], max_new_tokens=4)
        assert read[0] == read[1] > 5


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("streamed", [False, True], ids=["sent", "streamed"])
def test_it_says_what_chat_says_of_the_same_messages(chat, other, drafter, read, sampled, streamed):
    conversation = chat.conversation(system="Write Python.")
    messages = [{"role": "system", "content": "Write Python."}]
    for turn, text in enumerate(TEXTS):
        options = {"max_new_tokens": 16, **({**SAMPLED, "seed": turn} if sampled else {})}
        messages.append({"role": "user", "content": text})
        expected = other.chat(messages, drafter=PlainDrafter(), **options)
        if streamed:
            stream = conversation.stream(text, drafter=drafter, **options)
            assert "".join(stream) == expected.text
            answer = stream.result
        else:
            answer = conversation.send(text, drafter=drafter, **options)
        messages.append({"role": "assistant", "content": expected.text})
        assert answer.tokens == expected.tokens
        assert conversation.messages == messages
        assert answer.stats.prompt == expected.stats.prompt
        assert answer.stats.prompt - answer.stats.num_cached == read[-1]
        assert turn == 0 or read[-1] <= new_tokens(chat, text) + 1
    assert len(read) == len(TEXTS)
    assert conversation.answers == len(TEXTS)
    assert answer.stats.prompt > 100


def test_an_answer_that_reads_otherwise_is_read_again(chat, other, read):
    """What is emitted and what the template makes of its text may be different tokens: those are compared."""
    tokenizer = chat.tokenizer
    first, second = (tokenizer(text).input_ids for text in ("im", "port os"))
    assert tokenizer("import os").input_ids != [*first, *second]

    said = [*first, *second]

    def forced(ids, scores):
        place = ids.shape[1] - length
        if place < len(said):
            scores = scores.new_full(scores.shape, -float("inf")).index_fill(1, ids.new_tensor([said[place]]), 0.0)
        return scores

    conversation = chat.conversation()
    length = len(conversation.prompt("x"))
    answer = conversation.send("x", max_new_tokens=len(said), logits_processor=[forced], drafter=PlainDrafter())
    assert answer.tokens == said
    assert conversation.messages[-1]["content"] == "import os"
    prompt = conversation.prompt("class A:")
    expected = other.chat([*conversation.messages, {"role": "user", "content": "class A:"}], max_new_tokens=9)
    answer = conversation.send("class A:", max_new_tokens=9)
    assert answer.tokens == expected.tokens
    assert length - 3 <= answer.stats.num_cached < length + len(said) - 1
    assert read[-1] == len(prompt) - answer.stats.num_cached


def test_stop_strings_and_end_tokens(chat, other, drafter):
    """The text ends before a stop string, and an end token is none of it; the next answer is chat's all the same."""
    whole = other.chat([{"role": "user", "content": "import os"}], max_new_tokens=40)
    stop = whole.text[9:14]
    conversation = chat.conversation()
    answer = conversation.send("import os", max_new_tokens=40, stop=stop, drafter=drafter)
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert conversation.messages[-1] == {"role": "assistant", "content": answer.text}
    end = whole.tokens[6]
    for options in ({"stop": stop}, {"settings": {"eos_token_id": end}}, {}):
        options = {"max_new_tokens": 24, **options}
        expected = other.chat([*conversation.messages, {"role": "user", "content": "import os"}], **options)
        answer = conversation.send("import os", drafter=drafter, **options)
        assert (answer.tokens, answer.text) == (expected.tokens, expected.text)
        assert answer.stats.num_cached > 10


def test_something_else_in_between_has_all_read_again(chat, other, drafter, read):
    conversation = chat.conversation()
    for between, text in enumerate(TEXTS[:3]):
        expected = other.chat([*conversation.messages, {"role": "user", "content": text}], max_new_tokens=12)
        answer = conversation.send(text, max_new_tokens=12, drafter=drafter)
        assert answer.tokens == expected.tokens
        assert answer.stats.num_cached == 0
        assert read[-1] == answer.stats.prompt
        if between:
            chat.generate("x = 1", max_new_tokens=3)
        else:
            chat.chat(conversation.messages[:1], max_new_tokens=3)


def test_two_conversations_keep_what_they_share(chat, other, drafter):
    """Turn about, on one cache: a system message that is both's is read once."""
    system = "import os\n" * 20
    both = [chat.conversation(system=system) for _ in range(2)]
    shared = len(chat.encode(f"{chat.tokenizer.bos_token}# system:\n{system}"))
    for turn, text in enumerate(TEXTS[:3]):
        for number, conversation in enumerate(both):
            own = f"{number}: {text}"
            expected = other.chat([*conversation.messages, {"role": "user", "content": own}], max_new_tokens=12)
            answer = conversation.send(own, max_new_tokens=12, drafter=drafter)
            assert answer.tokens == expected.tokens
            assert answer.stats.num_cached >= shared - 2 or (turn, number) == (0, 0)
            assert answer.stats.num_cached < answer.stats.prompt - 5


class TestBrokenOff:
    def test_by_the_reader(self, chat, other, drafter):
        """What was said so far stays, and the next answer is chat's of that; so for a stream that is dropped."""
        conversation, before = chat.conversation(), 0
        for end in ("close", "drop"):
            stream = conversation.stream("import os", max_new_tokens=60, drafter=drafter)
            for _ in range(3):
                next(stream)
            assert conversation.answers == before
            if end == "close":
                stream.close()
                assert conversation.messages[-1]["content"] == stream.result.text
            stream = None
            before += 1
            assert conversation.answers == before
            assert conversation.messages[-1]["content"]
            text = conversation.messages[-1]["content"]
            messages = [*conversation.messages, {"role": "user", "content": "class A:"}]
            answer = conversation.send("class A:", max_new_tokens=12, drafter=drafter)
            before += 1
            assert answer.tokens == other.chat(messages, max_new_tokens=12).tokens
            assert answer.stats.num_cached >= answer.stats.prompt - new_tokens(chat, f"class A: {text[-12:]}")

    @pytest.mark.parametrize("name", ["forward", "propose", "commit"])
    def test_in_the_middle_of_a_round(self, chat, other, drafter, monkeypatch, name):
        """By Ctrl-C wherever it falls."""
        conversation = chat.conversation()
        conversation.send("import os", max_new_tokens=12, drafter=drafter)
        for fail_at in (1, 2, 3, 5, 8):
            calls = 0
            owner = {"forward": chat.runtime, "propose": drafter, "commit": type(chat.runtime.cache)}[name]
            inner = getattr(owner, name)

            def interrupted(*given, inner=inner, fail_at=fail_at, **options):
                nonlocal calls
                calls += 1
                if calls == fail_at:
                    raise KeyboardInterrupt
                return inner(*given, **options)

            before = conversation.messages
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    conversation.send("class A:", max_new_tokens=60, drafter=drafter)
            after = conversation.messages
            assert after[: len(before)] == before
            assert len(after) - len(before) in (0, 2)
            messages = [*after, {"role": "user", "content": "x = 1"}]
            answer = conversation.send("x = 1", max_new_tokens=12, drafter=drafter)
            assert answer.tokens == other.chat(messages, max_new_tokens=12).tokens
            assert answer.stats.num_cached > 10

    def test_before_its_first_token(self, chat):
        """The message is not kept either; so where the model is busy, or was never asked."""
        conversation = chat.conversation()
        stream = conversation.stream("import os", max_new_tokens=8)
        stream.close()
        assert conversation.messages == []
        held = chat.stream("x", max_new_tokens=8)
        next(held)
        with pytest.raises(BusyError):
            conversation.send("import os", max_new_tokens=8)
        assert conversation.messages == []
        held.close()
        assert conversation.send("import os", max_new_tokens=8).text == conversation.messages[1]["content"]

    def test_an_answer_to_what_was_given_up_is_not_recorded(self, chat):
        """The conversation was reset, or went on, before the stream had ended."""
        conversation = chat.conversation()
        stream = conversation.stream("import os", max_new_tokens=30)
        next(stream)
        conversation.reset()
        list(stream)
        assert conversation.messages == []
        late = conversation.stream("import os", max_new_tokens=4)
        conversation.send("class A:", max_new_tokens=4)
        list(late)
        assert [one["content"] for one in conversation.messages[::2]] == ["class A:"]


def test_a_reset_keeps_the_system_message(chat, read):
    conversation = chat.conversation(system="Code.")
    first = conversation.send("import os", max_new_tokens=8)
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Code."}]
    assert conversation.answers == 0
    again = conversation.send("import os", max_new_tokens=8)
    assert again.tokens == first.tokens
    assert again.stats.num_cached == again.stats.prompt - 1
    assert read == [first.stats.prompt, 1]  # the prompt was there, but its last token is read


def test_the_messages_are_a_copy(chat):
    conversation = chat.conversation()
    conversation.send("import os", max_new_tokens=4)
    conversation.messages[0]["content"] = "other"
    conversation.messages.clear()
    assert conversation.messages[0]["content"] == "import os"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (["x"], "a chat message is a text; got list"),
        ("\ud800", "not valid Unicode"),
    ],
    ids=["no text", "no Unicode"],
)
def test_wrong_messages_change_nothing(chat, text, told):
    conversation = chat.conversation()
    conversation.send("import os", max_new_tokens=4)
    before = conversation.messages
    for call in (conversation.send, conversation.stream):
        with pytest.raises(SelfspecError, match=told):
            call(text)
    with pytest.raises(SelfspecError, match="temperature -1"):
        conversation.send("x", temperature=-1)
    assert conversation.messages == before


def test_a_conversation_that_outgrows_the_context_loses_nothing(chat, other):
    context = chat.runtime.skeleton.context
    conversation = chat.conversation()
    conversation.send("x = 1\n" * 240, max_new_tokens=8)
    before = conversation.messages
    with pytest.raises(SelfspecError, match=rf"outgrow the model's context \({context} positions\): at most \d+ new"):
        conversation.send("y = 2", max_new_tokens=200)
    with pytest.raises(SelfspecError, match="no new token fits after this prompt"):
        conversation.send("y = 2\n" * 60, max_new_tokens=1)
    assert conversation.messages == before
    left = context - len(conversation.prompt("y = 2")) + 1
    options = chat.fit_options(conversation.prompt("y = 2"), GenerateOptions(max_new_tokens=500))
    assert options.max_new_tokens == left
    assert chat.fit_options(conversation.prompt("y = 2"), GenerateOptions(max_new_tokens=5)).max_new_tokens == 5
    answer = conversation.run("y = 2", options)
    assert answer.stats.num_cached > 700
    assert answer.tokens == other.chat([*before, {"role": "user", "content": "y = 2"}], max_new_tokens=left).tokens
    with pytest.raises(SelfspecError, match="outgrow"):
        chat.fit_options(conversation.prompt("z"), GenerateOptions())


def test_a_model_that_is_none_for_chats(llm):
    for call in (
        llm.conversation,
        lambda: llm.conversation(system="x"),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
    ):
        with pytest.raises(SelfspecError, match="the tokenizer has no chat template"):
            call()
    with pytest.raises(SelfspecError, match="a chat message is a text; got int"):
        with_template(llm).conversation(system=3)


def test_a_template_that_tells_the_past_otherwise(chat, other, llm64):
    """One that leaves out all but the last messages, as some do with what a model thought: tokens are compared."""
    short = TEMPLATE.replace("for m in messages", "for m in messages[-3:]")
    mine, theirs = (with_template(llm64, short) for _ in range(2))
    conversation = mine.conversation()
    for text in TEXTS:
        messages = [*conversation.messages, {"role": "user", "content": text}]
        assert conversation.send(text, max_new_tokens=9).tokens == theirs.chat(messages, max_new_tokens=9).tokens
