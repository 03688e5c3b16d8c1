"""Fitting a part: acceptance rises, the same call gives the same part, what was cut short goes on."""

from __future__ import annotations

import pytest
import torch

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.module_files import read_part
from selfspec.draft_modules.registry import make_head
from selfspec.profile.reading import read_profile
from selfspec.profile.shipped import find_profile_file
from selfspec.training.fit import SilentTraining, fit
from selfspec.training.options import KINDS, OF_PATHS, TrainOptions

FEW = {"max_new_tokens": 24, "vocabulary": 512, "batch_size": 8, "texts": 20}
PROMPT = "def read_text(path: Path) -> str:\n"


class Cut(SilentTraining):
    """Interrupts the fit at a step."""

    def __init__(self, at, by):
        self.at, self.by, self.seen, self.stages = at, by, 0, []

    def stage(self, name, total):
        self.stages.append(name)

    def step(self, done, said):
        self.seen += self.stages[-1] == "fitting"
        if self.seen == self.at:
            raise self.by


@pytest.fixture(scope="module")
def prompts():
    return selfspec.builtin.prompts("calibration")[:10]


@pytest.fixture(scope="module")
def fitted(llm, prompts, tmp_path_factory):
    out = tmp_path_factory.mktemp("fitted")
    profile = find_profile_file("stdlib-llama-3.7m")
    return fit(llm, out=out, prompts=prompts, profile=profile, options=TrainOptions(steps=60, **FEW))


@pytest.mark.long("training")
def test_acceptance_rises(fitted):
    (_, before), *_, (_, after) = fitted.progress.history
    assert after > before
    assert fitted.progress.best == after
    assert fitted.progress.steps == 60
    assert fitted.texts == 20


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("eagle", "distill", "layerskip", *OF_PATHS)])
@pytest.mark.long("training of every kind of head")
def test_each_kind_learns_and_drafts(llm, prompts, tmp_path, kind):
    options = TrainOptions(steps=100, **FEW)
    fitted = fit(llm, part=kind, out=tmp_path, prompts=prompts, options=options)
    (_, before), *_, (_, after) = fitted.progress.history
    assert after > before
    assert fitted.part.name == f"{kind}.safetensors"
    (profile,) = map(read_profile, fitted.profiles)
    plain = llm.generate(PROMPT, max_new_tokens=32).tokens
    told = llm.generate(PROMPT, max_new_tokens=32, drafter=llm.drafter_for(profile))
    assert told.tokens == plain


@pytest.mark.long("training")
def test_the_same_call_gives_the_same_part(llm, fitted, prompts, tmp_path):
    more = TrainOptions(steps=1, **{**FEW, "texts": FEW["texts"] + 12})  # there are other texts by then
    fit(llm, part="medusa", out=tmp_path, prompts=prompts, options=more)
    again = fit(llm, out=tmp_path, prompts=prompts, options=TrainOptions(steps=60, **FEW))
    one, other = read_part(fitted.part).tensors, read_part(again.part).tensors
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("by", [KeyboardInterrupt(), RuntimeError("killed")], ids=["interrupt", "kill"])
@pytest.mark.long("training that was cut short")
def test_what_was_cut_short_goes_on(llm, fitted, prompts, tmp_path, by):
    options = TrainOptions(steps=60, **FEW)
    if isinstance(by, KeyboardInterrupt):
        cut = fit(llm, out=tmp_path, prompts=prompts, options=options, callbacks=Cut(20, by))
        assert cut.interrupted
        assert make_head(llm.runtime, read_part(cut.part))  # usable as it is
    else:
        with pytest.raises(RuntimeError, match="killed"):
            fit(llm, out=tmp_path, prompts=prompts, options=options, callbacks=Cut(20, by))
    watch = Cut(0, by)
    whole = fit(llm, out=tmp_path, prompts=prompts, options=options, callbacks=watch)
    assert watch.stages[0] == "fitting"  # texts were made
    assert not whole.interrupted
    assert whole.progress.steps == 60
    assert whole.progress.best == pytest.approx(fitted.progress.best, abs=0.2)


@pytest.mark.long("training on other texts")
@pytest.mark.parametrize("other", [{"max_new_tokens": 20}, {"texts": 24}])
def test_on_other_texts_it_begins_anew(llm, prompts, tmp_path, other):
    """A training that ended leaves its checkpoint; what it learnt from is not what is asked for now."""
    watch = Cut(-1, None)
    fit(llm, out=tmp_path, prompts=prompts, options=TrainOptions(steps=2, **FEW))
    again = fit(llm, out=tmp_path, prompts=prompts, options=TrainOptions(steps=3, **{**FEW, **other}), callbacks=watch)
    assert watch.stages[0] == "making texts"
    assert (again.progress.steps, again.texts) == (3, other.get("texts", FEW["texts"]))


@pytest.mark.long("training whose texts are gone")
def test_without_its_texts_it_begins_anew(llm, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "one"))
    fit(llm, out=tmp_path, prompts=prompts, options=TrainOptions(steps=2, **FEW))
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "other"))
    watch = Cut(-1, None)
    again = fit(llm, out=tmp_path, prompts=prompts, options=TrainOptions(steps=3, **FEW), callbacks=watch)
    assert watch.stages[0] == "making texts"
    assert (again.progress.steps, len(again.progress.history)) == (3, 2)


def test_its_profiles_give_plain_decodings_text(llm, fitted):
    plain = llm.generate(PROMPT, max_new_tokens=32).tokens
    for path, said in zip(
        fitted.profiles,
        ("drafts by the trained head eagle; proposers: lookup", "lookup tokens of the trained head eagle"),
        strict=True,
    ):
        profile = read_profile(path)
        assert said in profile.draft.summary
        found = llm.generate(PROMPT, max_new_tokens=32, drafter=llm.drafter_for(profile)).tokens
        assert found == plain


def test_a_part_that_was_changed_is_refused(fitted, tmp_path):
    for path in (fitted.part, fitted.profiles[0]):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with (tmp_path / fitted.part.name).open("ab") as file:
        file.write(b" ")
    with pytest.raises(SelfspecError, match="is another file than the profile was made with"):
        read_profile(tmp_path / fitted.profiles[0].name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"minutes": 0}, "minutes 0: expected more than 0"),
        ({"vocabulary": 3}, "vocabulary 3: expected at least 16"),
        ({"steps": 0}, "steps 0: expected at least 1"),
        ({"texts": 1}, "texts 1: expected at least 2"),
    ],
)
def test_values_out_of_range(options, said):
    with pytest.raises(SelfspecError, match=said):
        TrainOptions(**options)


def test_no_folder_to_write_to(llm, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "gone" / "parts"):
        with pytest.raises(SelfspecError, match="is no folder"):
            fit(llm, out=out)
