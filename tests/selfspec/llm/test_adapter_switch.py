"""Several adapters beside one model: each request has its own, and gives that adapter's own text."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from models import adapted
from wants import needs

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.engine.engine import Engine
from selfspec.llm.batch import Batch
from selfspec.llm.llm import wrap
from selfspec.llm.options import Options
from selfspec.types.draft_path import SkipSet

PROMPT = "def add(a, b):\n"
NEW = 20
pytestmark = needs("peft", "PEFT")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two adapters, and by name what each generates, and the model without any."""
    found, texts = {}, {}
    base = selfspec.load("builtin", profile="none")
    ids = torch.tensor([base.encode(PROMPT)])
    for name, seed in (("one", 1), ("two", 2)):
        model = adapted(seed)
        found[name] = tmp_path_factory.mktemp("adapters") / name
        model.save_pretrained(str(found[name]))
        texts[name] = model.generate(input_ids=ids, do_sample=False, max_new_tokens=NEW)[0, ids.shape[1] :].tolist()
    texts["base"] = base.generate(PROMPT, max_new_tokens=NEW).tokens
    assert len({tuple(text) for text in texts.values()}) == 3
    return found, texts


@pytest.fixture
def llm(folders):
    return selfspec.load("builtin", profile="none", adapters=folders[0])


ORDER = ("one", "two", "base", "two", None, "one")


def test_each_request_has_its_own(llm, folders):
    for name in ORDER:
        assert llm.generate(PROMPT, max_new_tokens=NEW, adapter=name).tokens == folders[1][name or "base"]


def test_drafted_is_plain(llm, folders, tmp_path):
    drafter = llm.layer_skip(SkipSet(attention={5, 6}, mlp={7}), "fixed:k=3")
    looked = selfspec.load("builtin", profile="none", adapters=folders[0], method="lookup")
    for name in ORDER:
        drafted = llm.generate(PROMPT, max_new_tokens=NEW, adapter=name, drafter=drafter)
        assert drafted.tokens == folders[1][name or "base"]
        assert drafted.stats.drafted > 0
        assert looked.generate(PROMPT, max_new_tokens=NEW, adapter=name).tokens == folders[1][name or "base"]


def test_in_a_batch_each_gives_what_it_gives_alone(llm, folders):
    """Though they share a beginning, no keys are shared between adapters; they may come in any order."""
    with Batch(llm, rows=3) as batch:
        asked = [(name, batch.add(PROMPT, Options(max_new_tokens=NEW, adapter=name))) for name in ORDER * 2]
        together = set()
        while not batch.idle:
            batch.step()
            together.add(frozenset(request.adapter for request in batch.running))
            llm.adapters.use("two")  # as a stream beside it would
        assert [request.tokens for _, request in asked] == [folders[1][name or "base"] for name, _ in asked]
        assert max(map(len, together)) == 1


def test_threads_wait_for_each_others_rounds(llm, folders, monkeypatch):
    """While a batch's round runs, no stream of another thread switches the adapter."""
    texts = {}

    def decode(name):
        texts[name] = llm.generate(PROMPT, max_new_tokens=NEW, adapter=name).tokens

    thread = threading.Thread(target=decode, args=["two"])
    with Batch(llm, rows=2) as batch:
        request, step = batch.add(PROMPT, Options(max_new_tokens=NEW, adapter="one")), Engine.step

        def slow(engine):
            if thread.ident is None:
                thread.start()
                thread.join(0.5)
            return step(engine)

        monkeypatch.setattr(Engine, "step", slow)
        while not batch.idle:
            batch.step()
    thread.join()
    assert (request.tokens, texts["two"]) == (folders[1]["one"], folders[1]["two"])


def test_streams_that_take_turns(llm, folders):
    """One of a batch's rounds, then some of a stream: each goes on with its own."""
    with Batch(llm, rows=2) as batch:
        request = batch.add(PROMPT, Options(max_new_tokens=NEW, adapter="one"))
        stream = llm.stream(PROMPT, max_new_tokens=NEW, adapter="two")
        pieces = iter(stream)
        while not batch.idle:
            batch.step()
            next(pieces, None)
        for _ in pieces:
            pass
        assert request.tokens == folders[1]["one"]
        assert stream.result.tokens == folders[1]["two"]


def test_keys_of_another_adapter_are_not_reused(llm, folders):
    for name in ORDER:
        stream = llm.start(PROMPT, Options(max_new_tokens=NEW, adapter=name), reuse=True)
        assert stream.wait().tokens == folders[1][name or "base"]


def test_a_model_that_came_with_one_acts_with_it_unless_told(folders):
    llm = wrap(adapted(1), selfspec.load("builtin", profile="none").tokenizer, profile="none")
    assert llm.generate(PROMPT, max_new_tokens=NEW).tokens == folders[1]["one"]
    assert llm.generate(PROMPT, max_new_tokens=NEW, adapter="base").tokens == folders[1]["base"]
    assert llm.generate(PROMPT, max_new_tokens=NEW).tokens == folders[1]["one"]


def test_wrong_names_are_one_clear_line(llm, folders, tmp_path):
    with pytest.raises(SelfspecError, match="adapter 'three' is not loaded; known: one, two, base"):
        llm.generate(PROMPT, adapter="three")
    with pytest.raises(SelfspecError, match="adapter 'one' is not loaded; known: base"):
        selfspec.load("builtin", profile="none").generate(PROMPT, adapter="one")
    with pytest.raises(SelfspecError, match="adapter name 'base'"):
        selfspec.load("builtin", profile="none", adapters={"base": folders[0]["one"]})
    with pytest.raises(SelfspecError, match="no folder with an adapter_config.json"):
        selfspec.load("builtin", profile="none", adapters={"x": tmp_path})


@pytest.mark.parametrize("asked", ORDER)
def test_threads_that_wait_for_each_other(llm, folders, asked):
    """Who waits reads its prompt with its own adapter, and reuses no keys of the one it waited for."""
    stream, found = llm.start(PROMPT, Options(max_new_tokens=NEW, adapter="one"), reuse=True), []
    pieces = iter(stream)
    next(pieces)
    options = Options(max_new_tokens=NEW, adapter=asked)
    thread = threading.Thread(target=lambda: found.append(llm.start(PROMPT, options, reuse=True).wait().tokens))
    thread.start()
    while thread.is_alive() and len(llm.runtime.turn_lock._queue) < 2:
        time.sleep(0.001)
    for _ in pieces:
        pass
    thread.join()
    assert stream.result.tokens == folders[1]["one"]
    assert found == [folders[1][asked or "base"]]
