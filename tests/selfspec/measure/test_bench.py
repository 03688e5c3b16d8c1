"""A benchmark's figures: formulas on rounds written by hand, and what a whole one says of a small model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layouts import CHOOSABLE, HAS_ONEDNN, fastest, seconds_by_rows

from selfspec.basics.errors import SelfspecError, UnsupportedModelError
from selfspec.measure import bench, cost_fitting, pace
from selfspec.measure.bench import BenchCallbacks, Benchmark, BenchTask, Oracle
from selfspec.measure.bench_methods import (
    METHODS,
    check_methods,
    check_supported,
    draft_model,
    find_method,
    supported,
    weights_of,
)
from selfspec.measure.cost_fitting import path_costs_seconds
from selfspec.measure.model_copies import extra_drafter_bytes, load_model_copies
from selfspec.measure.summary import expected, summary, theory
from selfspec.measure.timing import Runs
from selfspec.models.families import parts_of
from selfspec.models.half_storage import HalfLinear
from selfspec.models.layout import apply_layout_
from selfspec.models.linears import joined_tensor
from selfspec.profile.draft_spec import LayerSkipSpec, parse_draft
from selfspec.profile.drafter_specs import ModelSpec
from selfspec.profile.reading import write_profile
from selfspec.profile.schema import Profile
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath, SkipSet
from selfspec.types.draft_work import HEAD_STEP, steps_of
from selfspec.types.identity import Identity
from selfspec.types.stats import Round, Stats, acceptance_by_position

COSTS = CostModel(context=9, base=0.4, attention=0, mlp=0, widths=[1, 2, 3], verify=[0.9, 1.0, 1.1], round=0.1)


def rounds(*pairs):
    return [Round(drafted, accepted, accepted + 1, 0.5, drafted, work=steps_of(drafted)) for drafted, accepted in pairs]


def test_acceptance_by_position():
    assert acceptance_by_position(rounds((2, 2), (2, 1), (1, 0), (0, 0))) == [pytest.approx(2 / 3), 0.5]
    assert acceptance_by_position([]) == []


def test_theory_is_leviathans_formula():
    done = rounds((2, 2), (2, 1), (2, 0), (2, 1))
    a = 4 / (4 + 3)  # four accepted, three where all before were
    assert theory(done, COSTS) == pytest.approx((1 + a + a * a) / (0.1 + 2 * 0.4 + 1.1))
    assert theory(rounds((1, 1)), COSTS) == pytest.approx(2 / (0.1 + 0.4 + 1.0))
    assert theory(rounds((0, 0)), COSTS) == 1


def test_what_its_rounds_cost():
    done = rounds((2, 1), (0, 0))
    assert expected(done, COSTS) == pytest.approx(3 / ((0.1 + 0.8 + 1.1) + (0.1 + 0.9)))


def test_a_summary():
    def run(first, *later):
        log = [Round(1, 0, 1, first), *(Round(1, 1, 2, s) for s in later)]
        tokens = sum(done.tokens for done in log)
        accepted = len(later)
        counts = {"rounds": len(log), "drafted": len(log), "nodes": len(log), "accepted": accepted, "tokens": tokens}
        return Stats(**counts, seconds=sum(d.seconds for d in log), log=log)

    runs = Runs({"a": [[run(1.0, 0.5, 0.5)], [run(2.0, 0.25, 0.5)]], "b": [[run(4.0)], [run(1.0, 1.0)]]})
    found = summary(runs, "a", bases=["b"])
    assert found["first_token_seconds"]["p50"] == 1.5
    assert found["emission_seconds"]["p50"] == 0.5
    assert found["inter_token_seconds"]["p50"] == 0.25
    assert found["tokens_per_round"] == pytest.approx(10 / 6)
    assert found["accepted_per_round"] == pytest.approx(4 / 6)
    assert found["ratio"]["b"]["low"] <= found["ratio"]["b"]["median"] <= found["ratio"]["b"]["high"]


def test_methods():
    check_methods(["plain", "hf"])
    for wrong, why in ((["hf"], "must have 'plain'"), (["plain", "x"], "not known"), (["plain", "plain"], "twice")):
        with pytest.raises(SelfspecError, match=why):
            check_methods(wrong)


def test_each_method_says_what_it_is_and_on_which_weights_it_runs():
    assert {name: known.weights for name, known in METHODS.items()} == {
        "plain": "plain",
        "profile": "drafting",
        "path": "drafting",
        "guarded": "drafting",
        "early-exit": "drafting",
        "lookup": "plain",
        "recycle": "plain",
        "input": "plain",
        "jacobi": "plain",
        "gauss-seidel": "plain",
        "hybrid-jacobi": "plain",
        "lookahead": "plain",
        "swift": "plain",
        "clasp": "plain",
        "hf": "hf",
        "hf-early-exit": "hf",
        "hf-prompt-lookup": "hf",
    }
    assert weights_of(["plain", "hf-prompt-lookup", "hf"]) == {"plain", "hf"}
    assert weights_of(["model:small"]) == {"plain"}


@pytest.mark.parametrize(("states", "trees"), [(True, False), (False, False), (False, True)])
def test_methods_that_a_model_cannot_run_are_left_out(llm, monkeypatch, caplog, states, trees):
    monkeypatch.setattr(llm.model, "_is_stateful", states, raising=False)
    monkeypatch.setattr(llm.runtime, "trees", trees)
    profile, names = Profile(model=llm.identity), ["plain", "lookup", "swift", "hf", "hf-prompt-lookup", "hf-model:x"]
    left_out = [*["swift"] * (not trees), *["hf-prompt-lookup", "hf-model:x"] * states]
    assert supported(names, llm, profile) == [name for name in names if name not in left_out]
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split("'")[1] for message in messages if "is left out: " in message] == left_out
    for name in left_out:
        with pytest.raises(UnsupportedModelError, match=f"{type(llm.model).__name__}.*; expected"):
            check_supported(name, llm, profile)


def test_draft_models_and_profiles_are_methods_too(tmp_path):
    assert find_method("parts/eagle.yaml").weights == "drafting"
    assert (find_method("hf-model:small").weights, find_method("hf-model:small").assistant) == ("hf", "small")
    assert [draft_model(name) for name in ("model:a:b", "hf-model:c", "plain")] == ["a:b", "c", None]
    for wrong in ("model:", "hf-model:", "hf-model", "yaml"):
        with pytest.raises(SelfspecError, match=f"method '{wrong}' is not known"):
            find_method(wrong)


def test_what_a_profile_of_its_own_drafts(llm, tmp_path):
    own = Profile(model=llm.identity, draft=LayerSkipSpec.from_path(SkipSet((3,), (5,))))
    write_profile(own, tmp_path / "own.yaml")
    drafter = find_method(str(tmp_path / "own.yaml")).drafter(llm, Profile(model=llm.identity))
    assert drafter.path == own.path
    write_profile(Profile(model=Identity(layers=3)), tmp_path / "other.yaml")
    with pytest.raises(SelfspecError, match="of another model"):
        find_method(str(tmp_path / "other.yaml")).drafter(llm, Profile(model=llm.identity))


def test_a_draft_models_steps_are_timed(llm):
    """It is the model itself, so a step takes about as long as plain decoding's, not what a profile guesses."""
    found = find_method("model:builtin").profile(llm, Profile(model=llm.identity))
    assert found.draft.model == "builtin"
    assert found.draft.step != ModelSpec(model="builtin").step
    drafter = find_method("model:builtin").drafter(llm, Profile(model=llm.identity))
    assert extra_drafter_bytes(drafter, llm.runtime) >= 4 * sum(p.numel() for p in llm.model.parameters())


