"""What is served is what `selfspec generate` says: over a batch that decodes with the built-in model, in float64."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from math import exp

import openai
import pytest
import torch
from chats import with_template
from rude import misbehave
from servers import served, until
from wants import needs

import selfspec
from selfspec.drafters import make_drafter
from selfspec.llm.batch import Batch

PROMPTS = ["import os\n\ndef main(args):\n", "class Parser:\n    ", "# a list of words\nWORDS = ["]
MESSAGES = [{"role": "user", "content": "def read("}]
NEW = 24


@pytest.fixture(scope="module")
def model(llm64) -> selfspec.LLM:
    """The built-in model in float64 with a chat template, drafting with its profile."""
    made = with_template(llm64)
    return selfspec.wrap(llm64.model, made.tokenizer, profile="stdlib-llama-3.7m", name="toy")


@pytest.fixture(scope="module")
def one(model):
    batch = Batch(model, rows=4, adaptive=False, make=lambda runtime: make_drafter(runtime, model.profile))
    with served(model, batch, queue=200) as made:  # which drafts, however fast this machine is
        yield made


@pytest.fixture(scope="module")
def client(one):
    with openai.OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_greedy_texts_together_are_those_of_each_alone(client, model, one):
    answer = client.completions.create(model="toy", prompt=PROMPTS, max_tokens=NEW, temperature=0)
    alone = [model.generate(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    assert [choice.text for choice in answer.choices] == [each.text for each in alone]
    assert answer.usage.completion_tokens == sum(len(each.tokens) for each in alone)
    assert sum(one.batches[0].counters.by_source.values()) > 0, "some of it was drafted"


def test_a_seed_gives_generates_text_streamed_or_not(client, model):
    how = {"model": "toy", "prompt": PROMPTS[0], "max_tokens": NEW, "temperature": 0.9, "top_p": 0.95}
    alone = {
        seed: model.generate(PROMPTS[0], max_new_tokens=NEW, temperature=0.9, top_p=0.95, seed=seed).text
        for seed in (7, 8, 9)
    }
    assert len(set(alone.values())) == 3
    answer = client.completions.create(**how, seed=7, n=3)
    assert [choice.text for choice in answer.choices] == list(alone.values()), "each further text with the next seed"
    pieces = client.completions.create(**how, seed=7, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == alone[7]


def test_chats_and_stops(client, model):
    alone = model.chat(MESSAGES, max_new_tokens=NEW)
    how = {"model": "toy", "messages": MESSAGES, "max_tokens": NEW, "temperature": 0}
    assert client.chat.completions.create(**how).choices[0].message.content == alone.text
    stop = alone.text[5:8]
    expected = model.chat(MESSAGES, max_new_tokens=NEW, stop=stop)
    choice = client.chat.completions.create(**how, stop=stop).choices[0]
    assert (choice.message.content, choice.finish_reason) == (expected.text, "stop")


def test_log_probabilities_are_the_models_own(client, model):
    how = {"model": "toy", "prompt": PROMPTS[1], "max_tokens": 12, "temperature": 0}
    told = client.completions.create(**how, logprobs=3).choices[0].logprobs
    alone = model.generate(PROMPTS[1], max_new_tokens=12, probabilities=True)
    assert [exp(logprob) for logprob in told.token_logprobs] == pytest.approx(
        [event.probability for event in alone.events], rel=1e-5
    )
    for token, logprob, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert max(top, key=top.get) == token
        assert top[token] == pytest.approx(logprob)


def test_penalties_and_biases(client, model):
    how = {"model": "toy", "prompt": PROMPTS[0], "max_tokens": NEW, "temperature": 0}
    plain = client.completions.create(**how).choices[0].text
    first = model.encode(PROMPTS[0] + plain)[len(model.encode(PROMPTS[0]))]
    banned = client.completions.create(**how, logit_bias={str(first): -100}).choices[0].text
    assert banned[:3] != plain[:3]
    ids = model.generate(PROMPTS[0], max_new_tokens=NEW).tokens
    assert len(set(ids)) < len(ids), "something is said twice"
    varied = client.completions.create(**how, frequency_penalty=2, presence_penalty=2, logprobs=0).choices[0]
    assert len(set(varied.logprobs.tokens)) > len(set(ids))
    repeated = client.completions.create(**how, extra_body={"repetition_penalty": 1.5}).choices[0].text
    assert repeated == model.generate(PROMPTS[0], max_new_tokens=NEW, settings={"repetition_penalty": 1.5}).text


@needs("llguidance", "llguidance")
def test_a_schema_is_followed(client, model):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "maximum": 99}},
        "required": ["name", "size"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},  # of which a small model finds no end
    }
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    how = {"model": "toy", "messages": MESSAGES, "max_tokens": 80, "temperature": 0.8, "seed": 3}
    choice = client.chat.completions.create(**how, response_format=form).choices[0]
    assert set(json.loads(choice.message.content)) == {"name", "size"}
    assert choice.finish_reason == "stop"
    guide = model.guide(json_schema=schema)
    assert choice.message.content == model.chat(MESSAGES, max_new_tokens=80, temperature=0.8, seed=3, guide=guide).text


def test_a_common_beginning_is_read_once(client, one, model):
    prompt = "x = 1\n" * 60
    before = one.batches[0].counters.reused
    answer = client.completions.create(model="toy", prompt=prompt, n=4, max_tokens=2, temperature=0)
    assert len({choice.text for choice in answer.choices}) == 1
    assert one.batches[0].counters.reused > before
    assert answer.usage.prompt_tokens_details.cached_tokens < answer.usage.prompt_tokens // 2, "what others left"
    assert answer.usage.prompt_tokens == len(model.encode(prompt))
    again = client.completions.create(model="toy", prompt=prompt, n=2, max_tokens=2, temperature=0)
    assert again.usage.prompt_tokens // 2 < again.usage.prompt_tokens_details.cached_tokens < again.usage.prompt_tokens


def test_who_goes_away_leaves_memory_as_it_was(client, one):
    batch = one.batches[0]
    until(lambda: one.service.idle)
    for _ in range(3):
        stream = client.completions.create(model="toy", prompt=PROMPTS, n=2, max_tokens=600, temperature=1, stream=True)
        next(iter(stream))
        stream.close()
        until(lambda: one.service.idle)
    assert batch.idle
    assert batch.free == batch.num_slots
    assert client.completions.create(model="toy", prompt="x", max_tokens=1).choices


def test_rude_clients_do_not_change_what_others_get(client, one, model):
    batch, alone = one.batches[0], [model.generate(prompt, max_new_tokens=NEW).text for prompt in PROMPTS]
    with ThreadPoolExecutor(8) as all_at_once:
        rude = [all_at_once.submit(misbehave, one.port, number) for number in range(60)]
        for _ in range(3):
            answer = client.completions.create(model="toy", prompt=PROMPTS, max_tokens=NEW, temperature=0)
            assert [choice.text for choice in answer.choices] == alone
        for each in rude:
            each.result()
    until(lambda: one.service.idle)
    assert batch.idle
    assert batch.free == batch.num_slots


def test_two_replicas(model, llm64):
    other = selfspec.wrap(llm64.model, model.tokenizer, profile="none", name="toy")
    batches = [Batch(model, rows=2), Batch(other, rows=2)]
    with served(model, *batches, rows=2) as one, openai.OpenAI(base_url=f"{one.url}/v1", api_key="-") as client:
        asked = [prompt for prompt in PROMPTS for _ in range(2)]
        answer = client.completions.create(model="toy", prompt=asked, max_tokens=NEW, temperature=0)
        alone = [model.generate(prompt, max_new_tokens=NEW).text for prompt in asked]
        assert [choice.text for choice in answer.choices] == alone
        assert all(batch.counters.tokens for batch in batches)


def test_where_tokens_begin_is_counted_in_characters_of_the_text(client, model):
    """Some tokens are parts of a character, and a special token is no part of the text."""
    ids = [model.tokenizer.all_special_ids[0], *model.encode("x = '\N{GRINNING FACE}\xe9', y")]
    how = {"model": "toy", "prompt": [ids], "max_tokens": 4, "logprobs": 1, "echo": True, "temperature": 0}
    choice = client.completions.create(**how).choices[0]
    whole = [text if not text.startswith("bytes:") else "" for text in choice.logprobs.tokens]
    assert "" in whole
    whole[0] = ""
    places = choice.logprobs.text_offset
    assert [choice.text[at : at + len(text)] for at, text in zip(places, whole, strict=True)] == whole
    streamed = [
        place
        for piece in client.completions.create(**how, stream=True)
        if piece.choices[0].logprobs is not None
        for place in piece.choices[0].logprobs.text_offset
    ]
    assert streamed == places


def test_echo_with_log_probabilities_scores_the_prompt(client, model):
    """As evaluation harnesses score answers: each prompt token given those before it, in one prefill."""
    ids = model.encode(PROMPTS[0])
    with torch.no_grad():
        logits = model.model(torch.tensor([ids])).logits[0]
    every = logits.log_softmax(-1)
    expected = [float(every[i, token]) for i, token in enumerate(ids[1:])]
    for new in (0, 1):
        how = {"model": "toy", "prompt": [ids], "max_tokens": new, "logprobs": 2, "echo": True, "temperature": 0}
        answer = client.completions.create(**how)
        choice, told = answer.choices[0], answer.choices[0].logprobs
        assert choice.text == model.tokenizer.decode(
            [*ids, *model.generate(ids, max_new_tokens=1).tokens][: len(ids) + new]
        )
        assert (answer.usage.completion_tokens, choice.finish_reason) == (new, "length")
        assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(ids) + new
        assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
        assert told.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-6)
        best = every[: len(ids) - 1].max(-1).values.tolist()
        assert [max(top.values()) for top in told.top_logprobs[1 : len(ids)]] == pytest.approx(best, abs=1e-6)
        assert "".join(told.tokens) == choice.text
        assert [
            choice.text[at : at + len(t)] for at, t in zip(told.text_offset, told.tokens, strict=True)
        ] == told.tokens
        pieces = list(client.completions.create(**how, stream=True))
        assert "".join(piece.choices[0].text for piece in pieces) == choice.text
        streamed = [
            one for piece in pieces if piece.choices[0].logprobs for one in piece.choices[0].logprobs.token_logprobs
        ]
        assert streamed == told.token_logprobs
    assert model.generate(ids, max_new_tokens=4).tokens == model.generate(ids, max_new_tokens=4).tokens
