"""Int4 weights of a search: made before the trials if int4 is among the modes, and part of the profile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import tiny
from selfspec.search import finalists, find_profile, prepare, quantizing, study
from selfspec.search.budget import Deadline, no_deadline
from selfspec.search.callbacks import SilentSearch
from selfspec.search.ledger import Ledger
from selfspec.search.objective import Score
from selfspec.search.options import QuantizeOptions
from selfspec.search.quantizing import choose_method, int4_for_search
from selfspec.search.trial_tables import as_profile
from studies import measured_as
from transformers import GPT2Config

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.int4_quantization import int4_settings, open_int4, write_int4
from selfspec.draft_modules.module_files import read_part
from selfspec.profile.reading import read_profile, write_profile
from selfspec.runtime.hf_runtime import GenericRuntime
from selfspec.types.controller import ControllerSpec
from selfspec.types.costs import CostModel, ModeCosts
from selfspec.types.draft_path import DraftPath

COSTS = CostModel(
    context=60,
    base=1e-4,
    attention=4e-5,
    mlp=4e-5,
    widths=[1, 2, 8],
    verify=[1.3e-3, 1.35e-3, 1.5e-3],
    round=4e-5,
    low={"int4": ModeCosts(attention=8e-6, mlp=8e-6, head=3e-5)},
)
TEXTS = [[5, 3, 8, 1, 30], [7, 7]]


@pytest.fixture
def llm():
    return selfspec.load("builtin", profile="none")


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def clockless(monkeypatch):
    monkeypatch.setattr(prepare, "measure_costs", lambda *_, **__: COSTS)
    monkeypatch.setattr(finalists, "measure", measured_as(1.3))
    monkeypatch.setattr(finalists, "_fastest", lambda search, base, scores, *_, **__: scores[0])
    monkeypatch.setattr(study, "with_bridges", lambda *_, **__: None)


def search(llm, **options):
    wanted = {"trials": 2, "count": 2, "max_new_tokens": 8, "modes": "full,int4", "extra_memory": 2.0, "warm": False}
    return find_profile(llm, **{**wanted, **options})


def test_the_method():
    assert [choose_method(name) for name in ("auto", "nearest", "weighted")] == ["gptq", "nearest", "weighted"]
    with pytest.raises(SelfspecError, match="method 'awq' of quantising is not known; known: auto, nearest"):
        choose_method("awq")


def test_a_search_saves_its_weights_beside_the_profile(llm, clockless, tmp_path):
    """The path that was scored is the one that the saved profile runs, and the text is the model's."""
    profile = search(llm)
    assert len(profile.path.int4)
    assert profile.draft.int4_weights == "int4"
    write_profile(profile, tmp_path / "p.yaml")
    file = tmp_path / profile.parts["int4"].file
    settings = read_part(file).settings
    assert (settings["method"], settings["group"], settings["texts"]["count"]) == ("gptq", 64, 2)
    again = selfspec.load("builtin", profile=tmp_path / "p.yaml")
    drafter = again.drafter_for(again.profile)
    assert drafter.path.int4_weights == profile.parts["int4"].sha256
    assert profile.search.extra_bytes == again.runtime.extra_bytes(drafter.path)
    prompt = "def read("
    plain = llm.generate(prompt, max_new_tokens=24)
    assert again.generate(prompt, max_new_tokens=24, drafter=drafter).tokens == plain.tokens
    assert again.layer_skip(again.profile.path).path == drafter.path, "a path of the profile has the profile's weights"
    with pytest.raises(SelfspecError, match="not loaded"):
        selfspec.load("builtin", profile="none").runtime.compile(drafter.path)


@pytest.mark.parametrize("options", [{"modes": "full,skip"}, {"int4": "nearest"}])
def test_no_weights_are_made_without_need(llm, clockless, options, tmp_path):
    profile = search(llm, **options)
    assert profile.parts == {}
    assert getattr(profile.draft, "int4_weights", None) is None
    assert not list((tmp_path / "cache").glob("parts/*"))


def test_a_profile_that_drafts_nothing_needs_no_weights(llm, clockless, monkeypatch):
    monkeypatch.setattr(finalists, "measure", measured_as(0.5))
    profile = search(llm)
    assert not profile.drafts
    assert profile.parts == {}