def test_what_is_held_beside_the_model(llm):
    path = DraftPath.from_modes(["int8"] * (2 * llm.runtime.layers))
    few = LayerSkipSpec.model_validate({"int8": {"attention": [1, 2], "mlp": [1]}})
    profile = Profile(model=llm.identity, draft=few)
    held = extra_drafter_bytes(llm.drafter_for(profile), llm.runtime)
    assert 0 < held == llm.runtime.extra_bytes(profile.path) < llm.runtime.extra_bytes(path)
    assert extra_drafter_bytes(llm.guarded_drafter(profile), llm.runtime) == held
    merged = parse_draft({"kind": "merged", "drafters": [{"kind": "lookup"}, few.model_dump(exclude_none=True)]})
    assert extra_drafter_bytes(llm.drafter_for(Profile(model=llm.identity, draft=merged)), llm.runtime) == held
    assert (
        extra_drafter_bytes(
            llm.drafter_for(Profile(model=llm.identity, draft=parse_draft({"kind": "lookup"}))), llm.runtime
        )
        == 0
    )


def test_a_method_that_is_slower_is_dropped_early():
    def runs(**speeds):
        return Runs(
            {name: [[Stats(tokens=speed, rounds=1, seconds=1.0)] for speed in of] for name, of in speeds.items()}
        )

    def hopeless(patience, **speeds):
        task = BenchTask(("plain",), ["x"] * 9, 4, 1, Profile(model=Identity(layers=2)), patience=patience)
        return Benchmark(None, task)._hopeless(runs(plain=[10] * len(speeds["slow"]), **speeds))

    assert hopeless(3, slow=[8, 9, 8], fast=[11, 9, 12]) == {"slow"}
    assert hopeless(4, slow=[8, 9, 8], fast=[11, 9, 12]) == hopeless(None, slow=[1, 1, 1]) == set()
    assert hopeless(3, slow=[9, 9, 11], fast=[20, 20, 20]) == set(), "it may be faster yet"
    assert hopeless(2, slow=[8, 8, 8], gone=[5, 5]) == {"slow"}, "what went no further is not looked at again"


