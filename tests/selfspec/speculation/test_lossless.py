"""Greedy output is plain decoding's, and `transformers`' but for near-ties, on the built-in model."""

from __future__ import annotations

import random

import pytest
import torch
from amount import some
from lowering import random_path

from selfspec.controllers import CONTROLLERS
from selfspec.drafters import PlainDrafter
from selfspec.drafters.registry import make_layer_skip
from selfspec.measure.audit import first_difference
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import find_profile_file
from selfspec.types.acceptance import Confidence
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath, SkipSet

PROMPTS, TOKENS = some(20, 6), 32
FEW = some(8, 3)  # prompts for each of many skip sets and controllers


def skip_sets() -> dict[str, SkipSet]:
    """The shipped set, the empty one, and random ones from few to many sub-layers."""
    draw = random.Random(0)
    sets = {"shipped": find_profile_file("stdlib-llama-3.7m").skip_set, "empty": SkipSet()}
    for count in (4, 10, 16, 22, 28):
        chosen = set(draw.sample(range(32), count))
        sets[f"random {count}"] = SkipSet.from_bits([i in chosen for i in range(32)])
    return sets


def paths() -> dict[str, DraftPath]:
    """Random ones with sub-layers and the head in few bits, by this machine's own products."""
    made = {f"random {seed}": random_path(seed, 16, words=2048) for seed in range(3)}
    whole = {f"all {mode}": DraftPath.from_modes([mode] * 32, head=mode) for mode in ("int8", "int4")}
    return {**made, **whole}


@pytest.fixture(scope="module")
def plain_texts(llm64, held_out):
    return [llm64.generate(p, max_new_tokens=TOKENS, drafter=PlainDrafter()).tokens for p in held_out[:FEW]]


def tried(cases, always):
    """Of many cases those that are always tried; `make proof` tries all."""
    return [pytest.param(*case, marks=[] if case[0] in always else [pytest.mark.proof]) for case in cases.items()]


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize(("name", "skip"), tried(skip_sets(), ("shipped", "empty", "random 16")))
def test_float64_equals_plain_decoding(llm64, held_out, plain_texts, name, skip, controller):
    drafter = llm64.layer_skip(skip, ControllerSpec(name=controller))
    for prompt, expected in zip(held_out[:FEW], plain_texts, strict=True):
        assert llm64.generate(prompt, max_new_tokens=TOKENS, drafter=drafter).tokens == expected


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize(("name", "path"), tried(paths(), ("random 0", "all int8")))
def test_few_bits_equal_plain_decoding(llm64, held_out, plain_texts, name, path, controller):
    confidence = Confidence(bias=1.0, probability=0.2, gap=0.8)
    spec = LayerSkipSpec.from_path(path, ControllerSpec(name=controller), confidence=confidence)
    drafter = make_layer_skip(llm64.runtime, spec, Profile(model=llm64.identity))
    for prompt, expected in zip(held_out[:FEW], plain_texts, strict=True):
        assert llm64.generate(prompt, max_new_tokens=TOKENS, drafter=drafter).tokens == expected


def test_float32_equals_transformers_generate_but_for_near_ties(llm, held_out):
    """Plain and speculative decoding against `generate(do_sample=False)` of the same model."""
    skip = SkipSet((5, 9, 11, 13), (4, 7, 10, 12))
    drafters = {"plain": PlainDrafter(), "layer skip": llm.layer_skip(skip)}
    near_ties = 0
    for prompt in held_out[:PROMPTS]:
        ids = torch.tensor([llm.encode(prompt)])
        theirs = llm.model.generate(ids, do_sample=False, max_new_tokens=TOKENS)[0, ids.shape[1] :].tolist()
        for drafter in drafters.values():
            ours = llm.generate(prompt, max_new_tokens=TOKENS, drafter=drafter).tokens
            if ours != theirs:
                index = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
                prefix = torch.cat((ids, torch.tensor([ours[:index]], dtype=torch.long)), dim=1)
                with torch.no_grad():
                    reference = llm.model(prefix).logits[0, -1]
                difference = first_difference(llm.runtime, ids[0].tolist(), ours, theirs, reference=reference)
                assert difference is not None
                assert difference.near_tie, str(difference)
                near_ties += 1
    print(f"{near_ties} near-ties in {2 * PROMPTS} texts of {TOKENS} tokens")
    assert near_ties <= 4
