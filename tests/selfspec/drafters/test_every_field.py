"""Every field of every kind of draft changes what is made of a profile: none is read and dropped."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from every_drafter import KINDS
from heads import random_head
from models import small
from toys import Doubled
from trained import random_trained

from selfspec.drafters import make_drafter, registry
from selfspec.models.low_precision import fake
from selfspec.profile import draft_spec as kinds
from selfspec.profile.schema import Profile
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath
from selfspec.types.identity import Identity

VOCABULARY, LAYERS = 11, 3
BASES: dict[str, dict[str, Any]] = {
    "layer-skip": {"skip": {"mlp": [0]}, "proposers": [{"kind": "lookup"}]},
    "merged": {"drafters": [{"kind": "recycle"}, {"kind": "lookup"}]},
    "model": {"model": "one"},
}
OTHERS: dict[str, Any] = {
    "skip": {"attention": [1], "mlp": [0]},
    "int8": {"mlp": [2]},
    "int4": {"mlp": [1]},
    "head": "int8",
    "confidence": {"bias": 0.3, "probability": 0.5, "gap": 0.2},
    "controller": {"name": "fixed", "options": {"k": 3}},
    "candidates": 3,
    "vocabulary": [1, 2, 5],
    "proposers": [{"kind": "lookup"}, {"kind": "lookup"}],
    "spared": 0.5,
    "below": {"part": "eagle", "step": 0.1},
    "trained": "adapter",
    "int4_weights": "int4",
    "step": 0.45,
    "window": 9,
    "every": 5,
    "patience": 3,
    "skip_layers": 2,
    "method": "hybrid",
    "block": 5,
    "parallel": 11,
    "start": "padding",
    "ngram": 3,
    "guesses": 2,
    "part": "another",
    "drafters": [{"kind": "recycle"}, {"kind": "lookup"}, {"kind": "input"}],
    "model": "other",
    "dtype": "float64",
    "device": "meta",
    "bits": "int8",
}
PRICES = ("step", "spared")  # which say what drafting costs, and nothing of the drafter
COSTS = CostModel(context=9, base=1, attention=1, mlp=1, widths=[1, 8], verify=[40.0, 50.0], round=0, wider=[1.5, 2.5])
FIELDS = [(kind, field) for kind in KINDS for field in kinds._KINDS[kind].model_fields if field != "kind"]


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(small(VOCABULARY, LAYERS, seed=2), kernel=fake)


@pytest.fixture
def loaded(monkeypatch) -> list[Any]:
    """Draft models, heads and trained parts are made at random; the list is told what was asked for.

    A draft model named `other words` has another vocabulary.
    """
    asked: list[Any] = []

    def load_model(name, **how):
        asked.append((name, how))
        return small(2 * VOCABULARY if name == "other words" else VOCABULARY, 1, seed=3), None

    def head(runtime, profile, part):
        asked.append(part)
        return random_head(runtime, range(VOCABULARY - 1))

    registry._draft_model.cache_clear()
    monkeypatch.setattr(registry, "load_model", load_model)
    monkeypatch.setattr(registry, "apply_layout_", lambda model, **how: asked.append(how))
    monkeypatch.setattr(registry, "open_runtime", lambda model: LeanRuntime(model, kernel=fake))
    monkeypatch.setattr(registry, "_tokenizer", lambda profile: None)
    monkeypatch.setattr(registry, "TokenizerMap", lambda ours, theirs, sizes: Doubled(VOCABULARY))
    monkeypatch.setattr(registry, "_head", head)
    monkeypatch.setattr(registry, "read_part", lambda path: None)
    monkeypatch.setattr(registry, "open_int4", lambda runtime, path: asked.append(path))
    monkeypatch.setattr(Profile, "part_path", lambda self, name: name)
    monkeypatch.setattr(registry, "trained_of", lambda runtime, part: random_trained(runtime, DraftPath()))
    return asked


def described(value: Any, depth: int = 4) -> Any:
    """What a drafter is made of, as far as it can be compared."""
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype), float(value.double().sum()))
    if isinstance(value, LeanRuntime):
        return (value.layers, str(value.dtype), str(value.device))
    if isinstance(value, (list, tuple, set, frozenset)):
        return [described(one, depth) for one in value]
    if isinstance(value, dict):
        return {str(key): described(one, depth) for key, one in value.items()}
    if depth == 0 or not type(value).__module__.startswith("selfspec"):
        return type(value).__name__
    if dataclasses.is_dataclass(value):
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        held = {**getattr(value, "__dict__", {})}
    return {"": type(value).__name__, **{name: described(one, depth - 1) for name, one in held.items()}}


def made(runtime, loaded, kind, field, **fields) -> Any:
    """What a profile of this draft comes to: its drafter and what was loaded for it, or what its steps cost."""
    loaded.clear()
    registry._draft_model.cache_clear()
    draft = kinds._KINDS[kind].model_validate({"kind": kind, **BASES.get(kind, {}), **fields})
    profile = Profile(model=Identity(layers=LAYERS), draft=draft, costs=COSTS)
    if field in PRICES:
        return profile.payoff.draft
    return {"drafter": described(make_drafter(runtime, profile)), "loaded": list(loaded)}


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=[" ".join(one) for one in FIELDS])
def test_a_field_changes_what_is_made(runtime, loaded, kind, field):
    before = made(runtime, loaded, kind, field)
    assert before == made(runtime, loaded, kind, field), "what does not change is the same again"
    assert made(runtime, loaded, kind, field, **{field: OTHERS[field]}) != before


OF_OTHER_WORDS = [field for kind, field in FIELDS if kind == "model" and field not in ("model", *PRICES)]


@pytest.mark.parametrize("field", OF_OTHER_WORDS)
def test_a_field_changes_what_a_draft_model_of_other_tokens_is_made_of(runtime, loaded, field):
    before = made(runtime, loaded, "model", field, model="other words")
    assert before["drafter"][""] == "CrossVocabularyDrafter"
    assert made(runtime, loaded, "model", field, model="other words", **{field: OTHERS[field]}) != before


@pytest.mark.parametrize("changed", [{"part": "another"}, {"step": 0.4}])
def test_a_head_below_a_path_is_what_its_fields_say(runtime, loaded, changed):
    below = {"part": "eagle", "step": 0.1}
    before, after = (
        made(runtime, loaded, "layer-skip", "below", below={**below, **change}) for change in ({}, changed)
    )
    assert after != before