PAIRS = [  # what `auto` takes for plain decoding and for drafting
    *((name, name) for name in CHOOSABLE),
    *([("rows", "onednn"), ("columns", "onednn")] if HAS_ONEDNN else []),
]
NEW_TOKENS = 6
# A plain step takes 1 s on the weights that `skip` uses, and half of that on those of `plain` where they lie otherwise.
TOLD = CostModel(context=9, base=0.25, attention=0, mlp=0, widths=[1, 8], verify=[0.75, 1.5], round=0.25)
ALONE = 0.25


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def found(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SELFSPEC_CACHE", str(tmp_path_factory.mktemp("bench")))
        patch.setattr("selfspec.models.layout.measure_layouts", lambda model: fastest(*request.param))
        patch.setattr(bench, "measure_path_costs", lambda *_, **__: TOLD)
        patch.setattr(bench, "forward_seconds", lambda *_, **__: ALONE)
        patch.setattr(cost_fitting, "forward_seconds", lambda *_, **__: ALONE)
        patch.setattr(pace, "forward_seconds", lambda *_, **__: ALONE)
        patch.setattr(bench, "read_bandwidth", lambda size, device: 2.0 * size)
        subjects = load_model_copies("builtin", ["plain", "profile", "hf"], widened=2, device="cpu", dtype="auto")
        profile = Profile(model=subjects.identity, draft=LayerSkipSpec.from_path(SkipSet((3,), (5,))))
        task = BenchTask(("plain", "profile", "hf"), ["def f(x):\n", "class A:\n"], NEW_TOKENS, 1, profile)
        events = []
        watch = BenchCallbacks(events.append, lambda *estimate: events.append(estimate), lambda: events.append("run"))
        benchmark = Benchmark(subjects, task, Oracle(lambda *_: (2.0, 3.0), lambda *_: 7.0), watch)
        return subjects, benchmark.conditions(), benchmark.run_temperature(0.0), events


def test_each_method_has_the_layout_that_serves_it(found, request):
    subjects, conditions, _, _ = found
    plain, drafting = request.node.callspec.params["found"]
    assert conditions["layouts"] == {"plain": plain, "drafting": drafting}
    assert (subjects.drafting is subjects.plain) == (plain == drafting)
    assert list(conditions["passes"]) == ["plain", *(["drafting"] if plain != drafting else []), "hf"]


@pytest.mark.parametrize(("by_rows", "by_columns"), [(2.0, 1.0), (1.0, 2.0)])
def test_speedups_are_over_the_fastest_plain_decoding(monkeypatch, by_rows, by_columns):
    """Whichever weights were thought to suit it: here `rows`, and `columns` drafting."""
    monkeypatch.setattr("selfspec.measure.model_copies.layout_times", lambda model: fastest("rows", "columns"))
    monkeypatch.setattr("selfspec.measure.cost_fitting.forward_seconds", seconds_by_rows(by_rows, by_columns))
    subjects = load_model_copies("builtin", ["plain", "profile"], device="cpu", dtype="auto")
    assert subjects.layouts == {"plain": "columns" if by_columns < by_rows else "rows", "drafting": "columns"}
    assert (subjects.plain is subjects.drafting) == (by_columns < by_rows)


def test_conditions_say_how_it_was_measured(found):
    subjects, conditions, _, _ = found
    model = subjects.hf.model  # as `transformers` loads it
    weights, head = 4 * sum(p.numel() for p in model.parameters()), 4 * model.lm_head.weight.numel()
    twice = {name: head if layout == "onednn" else 0 for name, layout in conditions["layouts"].items()}
    assert conditions["widened"] == 2
    assert model.config.hidden_size == 2 * 128
    assert model.config.tie_word_embeddings
    saved = {name: _held(getattr(subjects, name).model) for name in ("plain", "drafting")}
    assert (saved["plain"] > 0) == (conditions["held"] is not None) == (conditions["layouts"]["plain"] == "native")
    assert conditions["weight_bytes"] == weights - saved["plain"] + twice["plain"]
    assert conditions["extra_bytes"] == saved["plain"] - saved["drafting"] + twice["drafting"] - twice["plain"]
    weights -= saved["plain"]
    assert conditions["bytes_read"] == weights  # the head is the embedding, and of the embedding itself a row is read
    assert conditions["read_bandwidth"] == 2 * weights
    assert conditions["roofline"] == 2
    assert conditions["passes"]["hf"] == dict.fromkeys(["1", "2", "3", "4", "6", "8"], ALONE)
    assert conditions["sub_layers"] == 32
    assert (conditions["skipped"], conditions["path"]) == (2, "2 sub-layers skipped")
    skipped = [model.model.layers[3].self_attn, model.model.layers[5].mlp]
    linears = [module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)]
    left = 1 - sum(p.numel() for part in skipped for p in part.parameters()) / sum(linears)
    assert conditions["bits_per_weight"] == {"draft": pytest.approx(32 * left), "plain": 32}, "of the widened model"
    assert subjects.identity.hidden == 128


