"""The OpenAI API as its own client and curl see it, over a batch whose texts are known."""

from __future__ import annotations

import json
import subprocess
from math import log

import openai
import pytest
from batches import ToyBatch, continued
from servers import served, until

from selfspec.llm.batch import Batch
from selfspec.llm.batch_memory import slot_bytes

PROMPT = "def main(args):"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(toy):
    with openai.OpenAI(base_url=f"{toy.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(chatting):
    """What a toy batch makes of a prompt."""

    def text(prompt, tokens):
        ids = chatting.encode(prompt)
        return chatting.tokenizer.decode(continued(ids, tokens), skip_special_tokens=True)

    return text


def curl(*args):
    done = subprocess.run(["curl", "-sS", "--max-time", "60", *args], capture_output=True, text=True, check=True)
    return done.stdout


def post(url, body, *args):
    return curl(*args, url, "-H", "Content-Type: application/json", "-d", json.dumps(body))


def test_a_completion(client, expected, chatting):
    answer = client.completions.create(model="toy", prompt=PROMPT, max_tokens=7)
    assert answer.object == "text_completion"
    assert answer.model == "toy"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == expected(PROMPT, 7)
    assert answer.choices[0].finish_reason == "length"
    prompt = len(chatting.encode(PROMPT))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 7)
    assert answer.usage.total_tokens == prompt + 7


def test_a_chat(client, expected):
    answer = client.chat.completions.create(model="alias", messages=MESSAGES, max_completion_tokens=9)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "alias"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected(MESSAGES, 9)


def test_contents_may_come_in_parts_and_developers_are_systems(client, expected):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts, "name": "me"}]
    answer = client.chat.completions.create(model="toy", messages=messages, max_tokens=20)
    told = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    assert answer.choices[0].message.content == expected(told, 20)


def test_what_an_answer_holds_can_be_said_again(client):
    said = client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=3).choices[0].message
    again = [*MESSAGES, said, {"role": "user", "content": "More"}]
    assert client.chat.completions.create(model="toy", messages=again, max_tokens=3).choices[0].finish_reason