def test_a_file_that_was_made_before(llm, clockless, tmp_path, monkeypatch):
    """Costs are measured with its weights, whose groups are smaller than those of weights rounded to nearest."""
    file, sizes = tmp_path / "mine.safetensors", []
    write_int4(llm.runtime, file, TEXTS, int4_settings("gptq", 32, TEXTS))
    nearest = llm.runtime.part_bytes("mlp", 0, "int4")
    told = prepare.measure_costs
    monkeypatch.setattr(
        prepare,
        "measure_costs",
        lambda runtime, **given: sizes.append(runtime.part_bytes("mlp", 0, "int4")) or told(runtime, **given),
    )
    profile = search(llm, int4=str(file))
    assert sizes == [nearest * 5.0 / 4.5]  # bits of a weight
    write_profile(profile, tmp_path / "p.yaml")
    assert read_part(tmp_path / read_profile(tmp_path / "p.yaml").parts["int4"].file).settings["method"] == "gptq"
    with pytest.raises(SelfspecError, match="int4 'no such file': expected auto, nearest, weighted, gptq, or a file"):
        search(llm, int4="no such file")


def test_weights_are_made_once(llm, monkeypatch):
    """The second search of the same model and texts finds them in the cache; a damaged file is made again."""
    first = int4_for_search(llm, TEXTS, "auto", deadline=no_deadline(), watch=SilentSearch())
    made = []
    write = quantizing.write_int4
    monkeypatch.setattr(quantizing, "write_int4", lambda *args, **kw: made.append(1) or write(*args, **kw))
    assert int4_for_search(llm, TEXTS, "auto", deadline=no_deadline(), watch=SilentSearch()) == first
    assert not made
    file = quantizing.parts_folder() / first.file
    weights = open_int4(llm.runtime, file).get(0, 0)
    file.write_bytes(b"damaged")
    again = int4_for_search(llm, TEXTS, "auto", deadline=no_deadline(), watch=SilentSearch())
    assert made
    assert again.file == first.file
    assert torch.equal(open_int4(llm.runtime, file).get(0, 0).values, weights.values)
    assert int4_for_search(llm, TEXTS, "gptq", deadline=no_deadline(), watch=SilentSearch()).file == first.file
    assert int4_for_search(llm, TEXTS[:1], "auto", deadline=no_deadline(), watch=SilentSearch()).file != first.file


def test_where_time_is_too_short_for_gptq_the_weighted_grid_is_searched(llm, monkeypatch):
    """That takes half as long."""
    now = [0.0]
    write = quantizing.write_int4

    def slow(runtime, made, texts, settings, *, on_layer):
        def layer(done):
            now[0] += 2.0 if settings["method"] == "gptq" else 1.0
            return on_layer(done)

        return write(runtime, made, texts, settings, on_layer=layer)

    monkeypatch.setattr(quantizing, "write_int4", slow)
    layers = llm.runtime.layers
    for seconds, method in ((2.0 * layers, "gptq"), (2.0 * layers - 0.5, "weighted")):
        now[0] = 0.0
        deadline = Deadline(seconds, lambda: now[0])
        part = int4_for_search(llm, [*TEXTS, [int(seconds)]], "auto", deadline=deadline, watch=SilentSearch())
        assert read_part(quantizing.parts_folder() / part.file).settings["method"] == method


def test_without_time_weights_are_rounded_to_nearest(llm):
    said = []
    watch = SilentSearch()
    watch.say = said.append
    seconds = iter(range(10**6))
    deadline = Deadline(float(llm.runtime.layers) / 2, lambda: float(next(seconds)))  # a second at each look
    assert int4_for_search(llm, TEXTS, "auto", deadline=deadline, watch=watch) is None
    assert said == ["int4 weights are rounded to nearest: there is too little time to quantise them better"]


def test_without_a_cache_that_can_be_written_weights_are_rounded_to_nearest(llm, tmp_path, monkeypatch):
    said = []
    watch = SilentSearch()
    watch.say = said.append
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    assert int4_for_search(llm, TEXTS, "auto", deadline=no_deadline(), watch=watch) is None
    assert len(said) == 1
    assert said[0].startswith("int4 weights are rounded to nearest: better ones cannot be written (")


