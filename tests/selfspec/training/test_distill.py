"""A model distilled from another drafts for it, and the text stays the model's."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from models import CONFIGS, small, tiny
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.drafters import make_drafter
from selfspec.profile.reading import read_profile
from selfspec.runtime.forward import LeanRuntime
from selfspec.training import distill
from selfspec.training.distill import DistillLearner, keep_layers, write_model
from selfspec.training.fit import fit
from selfspec.training.options import TrainOptions
from selfspec.training.texts import TrainingText

FEW = {"max_new_tokens": 24, "batch_size": 8, "texts": 20, "steps": 40, "layers": 4}


@pytest.mark.parametrize(("count", "kept"), [(1, [0]), (2, [0, 3]), (3, [0, 2, 3]), (4, [0, 1, 2, 3])])
def test_layers_that_are_kept_are_spread_evenly(count, kept):
    for name in ("llama", "llama-mqa-tied", "qwen2"):
        model = tiny(CONFIGS[name])
        made = keep_layers(model, count)
        assert made.config.num_hidden_layers == len(made.model.layers) == count
        for i, layer in enumerate(kept):
            for (_, ours), (_, theirs) in zip(
                made.model.layers[i].named_parameters(), model.model.layers[layer].named_parameters(), strict=True
            ):
                assert torch.equal(ours, theirs)
                assert ours.data_ptr() != theirs.data_ptr()
        assert torch.equal(made.lm_head.weight, model.lm_head.weight)
        assert torch.equal(made.model.norm.weight, model.model.norm.weight)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    if count == 4:
        torch.testing.assert_close(made(ids).logits, model(ids).logits)


def test_a_copy_in_16_bits_has_the_rotary_frequencies_of_the_model():
    model = tiny(CONFIGS["llama"], dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    made = keep_layers(model, 2)
    assert made.dtype == torch.bfloat16
    assert torch.equal(made.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_a_copy_ends_texts_as_the_model_does(tmp_path):
    """Ends may be in the generation config alone; and other users may read the folder."""
    model = tiny(CONFIGS["llama"])
    model.generation_config.eos_token_id = [7, 9]
    made = keep_layers(model, 2)
    assert made.generation_config.eos_token_id == [7, 9]
    assert made.generation_config is not model.generation_config
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    write_model(made, tokenizer, tmp_path / "made")
    (tmp_path / "usual").mkdir()
    assert (tmp_path / "made").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("count", [0, 5])
def test_more_layers_than_there_are(count):
    with pytest.raises(SelfspecError, match=f"layers {count}: the model has 4, so 1 to 4 can be kept"):
        keep_layers(tiny(CONFIGS["llama"]), count)


@pytest.fixture(scope="module")
def fitted(llm, held_out, tmp_path_factory):
    return fit(llm, part="distill", out=tmp_path_factory.mktemp("parts"), prompts=held_out, options=TrainOptions(**FEW))


@pytest.mark.long("training")
def test_acceptance_rises(fitted):
    (_, before), *_, (_, after) = fitted.progress.history
    assert after > before + 0.2
    assert json.loads((fitted.part.parent / "distill.json").read_text())["kind"] == "distill"


@pytest.mark.long("training")
def test_its_profile_gives_plain_decodings_text(llm, fitted, held_out):
    (path,) = fitted.profiles
    profile = read_profile(path)
    assert profile.draft.model == "distill"
    drafted = selfspec.load("builtin", profile=path)
    drafter = make_drafter(drafted.runtime, drafted.profile)
    accepted = 0
    for prompt in held_out[:4]:
        out = drafted.generate(prompt, max_new_tokens=32, drafter=drafter)
        assert out.tokens == llm.generate(prompt, max_new_tokens=32, drafter=selfspec.drafters.PlainDrafter()).tokens
        accepted += out.stats.sources["draft model"]
    assert accepted > 0


def test_what_is_saved_is_what_was_fitted(llm, fitted):
    """Its layers have changed, its embeddings have not."""
    saved = AutoModelForCausalLM.from_pretrained(fitted.part)
    begun = keep_layers(llm.model, 4)
    assert torch.equal(saved.model.embed_tokens.weight, begun.model.embed_tokens.weight)
    assert not torch.equal(saved.model.layers[0].mlp.up_proj.weight, begun.model.layers[0].mlp.up_proj.weight)


def test_a_student_with_other_tokens_is_refused_before_texts_are_made(llm, held_out, tmp_path, monkeypatch):
    small(7, 1).float().save_pretrained(tmp_path / "other")
    monkeypatch.setattr(
        distill, "load_model", lambda name, **options: (AutoModelForCausalLM.from_pretrained(name), None)
    )
    monkeypatch.setattr("selfspec.training.fit.make_texts", lambda *of: pytest.fail("texts are made"))
    options = TrainOptions(**{**FEW, "student": str(tmp_path / "other")})
    with pytest.raises(SelfspecError, match="the student has 7 tokens, the model 4096"):
        fit(llm, part="distill", out=tmp_path, prompts=held_out, options=options)


def test_another_models_weights_are_a_beginning_too(llm, tmp_path):
    begun = keep_layers(llm.model, 1)
    begun.save_pretrained(tmp_path / "student")
    llm.tokenizer.save_pretrained(tmp_path / "student")
    learner = DistillLearner(llm.runtime, student=str(tmp_path / "student"), layers=None, loss="reverse-kl", seed=0)
    assert torch.equal(learner.student.model.layers[0].mlp.up_proj.weight, begun.model.layers[0].mlp.up_proj.weight)


def test_a_full_disk_is_told_by_the_folder_of_the_model(tmp_path, llm, monkeypatch):
    """Which is left as it was."""
    (tmp_path / "distill").mkdir()
    (tmp_path / "distill" / "config.json").write_text("before")

    def full(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(type(llm.model), "save_pretrained", full)
    with pytest.raises(SelfspecError, match=r"distill: cannot be written \(No space left on device"):
        write_model(llm.model, llm.tokenizer, tmp_path / "distill")
    assert [file.read_text() for file in tmp_path.rglob("*.json")] == ["before"]
    assert [*tmp_path.iterdir()] == [tmp_path / "distill"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_student_in_16_bits_is_trained_in_float32_and_written_as_the_model_is(dtype):
    """Steps of a thousandth are lost in bfloat16, and Adam's small numbers are 0 in float16."""
    learner = DistillLearner(
        LeanRuntime(tiny(CONFIGS["llama"], dtype=dtype)), student=None, layers=2, loss="tv", seed=0
    )
    trained = torch.float32 if dtype == torch.bfloat16 else dtype
    assert {parameter.dtype for parameter in learner.net.parameters()} == {trained}
    assert learner.dtype == dtype
    loss = learner.loss([TrainingText(torch.arange(12), torch.zeros(12, 0), 2)])
    assert loss.isfinite()
