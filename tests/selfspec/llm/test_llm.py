from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import io
import subprocess
import sys
import threading
import time

import pytest
import torch
from fields import STATS
from models import CONFIGS, tiny

import selfspec
from selfspec.basics.errors import BusyError, SelfspecError
from selfspec.drafters import Guard, LayerSkipDrafter, PlainDrafter
from selfspec.engine.engine import Engine
from selfspec.llm.llm import LLM
from selfspec.llm.options import GenerateOptions
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.reading import write_profile
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import find_profile_file
from selfspec.runtime.turn_lock import TurnLock
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.controller import ControllerSpec
from selfspec.types.identity import Identity

PROMPT = "import os\n\ndef main(args):\n    "
SKIP = selfspec.SkipSet((3, 5, 9), (7, 11))


@pytest.fixture(scope="module")
def drafter(llm):
    return llm.layer_skip(SKIP)


def test_generate_gives_text_tokens_and_stats(llm, drafter):
    out = llm.generate(PROMPT, max_new_tokens=30, drafter=drafter)
    assert len(out.tokens) == out.stats.tokens == 30
    assert PROMPT + out.text == llm.tokenizer.decode([*llm.encode(PROMPT), *out.tokens])
    s = out.stats
    assert s.rounds + s.accepted == 30
    assert s.nodes == s.drafted >= s.accepted > 0
    assert s.acceptance_rate == s.accepted / s.drafted
    assert s.tokens_per_round == 30 / s.rounds
    assert s.seconds > 0
    assert list(s.as_dict()) == STATS
    assert s.as_dict()["sources"] == {"draft path": s.accepted}
    assert s.as_dict()["work"] == {"draft step": s.drafted}


def test_an_llm_is_told_in_a_line(llm):
    assert repr(llm) == "LLM('builtin', float32 on cpu, LeanRuntime, drafts: none)"
    profile = find_profile_file("stdlib-llama-3.7m")
    drafting = LLM(llm.model, llm.tokenizer, name="builtin", profile=profile)
    assert repr(drafting).endswith("LeanRuntime, drafts: 19 sub-layers skipped)")


def test_stats_are_told_in_a_line(llm, drafter):
    stats = llm.generate(PROMPT, max_new_tokens=30, drafter=drafter).stats
    assert stats.log
    assert "Round(" not in repr(stats)


def test_why_a_text_ended(llm, drafter):
    """Each reason, with and without drafts, of whole texts and streams; none of what was broken off."""
    whole = llm.generate(PROMPT, max_new_tokens=30)
    assert whole.finish == "length"
    end = whole.tokens[12]
    for other in (drafter, None):
        assert llm.generate(PROMPT, max_new_tokens=30, drafter=other).finish == "length"
        assert llm.generate(PROMPT, settings={"eos_token_id": end}, drafter=other).finish == "end"
        assert llm.generate(PROMPT, stop=whole.text[20:24], drafter=other).finish == "stop"
        assert llm.generate(PROMPT, settings={"max_time": 1e-9}, drafter=other).finish == "time"
        stream = llm.stream(PROMPT, max_new_tokens=30, drafter=other)
        next(stream)
        assert stream.result.finish is None
        stream.close()
        assert stream.result.finish is None


def test_leaving_spans_frees_the_model(llm):
    stream = llm.stream(PROMPT, max_new_tokens=30)
    for _ in stream.spans():
        break
    assert len(llm.generate(PROMPT, max_new_tokens=3).tokens) == 3
    assert stream.result.finish is None


def test_rooms_need_no_import_of_their_own():
    code = "import selfspec; selfspec.drafters.PlainDrafter; selfspec.search.find_profile; selfspec.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "module 'selfspec' has no attribute 'nothing'" in done.stderr.splitlines()[-1]


def test_a_stream_gives_the_same_text(llm, drafter):
    whole = llm.generate(PROMPT, max_new_tokens=30, drafter=drafter)
    stream = llm.stream(PROMPT, max_new_tokens=30, drafter=drafter)
    pieces = list(stream)
    assert len(pieces) > 5
    assert "".join(pieces) == whole.text == stream.result.text
    assert stream.result.tokens == whole.tokens