def test_a_study_remembers_its_weights(llm, clockless, tmp_path):
    """A profile picked from it uses them; a study whose paths were rounded to nearest resumes with nearest."""
    storage = tmp_path / "trials.jsonl"
    profile = search(llm, storage=storage)
    ledger = Ledger(storage, None)
    assert ledger.int4 == profile.parts["int4"]
    entry = next(entry for entry in ledger.entries if len(entry.score.path.int4))
    picked = as_profile(ledger, entry)
    assert picked.parts == profile.parts
    assert picked.draft.int4_weights == "int4"
    (quantizing.parts_folder() / ledger.int4.file).unlink()
    assert as_profile(ledger, entry).draft.int4_weights is None
    old = tmp_path / "old.jsonl"
    search(llm, storage=old, int4="nearest")
    lines = old.read_text()
    old.write_text(lines.replace(',"int4":"nearest"', ""))
    assert lines != old.read_text()
    assert search(llm, storage=old, trials=3).parts == {}


def test_a_study_goes_on_with_the_weights_that_its_paths_were_scored_with(llm, clockless, tmp_path, monkeypatch):
    storage, made = tmp_path / "trials.jsonl", quantizing._write
    with monkeypatch.context() as patch:  # too little time for GPTQ
        patch.setattr(
            quantizing,
            "_write",
            lambda llm, file, texts, settings, *rest: (
                settings["method"] != "gptq" and made(llm, file, texts, settings, *rest)
            ),
        )
        search(llm, storage=storage)
    first = Ledger(storage, None).int4
    assert read_part(quantizing.parts_folder() / first.file).settings["method"] == "weighted"
    resumed = search(llm, storage=storage, trials=3)
    assert resumed.parts["int4"] == first
    (quantizing.parts_folder() / first.file).unlink()  # they are made again
    assert search(llm, storage=storage, trials=4).parts["int4"] == first
    storage.write_text(storage.read_text().replace(first.file, "int4-000000000000.safetensors"))
    with pytest.raises(
        SelfspecError, match="scored with the int4 weights int4-000000000000.safetensors, which the cache"
    ):
        search(llm, storage=storage, trials=5)


def test_a_path_without_int4_has_no_weights_in_its_profile(llm, clockless):
    profile = search(llm)
    base = profile.model_copy(update={"draft": selfspec.Profile(model=llm.identity).draft})
    assert "int4" in base.parts
    score = Score(DraftPath.skipping([1], [1]), 1.0, 1.0, 1.0, 1.0, ControllerSpec(name="fixed"), False, candidates=1)
    plain = finalists.profile_from_score(base, score, None)
    assert plain.parts == {}


def test_a_model_that_runs_by_its_own_forward_has_weights_too(llm, tmp_path):
    """Files of `quantize`, with the profile that it writes, and files of a search."""
    words = llm.identity.vocabulary
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=words, n_positions=512, bos_token_id=0, eos_token_id=0
    )
    own = selfspec.wrap(tiny(config, dtype=torch.float32), llm.tokenizer, profile="none")
    assert isinstance(own.runtime, GenericRuntime)
    file = tmp_path / "w.safetensors"
    quantizing.quantize(own, file, QuantizeOptions(texts=2, max_new_tokens=8), SilentSearch())
    profile = read_profile(tmp_path / "w.yaml")
    drafting = selfspec.wrap(own.model, llm.tokenizer, profile=profile)
    assert drafting.drafter_for(profile).path.int4_weights == profile.parts["int4"].sha256
    plain = own.generate("def read(", max_new_tokens=24)
    assert drafting.generate("def read(", max_new_tokens=24).tokens == plain.tokens
    part = int4_for_search(own, TEXTS, "auto", deadline=no_deadline(), watch=SilentSearch())
    assert read_part(quantizing.parts_folder() / part.file).settings["method"] == "gptq"
    with quantizing.using_int4(own, part):
        path = own.runtime.compile(DraftPath.from_modes(["int4"] * 4))
    assert path is own.runtime.compile(replace(DraftPath.from_modes(["int4"] * 4), int4_weights=part.sha256))
