"""Targets that other libraries have quantised: their own tokens, drafted or not, alone or in batches."""

from __future__ import annotations

import json

import pytest
import torch
from models import SIZES, plain, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig
from wants import needs

import selfspec
from selfspec import builtin
from selfspec.basics.errors import SelfspecError
from selfspec.llm.llm import wrap
from selfspec.models.linears import is_exact
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.draft_path import SkipSet

CONFIG = LlamaConfig(**{**SIZES, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3})
PROMPT = [(7 * i) % SIZES["vocab_size"] for i in range(24)] * 2
NEW = 20


def torchao(name):
    """torchao's weights-only, as `transformers` asks for it."""
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup
    from transformers import TorchAoConfig

    four = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
    return TorchAoConfig(Int8WeightOnlyConfig() if name == "torchao 8" else four)


def bitsandbytes(name):
    """bitsandbytes' weights in 8 or 4 bits."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=name == "bitsandbytes 8", load_in_4bit=name == "bitsandbytes 4")


@torch.no_grad()
def check_same(model, tokens, expected):
    """Token for token. bitsandbytes' 8 bits alone round each row's inputs to 8 bits too, and take outliers from all
    rows of a pass, so that passes of other widths differ by far more than float32 rounds: there the first difference
    has to be a near-tie, of 4 times at most what passes over one row and over all were off.
    """
    if tokens == expected or "Linear8bitLt" not in {type(module).__name__ for module in model.modules()}:
        assert tokens == expected
        return
    at = next(i for i, (mine, other) in enumerate(zip(tokens, expected, strict=True)) if mine != other)
    ids = torch.tensor([[*PROMPT, *expected]])
    whole, cache = model(ids).logits[0], DynamicCache()
    alone = [model(ids[:, n : n + 1], past_key_values=cache).logits[0] for n in range(ids.shape[1])]
    off = float((whole - torch.cat(alone)).abs().max())
    best = whole[len(PROMPT) + at - 1].topk(2)
    assert float(best.values[0] - best.values[1]) <= 4 * off
    assert tokens[at] in best.indices


WAYS = {
    name: pytest.param(make, name, marks=needs(make.__name__, make.__name__), id=name)
    for make in (torchao, bitsandbytes)
    for name in (f"{make.__name__} 8", f"{make.__name__} 4")
}
each_way = pytest.mark.parametrize(("make", "name"), WAYS.values())


def quantised(make, name, folder):
    """A tiny model, brought into few bits as it is loaded."""
    tiny(CONFIG, dtype=torch.float32).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=make(name), dtype=torch.float32).eval()


def told(model, ids, n=NEW):
    """What `transformers` generates with it."""
    return model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=n)[0, len(ids) :].tolist()


def asked(model, **how):
    """It, as a caller of `wrap` has it."""
    return wrap(model, AutoTokenizer.from_pretrained(builtin.model_folder()), profile="none", **how)


@each_way
def test_plain_and_drafted_tokens_are_transformers_own(make, name, tmp_path):
    model = quantised(make, name, tmp_path)
    assert not is_exact(model.model.layers[0].mlp.down_proj)
    expected = told(model, PROMPT)
    llm = asked(model)
    check_same(model, plain(LeanRuntime(model), PROMPT, NEW), expected)
    for path in SkipSet(attention={1}), SkipSet(mlp={0, 2}):
        drafted = llm.generate(PROMPT, max_new_tokens=NEW, drafter=llm.layer_skip(path, "fixed:k=3"))
        check_same(model, drafted.tokens, expected)
        assert drafted.stats.drafted > 0
    looked = asked(model, method="lookup").generate(PROMPT, max_new_tokens=NEW)
    check_same(model, looked.tokens, expected)
    assert looked.stats.drafted > 0


@each_way
def test_several_at_once_are_each_alone(make, name, tmp_path):
    model = quantised(make, name, tmp_path)
    llm = asked(model, method="lookup")
    for one in llm.generate_many([PROMPT, PROMPT], max_new_tokens=NEW):
        check_same(model, one.tokens, told(model, PROMPT))


@each_way
def test_a_folder_that_was_saved_quantised_is_loaded_so(make, name, tmp_path):
    model = quantised(make, name, tmp_path / "whole")
    model.save_pretrained(tmp_path / "few")
    AutoTokenizer.from_pretrained(builtin.model_folder()).save_pretrained(tmp_path / "few")
    llm = selfspec.load(str(tmp_path / "few"), profile="none")
    assert type(llm.model.model.layers[0].mlp.down_proj) is type(model.model.layers[0].mlp.down_proj)
    check_same(llm.model, llm.generate(PROMPT, max_new_tokens=NEW).tokens, told(llm.model, PROMPT))
    assert llm.identity.fingerprint is None
    assert llm.runtime.part_bytes("mlp", 0, "int8") is None


@pytest.mark.parametrize(
    ("config", "library"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "optimum"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, "gptqmodel"),
    ],
)
def test_what_needs_a_library_that_is_not_there_is_one_clear_line(config, library, tmp_path):
    tiny(CONFIG, dtype=torch.float32).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(builtin.model_folder()).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
    with pytest.raises(SelfspecError, match=f"(?i)cannot be loaded: .*{library}") as caught:
        selfspec.load(str(tmp_path), profile="none")
    assert "\n" not in str(caught.value)