def test_a_streams_first_token_is_not_drafted(llm):
    """With a seed the text is generate's all the same."""

    class Counting(PlainDrafter):
        proposed = 0

        def propose(self, seqs, limits):
            self.proposed += 1
            return super().propose(seqs, limits)

    counting = Counting()
    next(llm.stream(PROMPT, max_new_tokens=5, drafter=counting))
    assert counting.proposed == 0
    seeded = {"max_new_tokens": 12, "temperature": 1.0, "seed": 1}
    drafter = llm.layer_skip(SKIP)
    whole = llm.generate(PROMPT, drafter=drafter, **seeded).text
    assert "".join(llm.stream(PROMPT, drafter=drafter, **seeded)) == whole


def test_a_seeded_stream_is_the_seeded_generation(llm, drafter):
    options = {"max_new_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 7, "drafter": drafter}
    stream = llm.stream(PROMPT, **options)
    assert "".join(stream) == llm.generate(PROMPT, **options).text


def test_stop_strings(llm, drafter):
    whole = llm.generate(PROMPT, max_new_tokens=40)
    stop = whole.text[20:26]
    for with_drafter in (drafter, PlainDrafter()):
        out = llm.generate(PROMPT, max_new_tokens=40, stop=["no such text", stop], drafter=with_drafter)
        assert out.text == whole.text[: whole.text.index(stop)]
        assert out.tokens == whole.tokens[: len(out.tokens)]
        assert stop in llm.tokenizer.decode(out.tokens)
        assert stop not in llm.tokenizer.decode(out.tokens[:-1])


def test_an_abandoned_stream_frees_the_model_at_once(llm):
    gc.disable()
    try:
        for _ in llm.stream(PROMPT, max_new_tokens=20):
            break
        llm.generate(PROMPT, max_new_tokens=2)
    finally:
        gc.enable()
    llm.generate(PROMPT, max_new_tokens=2)


def test_a_held_stream_is_closed_or_in_the_way(llm):
    stream = llm.stream(PROMPT, max_new_tokens=20)
    next(stream)
    with pytest.raises(BusyError):
        llm.generate(PROMPT, max_new_tokens=2)
    stream.close()
    assert stream.result.tokens == llm.generate(PROMPT, max_new_tokens=1).tokens
    assert list(stream) == []


def in_threads(calls):
    """The results of calls, each in a thread of its own that begins after the last one waits; errors are results."""
    results = [None] * len(calls)

    def run(number, call):
        try:
            results[number] = call()
        except BusyError as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    return threads, results


def test_threads_wait_their_turn(llm, drafter):
    """Each text is what it is alone, greedy and seeded, whatever the others are."""
    how = [{"max_new_tokens": 8 + n, **({} if n % 2 else {"temperature": 0.8, "seed": n})} for n in range(8)]
    expected = [llm.generate(PROMPT, drafter=drafter, **options).tokens for options in how]
    calls = [lambda options=options: llm.generate(PROMPT, drafter=drafter, **options).tokens for options in how]
    threads, results = in_threads(calls)
    for thread in threads:
        thread.join()
    assert results == expected


def test_first_come_first_served():
    lock, order = TurnLock(), []
    lock.acquire()
    threads = []
    for number in range(4):
        threads.append(
            threading.Thread(target=lambda number=number: (lock.acquire(), order.append(number), lock.release()))
        )
        threads[-1].start()
        while len(lock._queue) < number + 2:
            time.sleep(0.001)
    lock.release()
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3]


def test_an_interrupt_while_waiting_for_a_turn_leaves_the_model_usable(llm, monkeypatch):
    def interrupted(timeout):
        raise KeyboardInterrupt

    stream = llm.stream(PROMPT, max_new_tokens=20)
    next(stream)
    found = []

    def wait():
        with monkeypatch.context() as patch:
            patch.setattr(llm.runtime.turn_lock._changed, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPT, max_new_tokens=2)
        stream.close()
        found.append(llm.generate(PROMPT, max_new_tokens=2).tokens)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert found == [llm.generate(PROMPT, max_new_tokens=2).tokens]


def test_a_prompt_that_is_read_makes_progress(llm, monkeypatch):
    noted, lock = [], llm.runtime.turn_lock
    monkeypatch.setattr(lock, "note_progress", lambda: noted.append(len(noted)))
    with Engine(llm.runtime, PlainDrafter()) as engine:
        seq = SequenceState(llm.encode(PROMPT), 2, Sampler())
        assert engine.admit(seq)
        before = len(noted)
        while engine.prefill(seq, 2):
            before += 1
            assert len(noted) == before


