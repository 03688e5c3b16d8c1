from __future__ import annotations

import copy

import pytest
from chats import TEMPLATE, with_template
from tokenizers.processors import TemplateProcessing

from selfspec import builtin
from selfspec.basics.errors import SelfspecError
from selfspec.llm.prompt_encoding import check_chat, encode, fit, fit_prompt, warn_if_cut


@pytest.fixture
def chat(llm):
    """The built-in model with a chat template, and a tokenizer that begins every text with BOS."""
    made = with_template(llm)
    bos = made.tokenizer.bos_token
    made.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, made.tokenizer.bos_token_id)]
    )
    return made


def test_a_message_begins_with_one_bos_token(chat):
    ids = encode(chat, "Write a class.", chat=True)
    rendered = f"{chat.tokenizer.bos_token}# user:\nWrite a class.\n# assistant:\n"
    assert chat.tokenizer.decode(ids) == rendered
    assert ids.count(chat.tokenizer.bos_token_id) == 1
    assert chat.encode(rendered).count(chat.tokenizer.bos_token_id) == 2  # what encoding the text would give
    assert encode(chat, "Write a class.") == chat.encode("Write a class.")


def test_a_system_message_comes_first(chat):
    ids = encode(chat, "Write a class.", chat=True, system="Be brief.")
    rendered = f"{chat.tokenizer.bos_token}# system:\nBe brief.\n# user:\nWrite a class.\n# assistant:\n"
    assert chat.tokenizer.decode(ids) == rendered
    messages = [{"role": "user", "content": "Write a class."}]
    assert encode(chat, messages, chat=True, system="Be brief.") == ids
    own = [{"role": "system", "content": "Be brief."}, *messages]
    assert encode(chat, own, chat=True, system="Be long.") == ids


def test_a_long_message_keeps_both_ends(chat):
    context = chat.runtime.skeleton.context
    whole = encode(chat, "x = 1\n" * 2000, chat=True)
    ids = fit_prompt(chat, "x = 1\n" * 2000, 24, chat=True)
    assert len(ids) == context - 24
    assert chat.tokenizer.decode(ids).endswith("# assistant:\n")
    assert chat.tokenizer.decode(ids).startswith(f"{chat.tokenizer.bos_token}# user:\n")
    assert fit_prompt(chat, whole, 24) == whole[: context - 24]


def test_a_prompt_that_fits_stays_a_text(llm):
    assert fit_prompt(llm, "x = 1", 24) == "x = 1"


def test_cutting():
    assert fit([1, 2, 3, 4, 5], 5, framed=True) == [1, 2, 3, 4, 5]
    assert fit([1, 2, 3, 4, 5], 3, framed=True) == [1, 2, 5]
    assert fit([1, 2, 3, 4, 5], 1, framed=True) == [1]
    assert fit([1, 2, 3, 4, 5], 3, framed=False) == [1, 2, 3]


def test_no_room_is_refused(llm):
    with pytest.raises(SelfspecError, match="outgrow"):
        fit_prompt(llm, "x", llm.max_new(0))


def test_what_is_no_chat(llm, chat):
    with pytest.raises(SelfspecError, match="the tokenizer has no chat template; do without chat"):
        encode(llm, "x", chat=True)
    with pytest.raises(SelfspecError, match="a chat message is a text"):
        encode(chat, [1, 2], chat=True)
    chat.tokenizer.chat_template = "{{ raise_exception('only poems') }}"
    with pytest.raises(SelfspecError, match="the tokenizer's chat template fails: .*only poems"):
        encode(chat, "x", chat=True)


def test_it_is_checked_without_the_model(tmp_path, llm):
    with pytest.raises(SelfspecError, match="model builtin: the tokenizer has no chat template"):
        check_chat(builtin.NAME)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SelfspecError, match="its tokenizer cannot be loaded"):
        check_chat(str(tmp_path))
    tokenizer = copy.deepcopy(llm.tokenizer)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    check_chat(str(tmp_path))
    check_chat(str(tmp_path), system=True)
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    tokenizer.save_pretrained(tmp_path)
    check_chat(str(tmp_path))
    with pytest.raises(SelfspecError, match="chat template leaves system messages out; do without one"):
        check_chat(str(tmp_path), system=True)


def test_prompts_that_are_cut_are_counted(recwarn):
    warn_if_cut([3, 5], 5)
    assert not recwarn
    with pytest.warns(UserWarning, match="^2 prompts are cut: up to 9 tokens, but only 5 fit the context"):
        warn_if_cut([3, 6, 9], 5)
    with pytest.warns(UserWarning, match="^1 prompt is cut: 6 tokens, but only"):
        warn_if_cut([6], 5)
