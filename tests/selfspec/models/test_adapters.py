"""PEFT adapter folders as models: merged into their base, whose tokens with the adapter they give."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM
from wants import needs

import selfspec
from selfspec import builtin
from selfspec.basics.errors import SelfspecError
from selfspec.models.loading import check_at_hand, check_model_name, load_tokenizer, read_identity, stored_config
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import SkipSet

PROMPT = "def add(a, b):\n"
wants_peft = needs("peft", "PEFT")


def adapt(model, seed=1):
    """A model with low-rank adapters that change what it says, on its attention and its down projections."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    adapted = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    )
    return adapted.eval()


@pytest.fixture
def folder(tmp_path):
    """An adapter of the built-in model as `save_pretrained` leaves it, and what the adapted model generates."""
    adapted = adapt(AutoModelForCausalLM.from_pretrained(str(builtin.model_folder()), dtype=torch.float32))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    ids = load_tokenizer(builtin.NAME)(PROMPT, return_tensors="pt").input_ids
    text = adapted.generate(input_ids=ids, do_sample=False, max_new_tokens=24)[0, ids.shape[1] :].tolist()
    return tmp_path / "adapter", text


@wants_peft
def test_tokens_are_the_adapted_models(folder):
    """They differ from the base model's, with and without drafts."""
    path, text = folder
    llm = selfspec.load(str(path))
    plain = selfspec.load(builtin.NAME)
    assert plain.generate(PROMPT, max_new_tokens=24).tokens != text
    assert llm.generate(PROMPT, max_new_tokens=24).tokens == text
    draft = LayerSkipSpec.from_path(SkipSet(attention={5, 6}, mlp={7}), ControllerSpec(name="fixed", options={"k": 3}))
    profile = selfspec.Profile(model=llm.identity, draft=draft)
    drafted = selfspec.load(str(path), profile=profile)
    assert drafted.generate(PROMPT, max_new_tokens=24).tokens == text


@wants_peft
def test_what_is_asked_without_weights_is_the_bases(folder):
    path, _ = folder
    assert read_identity(str(path)) == read_identity(builtin.NAME)
    assert stored_config(str(path)) == str(builtin.model_folder())
    assert load_tokenizer(str(path)).get_vocab() == load_tokenizer(builtin.NAME).get_vocab()


@wants_peft
def test_a_tokenizer_saved_with_the_adapter_is_its(folder):
    path, _ = folder
    tokenizer = load_tokenizer(builtin.NAME)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(str(path))
    assert load_tokenizer(str(path)).chat_template == tokenizer.chat_template
    assert selfspec.load(str(path)).tokenizer.chat_template == tokenizer.chat_template


@wants_peft
def test_a_base_beside_the_adapter(folder, tmp_path):
    """Folders that were moved together find each other."""
    path, text = folder
    (tmp_path / "base").symlink_to(builtin.model_folder())
    change(path, base_model_name_or_path="../base")
    assert selfspec.load(str(path)).generate(PROMPT, max_new_tokens=24).tokens == text


def change(path, **values):
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@wants_peft
@pytest.mark.parametrize(
    ("written", "told"),
    [
        (
            '{"base_model_name_or_path": "./nowhere/base"}',
            "is a PEFT adapter: its model ./nowhere/base: no such folder",
        ),
        ('{"base_model_name_or_path": ""}', "'base_model_name_or_path' names no model; expected the adapter's base"),
        ('{"base_model_name_or_path": null}', "names no model"),
        ("[]", "names no model"),
        ("{", "adapter_config.json: not valid JSON"),
    ],
)
def test_wrong_adapters_are_one_clear_line(tmp_path, written, told):
    (tmp_path / "adapter_config.json").write_text(written)
    with pytest.raises(SelfspecError) as caught:
        check_model_name(str(tmp_path))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@wants_peft
def test_an_adapter_of_an_adapter_is_refused(tmp_path):
    for name, base in (("one", "x/y"), ("two", "../one")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    with pytest.raises(SelfspecError, match="is an adapter of an adapter, .*one; merge one of them"):
        check_model_name(str(tmp_path / "two"))


@wants_peft
def test_weights_that_are_none_name_the_folder(folder):
    path, _ = folder
    (path / "adapter_model.safetensors").write_bytes(b"no weights")
    with pytest.raises(SelfspecError, match=f"^model {path} cannot be loaded: "):
        selfspec.load(str(path))


@wants_peft
def test_a_base_that_is_not_at_hand_is_named_with_the_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "gone/model"}')
    with pytest.raises(SelfspecError) as caught:
        check_at_hand(str(tmp_path))
    assert f"model gone/model, which the adapter {tmp_path} changes, cannot be loaded: " in str(caught.value)