def test_a_stream_in_another_thread_is_waited_for(llm):
    """Until it ends, or makes no progress for `timeout` seconds."""
    stream = llm.stream(PROMPT, max_new_tokens=20)
    next(stream)
    threads, results = in_threads([lambda: llm.generate(PROMPT, max_new_tokens=2).tokens])
    assert "".join(stream) != ""
    threads[0].join()
    assert results == [llm.generate(PROMPT, max_new_tokens=2).tokens]
    assert stream.result.tokens == llm.generate(PROMPT, max_new_tokens=20).tokens

    before, llm.timeout = llm.timeout, 0.05
    stream = llm.stream(PROMPT, max_new_tokens=20)
    next(stream)
    threads, results = in_threads([lambda: llm.generate(PROMPT, max_new_tokens=2)])
    threads[0].join()
    llm.timeout = before
    assert "no progress for 0.05 seconds" in str(results[0])
    with pytest.raises(BusyError, match="still generating"):  # its own thread would wait for itself
        llm.generate(PROMPT, max_new_tokens=2)
    stream.close()
    assert len(llm.generate(PROMPT, max_new_tokens=2).tokens) == 2


@pytest.mark.parametrize("make", [tuple, torch.tensor, lambda ids: torch.tensor([ids]), lambda ids: [ids]])
def test_token_ids_in_any_sequence(llm, make):
    ids = llm.encode(PROMPT)
    assert llm.encode(make(ids)) == ids


def test_the_readers_time_is_not_the_generations(llm, monkeypatch):
    """On a clock by which only the reader takes time."""
    now = [0.0]
    monkeypatch.setattr("selfspec.llm.stream.time.perf_counter", lambda: now[0])
    stream = llm.stream(PROMPT, max_new_tokens=8)
    for _ in stream:
        now[0] += 1.0
    assert now[0] > 3
    assert stream.result.stats.seconds == 0


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (b"abc", {}, "a prompt is a text, token ids or messages; got bytes"),
        (None, {}, "a prompt is a text, token ids or messages; got NoneType"),
        ([1.5], {}, "whole numbers"),
        ([True], {}, "got list"),
        (["a"], {}, "got a list of prompts, which generate_many takes"),
        ([[5], [6]], {}, "got a list of prompts, which generate_many takes"),
        ("\ud800", {}, "not valid Unicode"),
        (PROMPT, {"max_new_tokens": 3.5}, "max_new_tokens 3.5: expected a whole number"),
        (PROMPT, {"stop": ["\ud800"]}, "a stop string is empty or not valid text"),
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ([4096], {}, "token id 4096 is not in the model's vocabulary of 4096"),
        ([-1], {}, "token id -1"),
        (PROMPT, {"max_new_tokens": 0}, "max_new_tokens 0: expected a whole number of at least 1"),
        (PROMPT, {"max_new_tokens": 1020}, r"\(1024 positions\): at most 1015 new tokens fit"),
        ([5] * 1025, {"max_new_tokens": 1}, "no new token fits"),
        (PROMPT, {"temperature": -0.5}, "temperature -0.5"),
        (PROMPT, {"temperature": "hot"}, "temperature 'hot': expected a number"),
        (PROMPT, {"stop": 5}, "stop 5: expected a text, or several"),
        (PROMPT, {"settings": [1]}, "expected fields of a GenerationConfig by name"),
        (PROMPT, {"settings": {1: 1}}, "GenerationConfig has no field '1'"),
        (PROMPT, {"drafter": 5}, "drafter int: expected a drafter"),
    ],
    ids=str,
)
def test_wrong_input_is_refused_before_anything_is_generated(llm, monkeypatch, prompt, options, message):
    monkeypatch.setattr(llm.runtime, "forward", lambda *_, **__: pytest.fail("generated"))
    for call in (llm.generate, llm.stream):
        with pytest.raises(SelfspecError, match=message):
            call(prompt, **options)


def test_wrong_models_profiles_and_drafters_are_named(llm):
    alone = selfspec.wrap(llm.model, None, profile="none")
    assert alone.generate(llm.encode(PROMPT), max_new_tokens=2).text == "", "token ids need no tokenizer"
    with pytest.raises(SelfspecError, match="the model has no tokenizer; expected token ids"):
        alone.generate(PROMPT)
    with pytest.raises(SelfspecError, match="profile 5: expected a Profile, a file, a name, auto or none"):
        selfspec.load("builtin", profile=5)
    for share in (-1, float("nan"), "x"):
        with pytest.raises(SelfspecError, match="expected 0 or more and finite, as a share of the model's bytes"):
            selfspec.load("builtin", extra_memory=share)
    with pytest.raises(SelfspecError, match="model NoneType: expected a model that transformers has loaded"):
        selfspec.wrap(None, None)


