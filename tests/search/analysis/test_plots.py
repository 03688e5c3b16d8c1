"""The notebooks' plots: what a reader goes by is there."""

from __future__ import annotations

import pandas as pd
import pytest
from selfspec.search.analysis import plots

from selfspec.types.acceptance import AcceptanceCurve

SWEEP = pd.DataFrame(
    {
        "family": ["random sets", "greedy elimination", "greedy elimination", "chosen profile"],
        "temperature": [0.0] * 4,
        "skipped": [4, 4, 8, 9],
        "speedup": [0.8, 1.1, 1.2, 1.25],
        "bound": [None, 1.3, 1.4, 1.5],
        "measured": [None, 1.05, None, 1.2],
        "low": [None, 1.0, None, 1.1],
        "high": [None, 1.2, None, 1.3],
    }
)
ROUNDS = pd.DataFrame({"round": [1, 2, 1], "drafted": [2, 0, 4], "accepted": [1, 0, 4], "threshold": [0.6, 0.6, 0.5]})


def texts(figure):
    """Everything that is written on a figure."""
    figure.canvas.draw()
    return {text.get_text().replace("\n", " ") for text in figure.findobj(lambda a: hasattr(a, "get_text"))}


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def test_speedups_are_drawn_by_temperature_with_what_was_measured():
    both = pd.concat([SWEEP, SWEEP.assign(temperature=0.8)])
    figure = plots.speedup_curves(both)
    left, right = figure.axes
    assert (left.get_title(loc="left"), right.get_title(loc="left")) == ("temperature 0.0", "temperature 0.8")
    assert left.get_ylabel() == "speedup over plain decoding"
    drawn = lines(left)
    assert drawn["greedy elimination"].get_ydata().tolist() == [1.1, 1.2]
    assert drawn["bound: perfect stopping"].get_ydata().tolist() == [1.3, 1.4]
    assert drawn["chosen profile"].get_ydata().tolist() == [1.25]
    measured = [y for bars in left.containers for y in bars.lines[0].get_ydata()]
    assert measured == [1.05, 1.2]
    assert {"random sets", "measured (open marks, 95%)", "plain decoding"} <= texts(figure)


def test_only_the_families_asked_for():
    figure = plots.speedup_curves(SWEEP, families=("random sets",))
    assert "chosen profile" not in texts(figure)


def test_a_threshold_is_drawn_round_by_round():
    figure = plots.trajectories({"adaptive": ROUNDS, "other": ROUNDS})
    above, below = figure.axes
    assert lines(above)["adaptive"].get_ydata().tolist() == [0.6, 0.6, 0.5]
    assert below.get_lines()[0].get_ydata().tolist() == [0.5, 0.75], "a round without a draft has no share"
    assert above.get_title(loc="left") == "threshold, round by round (vertical lines: new texts of adaptive)"
    assert {"adaptive", "other"} <= texts(figure)


def test_draft_lengths_are_shares_of_the_rounds():
    figure = plots.draft_lengths({"one": ROUNDS})
    (axes,) = figure.axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([1 / 3, 0, 1 / 3, 0, 1 / 3])
    assert "one mean 2.00, 83% accepted" in texts(figure)


def test_best_lengths_by_theory_and_trace():
    frame = pd.DataFrame(
        {"source": ["theory", "theory", "trace"], "acceptance": [0.2, 0.8, 0.7], "k": [0, 4, 3], "speedup": [1, 2, 1.5]}
    )
    left, right = plots.best_lengths(frame).axes
    assert lines(left)["traces"].get_ydata().tolist() == [3]
    assert right.get_lines()[1].get_ydata().tolist() == [1, 2]


