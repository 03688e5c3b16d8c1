"""What the report says under its plots holds the data's own figures."""

from __future__ import annotations

import re

import pandas as pd
from frames import SOURCES
from selfspec.search.trial_tables import sensitivity_frame, trials_frame
from studies import small_study

from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.schema import Profile
from selfspec.show import captions as reading
from selfspec.show.tables import position_frame
from selfspec.types.acceptance import AcceptanceCurve
from selfspec.types.draft_path import DraftPath, SkipSet
from selfspec.types.identity import Identity
from selfspec.types.stats import Round

CURVE = AcceptanceCurve(confidence=[0.1, 0.5], accepted=[0.3, 0.7], following=[0.5, 0.6], candidates=[[0.2, 0.1]])


def test_skip_map():
    text = reading.skip_map(Profile(model=Identity(layers=4), draft=LayerSkipSpec.from_path(SkipSet((1, 2), (0,)))))
    assert "2 of 4 attentions and 1 of 4 MLPs, 38% of all" in text


def test_skip_map_of_modes():
    model = Identity(layers=4, hidden=8, heads=4, kv_heads=2, intermediate=16, vocabulary=10)
    path = DraftPath(SkipSet((1,)), int8=SkipSet((0,), (0, 2)), head="int4")
    text = reading.skip_map(Profile(model=model, draft=LayerSkipSpec.from_path(path)))
    assert "1 of 4 attentions and 0 of 4 MLPs, 12% of all" in text
    assert "run 1 attentions and 2 MLPs in int8 (marked 8) and the head in int4; dark" in text
    assert re.search(r"A draft step reads 1\d\.\d bits per weight, a plain step 32\.", text)
    text = reading.skip_map(Profile(model=Identity(layers=4), draft=LayerSkipSpec.from_path(DraftPath(head="int8"))))
    assert "skipped" not in text
    assert "bits per weight" not in text, "the sizes are not known"
    assert "With quantised weights run the head in int8" in text


def test_acceptance_by_confidence():
    text = reading.acceptance_by_confidence(Profile(model=Identity(layers=4), acceptance=CURVE))
    assert "30% at 0.1, 70% at 0.5" in text
    assert "the second candidate is right 20% of the time" in text


def test_study():
    ledger = small_study()
    trials = trials_frame(ledger)
    text = reading.sensitivity(sensitivity_frame(ledger))
    assert "always 2 tokens" in text
    assert "needs the MLP of layer 0 most (-46%) and the attention of layer 0 least (+8%); 1 of 3 parts gain" in text
    text = reading.pareto(trials)
    assert "3 of 4 skip sets are on the Pareto front" in text
    assert "better in both: from 60% accepted at 0.60 of a plain decode step to 90% at 0.90." in text
    assert "highest predicted speed has 80% accepted at a cost of 0.80." in text
    text = reading.speedup_against_skipped(trials)
    assert "at 2 sub-layers (2 attentions, 0 MLPs), predicted 1.20 times" in text
    assert "2 of 3 unpruned trials" in text
    text = reading.progress(trials)
    assert "0.90 with the first trial and 1.20 with trial 2 of 4, after 4 of 8 seconds" in text
    assert "the 2 trials after it" in text


def test_a_study_without_whole_trials():
    trials = trials_frame(small_study()).assign(pruned=True, on_front=False, best=float("nan"))
    for read in (reading.pareto, reading.speedup_against_skipped, reading.progress):
        assert read(trials)


def test_acceptance_by_position():
    one = position_frame([Round(2, 2, 3, 0.1), Round(2, 1, 2, 0.1), Round(1, 0, 1, 0.1)])
    text = reading.acceptance_by_position(one)
    assert "accepted in 67% of 3 drafts, of which 2 were 2 tokens long or longer." in text
    two = pd.concat([one, one.assign(method="guarded", temperature=0.8)])
    assert "67% (profile, temperature 0) and 67% (guarded, temperature 0.8)" in reading.acceptance_by_position(two)


def test_sources():
    text = reading.tokens_by_source(SOURCES)
    assert (
        "of profile at temperature 0, 60% came from the draft path and 25% came from lookup; the others are the model"
        in text
    )


def test_bench():
    columns = ["temperature", "method", "speedup", "low", "high"]
    rows = [
        (0.0, "plain", 1, 1, 1),
        (0.0, "profile", 1.2, 1.1, 1.4),
        (0.0, "hf", 0.5, 0.4, 0.6),
        (0.8, "hf", 0.9, 0.8, 1.1),
    ]
    text = reading.bench_bars(pd.DataFrame(rows, columns=columns))
    assert "At temperature 0 the fastest method besides plain decoding is profile, 1.20 times its speed" in text
    assert "(1.1 to 1.4: faster" in text
    assert "at temperature 0.8 the fastest method besides plain decoding is hf" in text
    assert "not told apart from it)." in text