def test_streams_say_what_whole_answers_say(client, expected):
    pieces = list(client.completions.create(model="toy", prompt=PROMPT, max_tokens=7, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == expected(PROMPT, 7)
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert len({piece.id for piece in pieces}) == 1

    pieces = list(client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=7, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert all(piece.choices[0].delta.role is None for piece in pieces[1:])
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected(MESSAGES, 7)
    assert {piece.object for piece in pieces} == {"chat.completion.chunk"}


def test_a_stream_tells_usage_where_asked(client):
    how = {"model": "toy", "prompt": PROMPT, "max_tokens": 3, "stream": True}
    *pieces, last = client.completions.create(**how, stream_options={"include_usage": True})
    assert {piece.usage for piece in pieces} == {None}
    assert last.choices == []
    assert last.usage.completion_tokens == 3
    assert all(piece.usage is None for piece in client.completions.create(**how))


def test_a_stream_tells_sources_where_asked(client, expected):
    how = {"model": "toy", "messages": MESSAGES, "max_tokens": 6, "stream": True}
    pieces = list(client.chat.completions.create(**how, stream_options={"selfspec": True}))
    told = [piece.model_extra["selfspec"] for piece in pieces]
    assert "".join(text for one in told for _, text in one["spans"]) == expected(MESSAGES, 6)
    assert {origin for one in told for origin, _ in one["spans"]} == {"plain", "accepted draft"}
    assert told[-1] | {"seconds": 0} == told[-1] | {"tokens": 6, "drafted": 3, "accepted": 3, "rounds": 6, "seconds": 0}
    assert told[-1]["finish"] == "length"
    assert all("selfspec" not in piece.model_extra for piece in client.chat.completions.create(**how))


def test_several_prompts_and_texts_for_each(client, expected, chatting):
    prompts = ["import os", "class A:"]
    answer = client.completions.create(model="toy", prompt=prompts, n=2, max_tokens=5)
    texts = [expected(prompt, 5) for prompt in prompts]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [texts[0], texts[0], texts[1], texts[1]]
    assert answer.usage.prompt_tokens == sum(len(chatting.encode(prompt)) for prompt in prompts), "each counted once"
    assert answer.usage.completion_tokens == 20

    ids = [chatting.encode(prompt) for prompt in prompts]
    assert [one.text for one in client.completions.create(model="toy", prompt=ids, max_tokens=5).choices] == texts
    assert client.completions.create(model="toy", prompt=ids[0], max_tokens=5).choices[0].text == texts[0]

    streamed = dict.fromkeys(range(4), "")
    for piece in client.completions.create(model="toy", prompt=prompts, n=2, max_tokens=5, stream=True):
        streamed[piece.choices[0].index] += piece.choices[0].text
    assert list(streamed.values()) == [texts[0], texts[0], texts[1], texts[1]]


def test_texts_end_before_stop_strings(client, expected):
    text = expected(PROMPT, 30)
    stop = text[9:12]
    assert text.index(stop) > 0
    for stops in (stop, ["never said", stop]):
        choice = client.completions.create(model="toy", prompt=PROMPT, max_tokens=30, stop=stops).choices[0]
        assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_echo(client, expected):
    how = {"model": "toy", "prompt": PROMPT, "max_tokens": 4, "echo": True}
    assert client.completions.create(**how).choices[0].text == PROMPT + expected(PROMPT, 4)
    pieces = client.completions.create(**how, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == PROMPT + expected(PROMPT, 4)


def test_log_probabilities(client, expected):
    answer = client.completions.create(model="toy", prompt=PROMPT, max_tokens=5, logprobs=2).choices[0]
    told = answer.logprobs
    assert "".join(told.tokens) == answer.text == expected(PROMPT, 5)
    assert told.token_logprobs == [log(0.5)] * 5
    assert [len(top) for top in told.top_logprobs] == [2] * 5
    assert min(min(top.values()) for top in told.top_logprobs) == -9999, "minus infinity is no JSON"
    assert [answer.text[at : at + len(t)] for at, t in zip(told.text_offset, told.tokens, strict=True)] == told.tokens

    how = {"model": "toy", "messages": MESSAGES, "max_tokens": 5, "logprobs": True, "top_logprobs": 1}
    answer = client.chat.completions.create(**how).choices[0]
    assert "".join(one.token for one in answer.logprobs.content) == answer.message.content
    assert all(bytes(one.bytes).decode() == one.token for one in answer.logprobs.content)
    assert [[top.token for top in one.top_logprobs] for one in answer.logprobs.content] == [
        [one.token] for one in answer.logprobs.content
    ]
    pieces = client.chat.completions.create(**how, stream=True)
    told = [piece.choices[0].logprobs for piece in pieces]
    assert told[-1] is None, "the finish"
    streamed = [one for logprobs in told[:-1] for one in logprobs.content]
    assert streamed == answer.logprobs.content


def test_a_token_within_a_character_is_told_as_bytes(client, chatting):
    ids = chatting.encode("é漢")
    whole = client.completions.create(model="toy", prompt=ids, max_tokens=len(ids), logprobs=0).choices[0].logprobs
    raw = b"".join(map(bytes, whole.model_extra["bytes"]))
    spelt = dict(zip(continued(ids, len(ids)), map(bytes, whole.model_extra["bytes"]), strict=True))
    assert b"".join(spelt[i] for i in ids).decode().strip() == "é漢"
    assert any(token.startswith("bytes:\\x") for token in whole.tokens)
    assert len(raw) >= 5


def test_models(client):
    assert [model.id for model in client.models.list()] == ["toy", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another/model")


def test_every_answer_has_an_id(client, toy):
    raw = client.completions.with_raw_response.create(model="toy", prompt=PROMPT, max_tokens=2)
    name = raw.headers["x-request-id"]
    assert raw.parse().id == f"cmpl-{name}"
    assert raw.parse()._request_id == name
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="toy", prompt="")
    assert wrong.value.request_id not in (None, name)


def test_what_changes_no_text_is_taken(client, expected):
    how = {"user": "me", "metadata": {"a": "b"}, "store": True, "seed": None, "tools": None, "n": None}
    answer = client.chat.completions.create(
        model="toy", messages=MESSAGES, max_tokens=4, extra_body={**how, "tool_choice": "none", "modalities": ["text"]}
    )
    assert answer.choices[0].message.content == expected(MESSAGES, 4)


def test_an_error_is_the_clients_own(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="gpt-5", prompt=PROMPT)
    assert error.value.code == "model_not_found"
    assert error.value.param == "model"
    assert error.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="tools are not served"):
        client.chat.completions.create(
            model="toy", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
        )


def test_curl(toy, expected):
    body = {"model": "toy", "prompt": PROMPT, "max_tokens": 4}
    assert json.loads(post(f"{toy.url}/v1/completions", body))["choices"][0]["text"] == expected(PROMPT, 4)
    lines = post(f"{toy.url}/v1/completions", {**body, "stream": True}, "-N").split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected(PROMPT, 4)
    assert json.loads(curl(f"{toy.url}/health")) == {"status": "ok", "running": 0, "waiting": 0}


def test_one_line_a_request_in_the_log(toy, client):
    toy.log.clear()
    client.completions.create(model="toy", prompt=PROMPT, max_tokens=4)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="toy", prompt=PROMPT, max_tokens=0)
    curl(f"{toy.url}/health")
    until(lambda: len(toy.log) == 2)
    good, wrong = toy.log
    assert json.loads(json.dumps(good)) == good
    assert {name: good[name] for name in ("status", "tokens", "finish", "drafted", "accepted", "stream")} == {
        "status": 200,
        "tokens": 4,
        "finish": "length",
        "drafted": 2,
        "accepted": 2,
        "stream": False,
    }
    assert good["seconds"] > good["first_token_seconds"] > good["queue_seconds"] > 0
    assert good["tokens_per_second"] > 0
    assert wrong["status"] == 400
    assert wrong["error"].startswith("max_tokens:")


def test_replicas_share_one_queue(chatting, expected):
    batches = [ToyBatch(chatting, rows=2, seconds=0.01) for _ in range(2)]
    with served(chatting, *batches, rows=2) as one, openai.OpenAI(base_url=f"{one.url}/v1", api_key="-") as client:
        answer = client.completions.create(model="toy", prompt=PROMPT, n=6, max_tokens=8)
        assert {choice.text for choice in answer.choices} == {expected(PROMPT, 8)}
        assert [batch.most for batch in batches] == [2, 2]
        assert sum(batch.counters.tokens for batch in batches) == 48


def test_equivalent_numbers(client):
    """As clients send them: whole numbers as floats, no seed, no stop; and top_p 0 is greedy."""
    greedy = client.completions.create(model="toy", prompt=PROMPT, max_tokens=5, temperature=0).choices[0].text
    same = {"model": "toy", "prompt": PROMPT, "max_tokens": 5.0, "n": 1.0, "seed": -1, "stop": ""}
    for how in ({"temperature": 0}, {"temperature": 1e-7}, {"top_p": 0}):
        assert client.completions.create(**same, **how).choices[0].text == greedy


def test_the_finish_comes_in_an_event_of_its_own(client):
    events = list(client.completions.create(model="toy", prompt=PROMPT, max_tokens=1, stream=True))
    assert [event.choices[0].finish_reason for event in events] == [None, "length"]
    assert events[0].choices[0].text
    assert events[1].choices[0].text == ""


def test_a_limit_that_is_left_out_is_what_fits(llm):
    """Of context, memory and max_model_len the least; what the server tells as its limit is one that it serves."""
    batch = Batch(llm, rows=1, memory=400 * slot_bytes(llm.runtime) / 2**30)
    with served(llm, batch) as one, openai.OpenAI(base_url=f"{one.url}/v1", api_key="-", max_retries=0) as client:
        most = client.models.list().data[0].max_model_len
        assert most < llm.runtime.skeleton.context
        ids = [5] * 40
        answer = client.completions.create(model="toy", prompt=ids, temperature=0)
        assert answer.usage.completion_tokens <= most - 40
        assert client.completions.create(model="toy", prompt=[5] * (most - 1), max_tokens=1, temperature=0).choices
        with pytest.raises(openai.BadRequestError, match="expected at most"):
            client.completions.create(model="toy", prompt=ids, max_tokens=most - 39)
    limited = served(llm, Batch(llm, rows=2), max_model_len=50)
    with limited as one, openai.OpenAI(base_url=f"{one.url}/v1", api_key="-", max_retries=0) as client:
        assert client.models.list().data[0].max_model_len == 50
        answer = client.completions.create(model="toy", prompt=[5] * 40, temperature=0)
        assert answer.usage.completion_tokens <= 10