def test_without_peft_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("selfspec.models.adapters.find_spec", lambda name: None)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "x/y"}')
    with pytest.raises(SelfspecError, match=r"is a PEFT adapter; pip install peft"):
        check_model_name(str(tmp_path))


@wants_peft
@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens", "q_proj"], ["embed_tokens", "lm_head"]], ids=str)
def test_a_change_of_the_head_or_the_embeddings_is_merged_into_that_alone(tmp_path, targets):
    """Also where both share their weights."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(str(builtin.model_folder()), dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).eval()
    adapted.save_pretrained(str(tmp_path))
    ids = load_tokenizer(builtin.NAME)(PROMPT, return_tensors="pt").input_ids
    expected = adapted(input_ids=ids).logits
    llm = selfspec.load(str(tmp_path))
    torch.testing.assert_close(llm.model(input_ids=ids).logits, expected, rtol=1e-3, atol=1e-3)
    tokens = adapted.generate(input_ids=ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :].tolist()
    assert llm.generate(PROMPT, max_new_tokens=12).tokens == tokens


@wants_peft
@pytest.mark.parametrize("method", ["PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING"])
def test_adapters_that_add_tokens_are_refused_by_name(folder, method):
    path, _ = folder
    change(path, peft_type=method)
    said = f"adapter_config.json: {method} adds tokens to the prompt; expected an adapter of weights, such as LORA"
    for call in (
        lambda: check_model_name(str(path)),
        lambda: selfspec.load(str(path)),
        lambda: selfspec.load("builtin", adapters={"one": path}),
    ):
        with pytest.raises(SelfspecError, match=said):
            call()


@wants_peft
def test_an_adapter_beside_its_model_need_not_name_it(folder):
    """PEFT writes none for a model that was made from a configuration."""
    path, text = folder
    change(path, base_model_name_or_path=None)
    llm = selfspec.load("builtin", adapters={"one": path})
    assert llm.generate(PROMPT, max_new_tokens=24, adapter="one").tokens == text


@wants_peft
@pytest.mark.parametrize("base", ["C:\\models\\base", "..\\base", "file:///models/base", "org\\base"])
def test_a_base_by_a_path_of_another_system_is_told(folder, base):
    path, text = folder
    change(path, base_model_name_or_path=base)
    with pytest.raises(SelfspecError, match=f"is a PEFT adapter: its model {re.escape(base)}: no such folder"):
        check_model_name(str(path))
    assert (
        selfspec.load("builtin", adapters={"one": path}).generate(PROMPT, max_new_tokens=24, adapter="one").tokens
        == text
    )


@wants_peft
@pytest.mark.parametrize("saved", [["embed_tokens", "lm_head"], None], ids=["trained", "as they are"])
def test_an_adapter_with_tokens_of_its_own_brings_their_embeddings(tmp_path, saved):
    """And its folder is the tokenizer's, too."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    tokenizer = load_tokenizer(builtin.NAME)
    size = len(tokenizer)
    tokenizer.add_tokens(["<a>", "<b>"])
    base = AutoModelForCausalLM.from_pretrained(str(builtin.model_folder()), dtype=torch.float32)
    base.resize_token_embeddings(size + 2, mean_resizing=False)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=saved)
    adapted = get_peft_model(base, config).eval()
    adapted.save_pretrained(str(tmp_path), save_embedding_layers=True)
    tokenizer.save_pretrained(str(tmp_path))
    prompt = "import os<a>"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    tokens = adapted.generate(input_ids=ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :].tolist()
    llm = selfspec.load(str(tmp_path))
    assert llm.generate(prompt, max_new_tokens=8).tokens == tokens
    assert llm.identity.vocabulary == read_identity(str(tmp_path)).vocabulary == size + 2
    with pytest.raises(
        SelfspecError, match="has embeddings of another size than the model's; expected it as the model"
    ):
        selfspec.load("builtin", adapters={"one": tmp_path})
