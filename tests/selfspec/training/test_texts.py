"""The texts to learn from: the model's own, each what it is alone, kept in files that outlive a kill."""

from __future__ import annotations

import pytest
import torch
from chats import with_template
from models import plain, small

from selfspec.basics.errors import SelfspecError
from selfspec.runtime.forward import LeanRuntime
from selfspec.training.texts import Beginning, TextStore, UserTurns, beginnings, layers_of, make, synthetic_beginning

VOCABULARY = 11
PROMPTS = [[1, 4, 9], [7], [3, 3, 0, 5]]


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(small(VOCABULARY, seed=2))


def made(runtime, folder, *, most, go_on=lambda: True, rows=3):
    texts = TextStore(folder)
    begin = (Beginning(tuple(PROMPTS[n % 3])) for n in range(10**6))
    make(runtime, texts, begin, max_new_tokens=8, most=most, keep_going=go_on, rows=rows)
    return texts


def test_greedy_texts_are_plain_decodings(runtime, tmp_path):
    texts = made(runtime, tmp_path, most=7)
    assert sorted(texts.index) == list(range(7))
    for number in (0, 2, 4, 6):  # the others are sampled
        prompt = PROMPTS[number % 3]
        text = texts.read(number)
        assert text.tokens.tolist() == [*prompt, *plain(runtime, prompt, 8)]
        assert text.answer == len(prompt)


def test_texts_end_with_the_context(tmp_path):
    model = small(VOCABULARY, seed=2)
    model.config.max_position_embeddings = 12
    prompts = [[1, 4, 2, 9, 3], list(range(11))]
    texts = TextStore(tmp_path)
    begin = (Beginning(tuple(prompts[n % 2])) for n in range(10**6))
    make(LeanRuntime(model), texts, begin, max_new_tokens=100, most=4, rows=2)
    assert [len(texts.tokens(number)) for number in range(4)] == [13] * 4


def test_streams_are_those_that_leave_the_layers(runtime, tmp_path):
    texts = made(runtime, tmp_path, most=2)
    text = texts.read(1)
    layers = layers_of(runtime.layers)
    with runtime.session(32):
        hidden = runtime.forward(text.tokens[None], 0, hidden=layers).hidden
    assert len(text.streams) >= len(text.tokens) - 1
    for i, layer in enumerate(layers):
        whole = hidden[layer][0, : len(text.streams)].bfloat16()
        torch.testing.assert_close(text.streams[:, i], whole, atol=1e-2, rtol=1e-2)
    part = texts.read(1, 2, 5)
    assert torch.equal(part.tokens, text.tokens[2:5])
    assert torch.equal(part.streams, text.streams[2:5])
    assert (texts.tokens(1).tolist(), texts.pairs(1, 3)) == (text.tokens.tolist(), text.pairs(3))


@pytest.mark.parametrize(("layers", "kept"), [(1, (1,)), (2, (1, 2)), (3, (2, 3)), (8, (2, 4, 8)), (30, (2, 15, 30))])
def test_a_low_a_middle_and_the_last_layer(layers, kept):
    assert layers_of(layers) == kept


def test_what_was_made_is_made_once(runtime, tmp_path):
    left = iter([True] * 12 + [False] * 9)
    cut = made(runtime, tmp_path, most=5, go_on=lambda: next(left))
    done = {number: cut.read(number).tokens for number in cut.index}
    whole = made(runtime, tmp_path, most=5)
    assert sorted(whole.index) == list(range(5))
    assert done
    assert all(torch.equal(whole.read(number).tokens, tokens) for number, tokens in done.items())


def test_so_many_are_the_first_ones_whatever_else_is_there(runtime, tmp_path):
    made(runtime, tmp_path, most=12)
    assert sorted(TextStore(tmp_path, 5).index) == list(range(5))
    assert len(TextStore(tmp_path)) == 12


def test_a_torn_file_is_left_out(runtime, tmp_path):
    made(runtime, tmp_path, most=3)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:40])
    assert not len(TextStore(tmp_path))
    assert len(made(runtime, tmp_path, most=3)) == 3


def test_some_are_held_out(runtime, tmp_path):
    texts = made(runtime, tmp_path, most=20)
    assert texts.numbers(held_out=True) == [0, 16]
    assert set(texts.numbers(held_out=True)).isdisjoint(texts.numbers(held_out=False))


def test_an_instruct_model_makes_up_users_turns(llm):
    end = llm.tokenizer.eos_token
    ending = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}" + end + "{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    chat = with_template(llm, ending)
    own = synthetic_beginning(chat.tokenizer, chat.runtime.skeleton.ends, None)
    assert chat.tokenizer.decode(own.tokens) == "<user>"
    assert chat.tokenizer.decode(own.turn) == f"{end}<assistant>"


def test_a_template_that_ends_turns_otherwise_is_not_followed(llm):
    chat = with_template(llm)
    assert synthetic_beginning(chat.tokenizer, frozenset([2]), 7) == Beginning((7,))


def test_a_turn_is_ended_by_the_template():
    turns = UserTurns(Beginning((1, 2), (9, 4, 5)), 0.0)
    scores = torch.tensor([[0.0, 3.0, 1.0, 0, 0, 0, 0, 0, 0, 0, 0]])

    def best(said):
        return int(turns(torch.tensor([[1, 2, *said]]), scores.clone()).argmax())

    assert torch.equal(turns(torch.tensor([[1, 2, 7]]), scores), scores)  # the user speaks freely
    assert [best([7, 9]), best([7, 9, 4]), best([7, 9, 4, 5]), best([7] * 96)] == [4, 5, 1, 9]
    assert not turns.answering([7, 9, 4])
    assert turns.answering([7, 9, 4, 5])


def test_prompts_come_round_and_round_in_an_order_by_seed():
    def first(seed):
        begin = beginnings(PROMPTS, None, seed=seed)
        return [next(begin).tokens for _ in range(6)]

    assert sorted(first(0)[:3]) == sorted(map(tuple, PROMPTS))
    assert sorted(first(0)[3:]) == sorted(map(tuple, PROMPTS))
    assert first(0) == first(0)


def test_nothing_to_begin_with():
    tokenizer = type("Tokenizer", (), {"chat_template": None})()
    assert synthetic_beginning(tokenizer, frozenset([5, 3]), None).tokens == (3,)
    with pytest.raises(SelfspecError, match="give prompts with --prompts"):
        synthetic_beginning(tokenizer, frozenset(), None)


def test_texts_that_no_folder_can_be_made_for_are_an_error_of_one_line(runtime, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SelfspecError, match="file/texts: cannot be made"):
        made(runtime, tmp_path / "file" / "texts", most=2)