def test_a_prompt_of_one_token_and_a_full_context(llm, drafter):
    assert len(llm.generate([5], max_new_tokens=3, drafter=drafter).tokens) == 3
    ids = llm.encode(PROMPT)
    ids = (ids * 110)[:1000]
    out = llm.generate(ids, max_new_tokens=25, drafter=drafter)
    assert out.tokens == llm.generate(ids, max_new_tokens=25).tokens
    theirs = llm.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=25, eos_token_id=None)
    assert out.tokens == theirs[0, 1000:].tolist()


class TestProfiles:
    @pytest.mark.parametrize("speedup", [1.2, 0.9])
    def test_a_shipped_one_is_found_by_its_weights_unless_it_was_slower(self, llm, monkeypatch, speedup):
        shipped = find_profile_file("stdlib-llama-3.7m")
        profile = shipped.model_copy(update={"measured": [shipped.measured[0].model_copy(update={"speedup": speedup})]})
        others = {"other": Profile(model=Identity(layers=3)), "it": profile}
        monkeypatch.setattr(selfspec.profile.shipped, "shipped_profiles", lambda: others)
        expected = profile if speedup > 1 else None
        assert selfspec.wrap(llm.model, llm.tokenizer).profile == expected
        assert selfspec.load("builtin").profile == expected

    def test_another_model_has_none(self):
        wrapped = selfspec.wrap(tiny(CONFIGS["llama"]), None)
        assert wrapped.has_default_profile
        assert wrapped.known_profile is None
        wrapped = selfspec.wrap(tiny(CONFIGS["llama"]), None, profile="none")
        assert wrapped.profile is None
        assert isinstance(wrapped.drafter, PlainDrafter)

    def test_a_file(self, llm, tmp_path):
        fixed = ControllerSpec(name="fixed", options={"k": 2})
        profile = Profile(model=Identity(layers=16), draft=LayerSkipSpec.from_path(selfspec.SkipSet((3,)), fixed))
        write_profile(profile, tmp_path / "p.yaml")
        wrapped = selfspec.wrap(llm.model, llm.tokenizer, profile=tmp_path / "p.yaml")
        assert isinstance(wrapped.drafter, Guard)
        assert isinstance(wrapped.drafter.drafter, LayerSkipDrafter)
        assert wrapped.drafter.drafter.path.skip == selfspec.SkipSet((3,))
        assert wrapped.drafter.drafter.controller.k == 2

    def test_one_that_skips_nothing_decodes_plainly(self, llm):
        wrapped = selfspec.wrap(llm.model, llm.tokenizer, profile=Profile(model=Identity(layers=16)))
        assert isinstance(wrapped.drafter, PlainDrafter)

    def test_of_another_architecture_is_refused(self, llm):
        profile = Profile(model=Identity(layers=16, hidden=64))
        with pytest.raises(SelfspecError, match="another model: hidden 64 in the profile, 128 in the model"):
            selfspec.wrap(llm.model, llm.tokenizer, profile=profile)

    def test_of_other_weights_warns(self, llm):
        profile = Profile(model=Identity(layers=16, fingerprint="0" * 16))
        with pytest.warns(UserWarning, match="made for other weights"):
            selfspec.wrap(llm.model, llm.tokenizer, profile=profile)


def test_dtypes(held_out):
    wrapped = selfspec.load("builtin", profile="none", dtype="bfloat16")
    assert wrapped.runtime.dtype == torch.bfloat16
    out = wrapped.generate(held_out[0], max_new_tokens=8, drafter=wrapped.layer_skip(SKIP))
    assert len(out.tokens) == 8


def test_a_saved_model_is_loaded_from_its_folder(tmp_path, llm):
    llm.model.save_pretrained(tmp_path)
    llm.tokenizer.save_pretrained(tmp_path)
    loaded = selfspec.load(str(tmp_path), profile="none")
    assert loaded.generate(PROMPT, max_new_tokens=5).tokens == llm.generate(PROMPT, max_new_tokens=5).tokens


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "no such folder"),
        ("./missing", "no such folder"),
        ("no-such-org/no-such-model", "cannot be loaded"),
    ],
)
def test_models_that_cannot_be_loaded(name, message):
    with pytest.raises(SelfspecError, match=message):
        selfspec.load(name)


