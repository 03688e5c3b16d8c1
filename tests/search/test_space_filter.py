"""Which modes a search tries: what the model, the memory and the machine allow."""

from __future__ import annotations

import pytest
import torch
from layouts import needs_native
from models import small
from selfspec.search.space import Space
from selfspec.search.space_filter import Choices, MemoryBudget, cheaper_choices, supported_choices
from torch import nn

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.types.costs import CostModel, ModeCosts
from selfspec.types.draft_path import MODES, DraftPath, SkipSet


@pytest.fixture
def llm(llm):
    return selfspec.wrap(llm.model, llm.tokenizer, profile="none")


def test_whatever_can_be_rounded_may_be(llm):
    choices = supported_choices(llm, MODES, memory=0.3)
    assert choices == Choices(modes=list(MODES), head=["full", "int8"])
    space = choices.narrow(Space(llm.runtime.layers))
    assert (space.base, len(space)) == ("int8", 2 * llm.runtime.layers + 1)
    assert supported_choices(llm, ("full", "int4", "skip"), memory=0.3).head == ["full", "int8", "int4"]


def test_without_memory_drafts_skip_or_run_in_full(llm):
    assert supported_choices(llm, MODES, memory=0.0) == Choices(modes=["full", "skip"], head=["full"])


def test_what_is_hooked_stays_as_it_is():
    model = small()
    mlp = model.model.layers[1].mlp.down_proj
    mlp.register_forward_hook(lambda *_: None)
    llm = selfspec.wrap(model, None, profile="none")
    choices = supported_choices(llm, MODES, memory=0.3)
    assert choices.modes == ["full", "int8", "skip"], "groups of 32 inputs do not fit 16"
    assert (choices.attention, choices.mlp) == ([], [1])
    assert choices.narrow(Space(3)).path(choices.narrow(Space(3)).start).rows(3) == ("888", "8#8")


def test_what_is_no_cheaper_is_left_out():
    costs = CostModel(context=9, base=1, attention=2, mlp=4, widths=[1], verify=[9], round=0)
    choices = Choices(modes=list(MODES), head=["full", "int8"])
    assert cheaper_choices(choices, costs) == Choices(modes=["full", "skip"], head=["full"])
    low = {"int8": ModeCosts(attention=1, mlp=2, head=0), "int4": ModeCosts(attention=2, mlp=4, head=0)}
    assert cheaper_choices(choices, costs.model_copy(update={"low": low})) == Choices(
        modes=["full", "int8", "skip"], head=["full", "int8"]
    )
    with pytest.raises(SelfspecError, match="int8 is no cheaper than running in full here; expected skip among them"):
        cheaper_choices(Choices(modes=["full", "int8"], head=["full"]), costs)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 0.3), (torch.bfloat16, 0.55), (torch.float64, 0.3)])
def test_memory_is_a_share_of_the_models(dtype, limit):
    model = nn.Module.to(small(vocabulary=64), dtype)
    llm = selfspec.wrap(model, None, profile="none")
    memory = MemoryBudget.from_llm(llm, None)
    assert memory.limit == limit
    everything = SkipSet((0, 1, 2), (0, 1, 2))
    path = DraftPath(int8=everything, head="int8")
    held = llm.runtime.compile(path).bytes
    assert memory.share(path) == pytest.approx(held / sum(p.numel() * p.element_size() for p in model.parameters()))
    assert memory.excess(path) == pytest.approx(memory.share(path) - limit)
    assert MemoryBudget.from_llm(llm, 0.0).excess(DraftPath(everything)) <= 0, "what is skipped takes nothing"


@needs_native
def test_weights_held_in_16_bits_leave_int8_the_share_that_it_has_of_bfloat16():
    llm = selfspec.load("builtin", profile="none", dtype="float32", device="cpu", layout="native")
    assert llm.held == "bfloat16"
    assert MemoryBudget.from_llm(llm, None).limit == 0.55
    assert selfspec.load("builtin", profile="none", dtype="float32", device="cpu", layout="rows").held is None
