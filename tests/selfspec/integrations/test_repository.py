"""The folder `custom_generate/` of a repository decodes as `hf` does."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from selfspec.basics.errors import SelfspecError
from selfspec.integrations.custom_generate import hf
from selfspec.profile.draft_spec import LookupSpec, ProposerSpec
from selfspec.profile.drafter_specs import ModelSpec
from selfspec.profile.schema import Profile


@pytest.fixture
def folder(llm, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    llm.model.save_pretrained(tmp_path / "repository")
    return tmp_path / "repository"


@pytest.fixture
def asked(llm, held_out):
    inputs = llm.tokenizer(held_out[0], return_tensors="pt")
    return {**inputs, "max_new_tokens": 30, "do_sample": False}


@pytest.mark.parametrize("profile", ["auto", "stdlib-llama-3.7m"])
def test_named_in_the_call(llm, folder, asked, profile):
    hf(profile, rule="block", layout="rows").save(folder)
    theirs = llm.model.generate(**asked)
    ours = llm.model.generate(**asked, custom_generate=str(folder), trust_remote_code=True)
    assert torch.equal(ours, theirs)
    assert (folder / "custom_generate" / "requirements.txt").read_text() == "selfspec\n"


def test_loaded_with_the_model(llm, folder, asked):
    hf("stdlib-llama-3.7m").save(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert "generate" in vars(model)  # it is not the class's
    stops = {"stop_strings": ["("], "tokenizer": llm.tokenizer}
    assert torch.equal(model.generate(**asked), llm.model.generate(**asked))
    assert torch.equal(
        model.generate(asked.pop("input_ids"), **asked, **stops), model.generate(**asked_again(llm), **stops)
    )


def asked_again(llm):
    from selfspec import builtin

    inputs = llm.tokenizer(builtin.prompts("heldout")[0], return_tensors="pt")
    return {**inputs, "max_new_tokens": 30, "do_sample": False}


def test_files_beside_a_profile_cannot_travel(llm, tmp_path):
    profile = Profile(model=llm.identity, draft=ModelSpec(model="student"))
    with pytest.raises(SelfspecError, match="files beside it"):
        hf(profile).save(tmp_path)
    kept = LookupSpec(proposers=[ProposerSpec(kind="answers", path="answers.txt")])
    with pytest.raises(SelfspecError, match="files beside it"):
        hf(Profile(model=llm.identity, draft=kept)).save(tmp_path)
    assert not (tmp_path / "custom_generate").exists()
