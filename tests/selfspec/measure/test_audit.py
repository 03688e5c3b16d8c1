from __future__ import annotations

import pytest
import torch
from models import CONFIGS, plain, tiny
from transformers.generation.logits_process import SuppressTokensLogitsProcessor

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.controllers import StaticThreshold
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.llm.llm import LLM
from selfspec.measure.audit import audit, first_difference
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.rules import RULES, Verdict
from selfspec.speculation.sampling import Sampler
from selfspec.types.acceptance import Confidence
from selfspec.types.draft_path import DraftPath, SkipSet

PROMPT = [3, 1, 4, 1, 5]


def test_equal_texts_have_no_difference():
    assert first_difference(LeanRuntime(tiny(CONFIGS["llama"])), PROMPT, [1, 2], [1, 2]) is None


def test_another_token_is_a_bug():
    runtime = LeanRuntime(tiny(CONFIGS["llama"], dtype=torch.float32))
    text = plain(runtime, PROMPT, 6)
    wrong = [*text[:3], (text[3] + 1) % 61, *text[4:]]
    difference = first_difference(runtime, PROMPT, text, wrong)
    assert (difference.index, difference.plain, difference.other) == (3, text[3], wrong[3])
    assert not difference.near_tie
    assert "BUG" in str(difference)


def test_a_wrong_plain_text_is_a_bug_too():
    """The other's token is the best: that does not excuse plain decoding's."""
    runtime = LeanRuntime(tiny(CONFIGS["llama"], dtype=torch.float32))
    text = plain(runtime, PROMPT, 6)
    wrong = [*text[:3], (text[3] + 1) % 61, *text[4:]]
    assert not first_difference(runtime, PROMPT, wrong, text).near_tie


def test_a_text_that_goes_on_or_ends_early_is_a_bug():
    runtime = LeanRuntime(tiny(CONFIGS["llama"]))
    assert not first_difference(runtime, PROMPT, [1, 2], [1, 2, 3]).near_tie
    assert not first_difference(runtime, PROMPT, [1, 2], [1]).near_tie


def test_two_equal_logits_are_a_near_tie():
    """Two rows of the head are made equal but for less than rounding moves them."""
    model = tiny(CONFIGS["llama"], dtype=torch.float32)
    runtime = LeanRuntime(model)
    best = plain(runtime, PROMPT, 1)[0]
    twin = (best + 7) % 61
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[best]
    difference = first_difference(runtime, PROMPT, [best], [twin])
    assert difference.gap == 0
    assert difference.near_tie
    assert "near-tie" in str(difference)


class Tokenizer:
    """Just enough of one."""

    def decode(self, ids, **_):
        return "".join(chr(65 + i) for i in ids)


@pytest.fixture
def tiny_llm():
    return LLM(tiny(CONFIGS["llama"]), Tokenizer())


class TestAudit:
    def test_a_sound_drafter_in_float64(self, tiny_llm):
        seen = []
        drafter = tiny_llm.layer_skip(SkipSet((1,), (2,)), "fixed:k=3")
        found = audit(tiny_llm, drafter, [PROMPT, PROMPT[:2]], max_new_tokens=12, on_prompt=seen.append)
        assert (found.prompts, found.tokens, found.near_ties, found.bugs) == (2, 24, 0, 0)
        assert found.stats.drafted > 0
        assert len(seen) == 2

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_draft_in_few_bits(self, tiny_llm, temperature):
        path = DraftPath(SkipSet((1,)), int8=SkipSet((0,), (0, 1, 2, 3)), int4=SkipSet((2, 3)), head="int8")
        drafter = LayerSkipDrafter(tiny_llm.runtime, path, StaticThreshold(0.3, 5), confidence=Confidence(gap=1.0))
        found = audit(tiny_llm, drafter, [PROMPT, PROMPT[:2]], max_new_tokens=12, temperature=temperature, seed=4)
        assert (found.tokens, found.near_ties, found.bugs) == (24, 0, 0)
        assert found.stats.drafted > 0

    def test_sampling_with_a_seed(self, tiny_llm):
        drafter = tiny_llm.layer_skip(SkipSet((1,), (2,)), "fixed:k=3")
        found = audit(tiny_llm, drafter, [PROMPT], max_new_tokens=20, temperature=1.0, seed=4)
        assert (found.tokens, found.bugs, found.near_ties) == (20, 0, 0)

    @pytest.mark.parametrize(("rule", "temperature"), [("greedy", 0.0), ("match", 1.0)])
    def test_every_bug_is_found_and_decoding_goes_on_after_it(self, tiny_llm, monkeypatch, rule, temperature):
        """A rule that gets the token after a draft wrong wherever its position is a multiple of four."""
        right, wrong_at = RULES[rule], []

        def wrong(draft, scores, sampler, position):
            path, following, p = right(draft, scores, sampler, position)
            if len(draft) and (position + len(path)) % 4 == 0:
                wrong_at.append(position + len(path) - len(PROMPT))
                following = (following + 1) % 61
            return Verdict(path, following, p)

        monkeypatch.setitem(RULES, rule, wrong)
        drafter = tiny_llm.layer_skip(SkipSet((1,), (2,)), "fixed:k=4")
        found = audit(tiny_llm, drafter, [PROMPT], max_new_tokens=24, temperature=temperature, seed=4)
        assert found.bugs == len(found.differences) > 1
        assert found.near_ties == 0
        assert found.tokens == 24
        assert {difference.index for _, difference in found.differences} <= set(wrong_at)
        data = found.as_dict()
        assert data["bugs"] == found.bugs
        assert data["differences"][0]["prompt"] == 0

    def test_prompts_are_wanted(self, tiny_llm):
        with pytest.raises(SelfspecError, match="no prompts"):
            audit(tiny_llm, PlainDrafter(), [])


@pytest.mark.long("audits of half precision")
def test_half_precision_differs_by_near_ties_only(held_out):
    """bfloat16 on the built-in model: rounding explains every difference."""
    llm = selfspec.load("builtin", profile="none", dtype="bfloat16")
    drafter = llm.layer_skip(SkipSet((9, 11, 13), (6, 11, 12)), "fixed:k=4")
    found = audit(llm, drafter, held_out[:6], max_new_tokens=48)
    print(f"{found.near_ties} near-ties in {found.tokens} tokens")
    assert found.bugs == 0


def test_a_processor_that_forbids_a_token_is_heeded():
    """A token that is forbidden has no logit to compare: choosing it is a bug."""
    runtime = LeanRuntime(tiny(CONFIGS["llama"], dtype=torch.float32))
    text = plain(runtime, PROMPT, 3)
    forbidden = (text[1] + 1) % 61
    sampler = Sampler(processors=[SuppressTokensLogitsProcessor([forbidden])])
    difference = first_difference(runtime, PROMPT, text, [text[0], forbidden, 5], sampler=sampler)
    assert difference.gap == float("inf")
    assert not difference.near_tie