def _held(model):
    """Bytes that weights held in 16 bits save; the head is the embedding."""
    return 2 * sum(module.weight.numel() for module in model.modules() if isinstance(module, HalfLinear))


def test_all_models_are_the_same_one(found):
    subjects, _, _, _ = found
    ids = torch.tensor([subjects.plain.encode("import os\n")])
    with torch.no_grad():
        plain, drafting, hf = (llm.model(ids).logits for llm in (subjects.plain, subjects.drafting, subjects.hf))
    torch.testing.assert_close(plain, hf, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(drafting, hf, atol=1e-3, rtol=1e-3)
    assert subjects.hf.model is not subjects.plain.model


def test_a_temperature(found):
    subjects, _, at, events = found
    assert list(at["methods"]) == ["plain", "profile", "hf"]
    step = (
        1.0 if subjects.drafting is subjects.plain else TOLD.round + ALONE
    )  # a plain step where plain decoding is fastest
    about = at["profile"]
    assert about["oracle"] == {"speedup": 2 * step, "tokens_per_round": 3.0}
    assert (about["c"], about["round"]) == (0.25 / step, 0.25 / step)
    assert (about["v"]["1"], about["v"]["8"]) == (0.75 / step, 1.5 / step)
    assert at["methods"]["plain"]["acceptance_by_position"] == []
    assert all(m["memory_bytes"] > 0 for m in at["methods"].values())
    assert events.count("run") == 6
    ((_, runs, further),) = (entry for entry in events if isinstance(entry, tuple))
    assert (runs, further) == (6, 7.0 + path_costs_seconds(ALONE, ALONE)), "of a pace at which every pass takes as long"


def test_the_copy_for_transformers_shares_the_heads_weight_and_keeps_it_whatever_the_layout():
    copies = load_model_copies("builtin", ["plain", "hf"], device="cpu", dtype="float32")
    mine, theirs = (llm.model.get_output_embeddings().weight for llm in (copies.plain, copies.hf))
    assert mine is not theirs
    apply_layout_(copies.plain.model, "columns")
    assert not mine.is_contiguous()
    assert theirs.is_contiguous()
    assert torch.equal(mine, theirs)


def test_plain_decoding_has_its_weights_joined_as_drafts_have(monkeypatch):
    """Where layouts are not timed, as on a GPU; else a speedup would be over slower products."""
    monkeypatch.setattr("selfspec.measure.model_copies.layout_times", lambda model: {})
    copies = load_model_copies("builtin", ["plain", "profile"], device="cpu", dtype="float32")
    assert copies.plain is copies.drafting
    for group in parts_of(copies.plain.model).groups():
        assert joined_tensor([module.weight for module in group.modules]) is not None


def test_steps_of_a_head_below_the_path_have_their_price():
    (one,) = rounds((2, 1))
    one = replace(one, work=(*one.work, (HEAD_STEP, 3)))
    assert expected([one], COSTS, head=0.5) == pytest.approx(2 / (0.1 + 0.8 + 3 * 0.5 * 0.4 + 1.1))