def test_acceptance_by_place_leaves_out_what_hardly_happened():
    shares = {"accepted": [0.5, 0.4, 1.0], "low": [0.4, 0.2, 0.2], "high": [0.6, 0.6, 1.0], "tokens": [50, 20, 1]}
    by_place = pd.DataFrame({"place": [1.0, 2.0, 3.0], **shares})
    by_confidence = pd.DataFrame({"confidence": [0.1, 0.5, 0.9], **shares})
    figure = plots.acceptance(by_place, by_confidence, AcceptanceCurve())
    left, right = figure.axes
    assert left.containers[0].lines[0].get_ydata().tolist() == [0.5, 0.4]
    assert right.containers[0].lines[0].get_ydata().tolist() == [0.5, 0.4, 1.0]
    assert lines(right)["the profile's curve"].get_ydata().tolist() == [0.0, 1.0]


def test_controllers_and_candidates():
    frame = pd.DataFrame(
        {
            "controller": ["fixed", "rate", "fixed", "rate"],
            "candidates": [1, 1, 3, 3],
            "speedup": [1.0, 1.1, 1.2, 1.3],
            "bound": [1.4, 1.4, 1.6, 1.6],
            "tokens_per_round": [1.5, 1.6, 1.8, 1.9],
        }
    )
    figure = plots.controllers(frame)
    assert {"1.00", "1.10", "1.20", "1.30", "fixed", "rate", "chains", "up to 3 candidates each"} <= texts(figure)
    left, right = plots.candidates(frame).axes
    assert lines(left)["rate"].get_ydata().tolist() == [1.1, 1.3]
    assert lines(left)["perfect stopping"].get_ydata().tolist() == [1.4, 1.6]
    assert right.get_ylabel() == "tokens a pass"


def test_a_race_has_a_line_for_each_seed():
    frame = pd.DataFrame(
        {
            "strategy": ["climb"] * 4 + ["random"] * 2,
            "seed": [0, 0, 1, 1, 0, 0],
            "trial": [1, 2] * 3,
            "seconds": [1.0, 2.0] * 3,
            "best": [1.0, 1.1, 1.0, 1.2, 1.0, 1.05],
        }
    )
    figure = plots.races(frame)
    drawn = [list(line.get_ydata()) for line in figure.axes[1].get_lines()]
    assert drawn[:3] == [[1.0, 1.1], [1.0, 1.2], [1.0, 1.05]]
    assert {"climb", "random"} <= texts(figure)


def test_importances_are_a_heat_map_with_signs():
    frame = pd.DataFrame(
        {
            "layer": [0, 0, 1, 1],
            "part": ["attention", "mlp"] * 2,
            "importance": [0.5, 0.2, 0.3, 0.0],
            "effect": [0.1, -0.1, 0.2, float("nan")],
        }
    )
    figure = plots.importances(frame)
    assert figure.axes[0].collections[0].get_array().ravel().tolist() == [0.5, 0.3, 0.2, 0.0]
    assert sorted(t.get_text() for t in figure.axes[0].texts if t.get_text()) == ["+", "+", "\N{MINUS SIGN}"]


def test_predictions_and_costs_lie_about_a_diagonal():
    found = pd.DataFrame(
        {"temperature": [0.0, 0.8], "predicted": [1.0, 1.2], "measured": [1.1, 1.1], "low": [1, 1], "high": [1.2, 1.2]}
    )
    figure = plots.predicted_against_measured(found)
    assert [bars.lines[0].get_xydata().tolist() for bars in figure.axes[0].containers] == [[[1.0, 1.1]], [[1.2, 1.1]]]
    assert {"temperature 0", "temperature 0.8", "predicted = measured"} <= texts(figure)
    fit = pd.DataFrame({"predicted": [2.0, 3.0], "timed": [2.1, 2.9]})
    left, right = plots.costs(fit, pd.DataFrame({"rows": [1, 4], "share": [1.0, 1.5]})).axes
    assert left.get_lines()[1].get_xydata().tolist() == [[2.0, 2.1], [3.0, 2.9]]
    assert right.get_lines()[0].get_ydata().tolist() == [1.0, 1.5]