def test_folders_that_are_no_models(tmp_path):
    with pytest.raises(SelfspecError, match=r"has no config\.json"):
        selfspec.load(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SelfspecError, match="cannot be loaded"):
        selfspec.load(str(tmp_path))
    with pytest.raises(SelfspecError, match="is a file, but not a GGUF file; expected a folder"):
        selfspec.load(str(tmp_path / "config.json"))


def test_devices_and_dtypes_that_cannot_be_used():
    with pytest.raises(SelfspecError, match="device 'abacus' cannot be used"):
        selfspec.load("builtin", device="abacus")
    with pytest.raises(SelfspecError, match="dtype 'int3' is not known"):
        selfspec.load("builtin", dtype="int3")


def test_threads_that_share_a_model_get_their_own_text_or_a_clear_error(llm, drafter):
    """Whoever comes while it generates is refused at once; nobody gets another's text."""
    prompts = [f"def f{i}(x):\n    " for i in range(4)]
    expected = {prompt: llm.generate(prompt, max_new_tokens=12).tokens for prompt in prompts}
    done, refused, wrong = [], [], []

    def work(prompt):
        for _ in range(25):
            try:
                tokens = llm.generate(prompt, max_new_tokens=12, drafter=drafter).tokens
                (done if tokens == expected[prompt] else wrong).append(prompt)
            except BusyError:
                refused.append(prompt)

    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(done) + len(refused) == 100
    assert done
    assert llm.generate(prompts[0], max_new_tokens=12).tokens == expected[prompts[0]]


def test_threads_with_models_of_their_own_do_not_disturb_each_other(llm):
    """Two wrappers of the same weights, at the same time, with seeds."""
    others = [selfspec.wrap(llm.model, llm.tokenizer, profile="none") for _ in range(3)]
    options = {"max_new_tokens": 16, "temperature": 0.9}
    expected = [llm.generate(PROMPT, seed=i, **options).tokens for i in range(3)]
    found = {}

    def work(i):
        mine = others[i].layer_skip(SKIP)
        found[i] = [others[i].generate(PROMPT, seed=i, drafter=mine, **options).tokens for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[i] == [expected[i]] * 5 for i in range(3))


def test_generate_shows_every_option_that_there_is():
    """Written out for editors; in the order of `GenerateOptions`, with its defaults."""
    first, prompt, *shown = inspect.signature(LLM.generate).parameters.values()
    assert (first.name, prompt.name) == ("self", "prompt")
    options = list(inspect.signature(GenerateOptions).parameters.values())
    assert [(p.name, p.kind) for p in shown] == [(p.name, p.kind) for p in options]
    named = [p for p in options if p.name != "settings"]
    assert [p.default for p in shown if p.name != "settings"] == [p.default for p in named]


def test_a_special_token_as_stop_string_stops(llm):
    """It never appears in the text, as special tokens are left out of texts."""
    ids = llm.encode(PROMPT)
    plain = llm.generate(ids, max_new_tokens=12).tokens
    tokenizer = copy.deepcopy(llm.tokenizer)
    name = tokenizer.convert_ids_to_tokens(plain[5])
    tokenizer.add_special_tokens({"additional_special_tokens": [name]})
    assert tokenizer.convert_tokens_to_ids(name) == plain[5]
    special = selfspec.wrap(llm.model, tokenizer, profile="none")
    for out in (
        special.generate(ids, max_new_tokens=12, stop=name),
        special.generate_many([ids], max_new_tokens=12, stop=[name])[0],
    ):
        assert out.tokens == plain[: plain.index(plain[5]) + 1]
        assert out.finish == "stop"
        assert name not in out.text
    assert special.generate(ids, max_new_tokens=12).tokens == plain


@pytest.mark.parametrize("stream", [io.StringIO(), None], ids=["no file", "none"])
def test_as_in_a_notebook(llm, monkeypatch, stream):
    """In a running event loop, and with outputs that are no files, or none at all."""
    expected = llm.generate(PROMPT, max_new_tokens=4).text
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)

    async def cell():
        return "".join(llm.stream(PROMPT, max_new_tokens=4)), llm.generate_many([PROMPT], max_new_tokens=4)[0].text

    assert asyncio.run(cell()) == (expected, expected)
