"""Every plot, drawn from small frames: what a reader relies on is on it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from frames import SOURCES
from matplotlib.collections import PathCollection, QuadMesh

from selfspec.basics.errors import SelfspecError
from selfspec.profile.draft_spec import LayerSkipSpec, Skip
from selfspec.profile.schema import Profile
from selfspec.show.plots.bench_plots import (
    acceptance_by_place,
    acceptance_by_position,
    bench_bars,
    learning_curves,
    tokens_by_source,
)
from selfspec.show.plots.profile_plots import (
    acceptance_by_confidence,
    pareto,
    progress,
    sensitivity,
    skip_map,
    speedup_against_skipped,
)
from selfspec.show.plots.style import save, svg
from selfspec.types.acceptance import AcceptanceCurve
from selfspec.types.draft_path import DraftPath, SkipSet
from selfspec.types.identity import Identity

TRIALS = pd.DataFrame(
    {
        "seconds": [1.0, 2.0, 3.0, 4.0],
        "speedup": [0.9, 1.2, 1.1, 1.5],
        "best": [0.9, 1.2, 1.2, 1.2],
        "tokens_per_second": [9.0, 12.0, 11.0, 15.0],
        "acceptance_rate": [0.9, 0.8, 0.6, 0.5],
        "draft_cost": [0.9, 0.8, 0.6, 0.7],
        "skipped": [1, 2, 2, 2],
        "pruned": [False, False, False, True],
        "on_front": [True, True, True, False],
    }
)


def profile(layers=4, **fields):
    skip = Skip(attention=[1, 2], mlp=[layers - 1])
    return Profile(model=Identity(layers=layers), draft=LayerSkipSpec(skip=skip), **fields)


def line(axes, label):
    """The points of the line with a label."""
    return next([*map(tuple, found.get_xydata())] for found in axes.lines if found.get_label() == label)


def points(axes):
    """The points of each scatter, by label."""
    scatters = [c for c in axes.collections if isinstance(c, PathCollection)]
    return {c.get_label(): [*map(tuple, c.get_offsets().tolist())] for c in scatters}


def labels(axes):
    return axes.get_xlabel(), axes.get_ylabel()


@pytest.mark.parametrize("layers", [4, 16, 80])
def test_skip_map(layers):
    figure = skip_map(profile(layers))
    meshes = [c for axes in figure.axes for c in axes.collections if isinstance(c, QuadMesh)]
    rows = np.concatenate([mesh.get_array() for mesh in meshes], axis=1).tolist()
    assert rows == [[float(i in (1, 2)) for i in range(layers)], [float(i == layers - 1) for i in range(layers)]]
    assert len(meshes) == (2 if layers == 80 else 1), "80 layers are drawn in two blocks"
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert shown == ["attention", "MLP"], "attention above"
    assert figure.axes[-1].get_xlabel() == "layer"
    assert [text.get_text() for text in figure.legends[0].texts] == ["runs", "skipped while drafting"]
    low, high = (sum(meshes[0].cmap(value)[:3]) for value in (0.0, 1.0))
    assert high - low > 1, "skipped is much lighter, in grey print too"


MIXED = DraftPath(SkipSet((1,), (0,)), None, SkipSet((2,), ()), SkipSet((), (2, 3)), "int8")


def mixed(layers=4):
    return Profile(model=Identity(layers=layers), draft=LayerSkipSpec.from_path(MIXED))


@pytest.mark.parametrize("layers", [4, 80])
def test_skip_map_of_modes(layers):
    figure = skip_map(mixed(layers))
    mesh = next(c for c in figure.axes[0].collections if isinstance(c, QuadMesh))
    shown = (mesh.get_array() * 3).round().astype(int).tolist()
    assert [row[:4] for row in shown] == [[0, 3, 1, 0], [3, 0, 2, 2]]
    signs = sorted((text.get_position(), text.get_text()) for text in figure.axes[0].texts)
    assert signs == [((2, 0), "8"), ((2, 1), "4"), ((3, 1), "4")], "read without colours, too"
    legend = figure.legends[0]
    words = ["in full", "8: int8", "4: int4", "skipped", "the head: in int8"]
    assert [text.get_text() for text in legend.texts] == words
    colours = [patch.get_facecolor() for patch in legend.get_patches()]
    assert colours[4] == colours[1]
    assert [mesh.cmap(mesh.norm(i / 3)) for i in range(4)] == colours[:4]
    grey = [np.dot(colour[:3], (0.299, 0.587, 0.114)) for colour in colours[:4]]
    assert min(np.diff(grey)) > 0.1, "the less is read, the lighter, in grey print too"


def test_a_legend_names_only_the_modes_that_occur():
    only = Profile(model=Identity(layers=2), draft=LayerSkipSpec.from_path(DraftPath(int8=SkipSet((0,), (1,)))))
    assert [text.get_text() for text in skip_map(only).legends[0].texts][:2] == ["in full", "8: int8"]
    assert not [text for text in skip_map(only).legends[0].texts if "skipped" in text.get_text()]


def test_cells_that_are_too_small_hold_no_signs(tmp_path):
    assert not skip_map(mixed(1000)).axes[0].texts
    save(skip_map(mixed(4), width=2.5), tmp_path / "narrow.png")


def test_a_map_of_very_many_layers_can_be_drawn(tmp_path):
    save(skip_map(profile(500)), tmp_path / "map.svg")
    assert (tmp_path / "map.svg").stat().st_size


def test_acceptance_by_confidence():
    curve = AcceptanceCurve(confidence=[0.1, 0.5], accepted=[0.3, 0.7], following=[0.5, 0.6], candidates=[[0.2, 0.1]])
    axes = acceptance_by_confidence(profile(acceptance=curve)).axes[0]
    assert line(axes, "the drafted token is right") == [(0.1, 0.3), (0.5, 0.7)]
    assert line(axes, "the next token is right, too") == [(0.1, 0.5), (0.5, 0.6)]
    assert line(axes, "candidate 2 is right instead") == [(0.1, 0.2), (0.5, 0.1)]
    assert "confidence" in axes.get_xlabel()
    looks = {(drawn.get_marker(), drawn.get_linestyle()) for drawn in axes.lines}
    assert len(looks) == len(axes.lines), "told apart without colours"
    with pytest.raises(SelfspecError, match="holds no acceptance curve"):
        acceptance_by_confidence(profile())


def gains(values):
    places = [(layer, part) for layer in range(len(values) // 2) for part in ("attention", "mlp")]
    return pd.DataFrame(
        [(*place, value) for place, value in zip(places, values, strict=True)], columns=["layer", "part", "gain"]
    )


def test_sensitivity():
    figure = sensitivity(gains([0.1, -0.2, float("nan"), 0.0]))
    axes, bar = figure.axes
    mesh = next(c for c in axes.collections if isinstance(c, QuadMesh))
    assert mesh.get_array().filled(9).tolist() == [[0.1, 9], [-0.2, 0]]
    assert (mesh.norm.vmin, mesh.norm.vmax) == (-0.2, 0.2), "as far on both sides of 0"
    assert [text.get_text() for text in axes.texts] == ["+10%", "-20%", "0%"]
    assert "gain in speedup" in axes.get_title(loc="left")
    assert any("%" in label.get_text() for label in bar.get_yticklabels())


def test_small_cells_have_a_dot_where_something_is_gained():
    figure = sensitivity(gains([0.1, -0.2] * 40))
    texts = [text for axes in figure.axes for text in axes.texts]
    assert {text.get_text() for text in texts} == {"•"}
    assert len(texts) == 40


def test_sensitivity_of_whole_layers_and_of_nothing():
    frame = pd.DataFrame([(0, "layer", 0.0), (1, "layer", 0.0)], columns=["layer", "part", "gain"])
    assert [label.get_text() for label in sensitivity(frame).axes[0].get_yticklabels()] == ["layer"]
    svg(sensitivity(frame.assign(gain=float("nan"))))


def test_pareto():
    axes = pareto(TRIALS).axes[0]
    assert line(axes, "Pareto front") == [(0.6, 0.6), (0.8, 0.8), (0.9, 0.9)]
    assert points(axes) == {
        "trial": [(0.9, 0.9), (0.8, 0.8), (0.6, 0.6)],
        "pruned: on a part of the texts": [(0.7, 0.5)],
        "fastest": [(0.8, 0.8)],
    }
    assert "draft cost" in axes.get_xlabel()
    assert "plain decode steps" in axes.get_xlabel()
    assert "accepted" in axes.get_ylabel()


def test_speedup_against_skipped():
    axes = speedup_against_skipped(TRIALS).axes[0]
    assert line(axes, "best by number skipped") == [(1, 0.9), (2, 1.2)]
    assert points(axes)["fastest"] == [(2, 1.2)], "a pruned trial's figures are of a share of the texts"
    assert sum(map(len, points(axes).values())) == 5, "every trial, and the fastest marked"
    assert labels(axes) == ("sub-layers skipped while drafting", "predicted speedup over plain decoding")
    assert any(list(drawn.get_ydata()) == [1, 1] for drawn in axes.lines), "plain decoding's line"


def test_progress():
    axes = progress(TRIALS).axes[0]
    assert line(axes, "best so far") == [(1, 0.9), (2, 1.2), (3, 1.2), (4, 1.2)]
    assert "seconds" in axes.get_xlabel()


@pytest.mark.parametrize("draw", [pareto, speedup_against_skipped, progress])
def test_a_study_of_pruned_or_timed_trials_is_drawn(draw):
    for frame in (
        TRIALS.assign(pruned=True, best=float("nan"), on_front=False),
        TRIALS.assign(draft_cost=float("nan"), on_front=False),
        TRIALS.iloc[:1],
    ):
        svg(draw(frame))


BENCH = pd.DataFrame(
    [(0.0, "plain", 1, 1, 1), (0.0, "skip", 1.2, 1.1, 1.4), (0.8, "skip", 0.9, 0.8, 1.0), (0.8, "hf", 0.5, 0.4, 0.6)],
    columns=["temperature", "method", "speedup", "low", "high"],
)


def test_bench_bars():
    axes = bench_bars(BENCH).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["skip", "hf"], "plain decoding is the line at 1"
    assert [bar.get_height() for bar in axes.patches] == [1.2, 0.9, 0.5]
    assert len({bar.get_hatch() for bar in axes.patches}) == 2, "temperatures differ in grey print, too"
    spans = sorted(
        tuple(round(float(y), 6) for y in segment[:, 1])
        for found in axes.collections
        for segment in found.get_segments()
    )
    assert spans == [(0.4, 0.6), (0.8, 1.0), (1.1, 1.4)]
    texts = [text.get_text() for text in axes.texts]
    assert texts[:3] == ["1.20", "0.90", "0.50"]
    assert "95% interval" in axes.get_ylabel()
    with pytest.raises(SelfspecError, match="no other method beside plain decoding"):
        bench_bars(BENCH[:1])


def test_tokens_by_source():
    figure = tokens_by_source(SOURCES)
    first, second = figure.axes
    assert [label.get_text() for label in first.get_yticklabels()] == ["qa", "all"]
    spans = [(bar.get_x(), round(bar.get_width(), 6)) for bar in first.patches]
    assert spans == [(0, 0.9), (0, 0.6), (0.9, 0), (0.6, 0.25)], "one source after the other"
    assert len({bar.get_hatch() for bar in first.patches}) == 2
    assert (first.get_title(loc="left"), second.get_title(loc="left")) == (
        "profile, temperature 0",
        "profile, temperature 0.8",
    )
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["draft path", "lookup"]
    with pytest.raises(SelfspecError, match="does not tell where tokens came from"):
        tokens_by_source(SOURCES[:0])


def test_acceptance_by_position():
    frame = pd.DataFrame(
        [("profile", 0.0, 1, 0.9, 10.0), ("profile", 0.0, 2, 0.5, 4.0)],
        columns=["method", "temperature", "position", "acceptance", "drafts"],
    )
    axes = acceptance_by_position(frame).axes[0]
    assert line(axes, "profile, temperature 0") == [(1, 0.9), (2, 0.5)]
    assert [text.get_text() for text in axes.texts] == ["of 10", "of 4"]
    two = pd.concat([frame, frame.assign(temperature=0.8, drafts=float("nan"))])
    axes = acceptance_by_position(two).axes[0]
    assert len(axes.lines) == 2
    assert not axes.texts
    with pytest.raises(SelfspecError, match="nothing was drafted"):
        acceptance_by_position(frame[:0])


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml"), ("a.pdf", b"%PDF")])
def test_files_are_as_their_name_says_and_the_same_again(tmp_path, name, begins):
    contents = []
    for _ in range(2):
        save(skip_map(profile()), tmp_path / name)
        contents.append((tmp_path / name).read_bytes())
    assert contents[0].startswith(begins)
    assert contents[0] == contents[1]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_that_cannot_be_drawn_over_stays(tmp_path):
    (tmp_path / "a.txt").write_text("mine")
    with pytest.raises(SelfspecError, match=r"expected a name that ends with \.png, \.svg or \.pdf"):
        save(skip_map(profile()), tmp_path / "a.txt")
    assert (tmp_path / "a.txt").read_text() == "mine"


def test_an_svg_for_a_page():
    """Its ids are its own, it says what it shows, and it rules nothing outside of itself."""
    text = svg(bench_bars(BENCH), name="map", label='a "map" <of> layers')
    root = ElementTree.fromstring(text)
    assert root.get("role") == "img"
    assert root.get("aria-label") == 'a "map" <of> layers'
    ids = [node.get("id") for node in root.iter() if node.get("id")]
    assert ids
    assert all(name.startswith("map-") for name in ids)
    used = [value for node in root.iter() for name, value in node.items() if name.endswith("href")]
    assert used
    assert {name[1:] for name in used} <= set(ids)
    assert not any(node.tag.endswith(("style", "metadata", "script")) for node in root.iter())


def test_what_is_set_elsewhere_stays():
    before = dict(mpl.rcParams)
    svg(skip_map(profile()))
    assert dict(mpl.rcParams) == before


def test_trainings():
    frame = pd.DataFrame({"kind": ["a", "a", "b"], "minutes": [0.0, 2.0, 1.0], "tokens_per_pass": [1.0, 1.5, 1.2]})
    (axes,) = learning_curves(frame).axes
    assert (line(axes, "a"), line(axes, "b")) == ([(0.0, 1.0), (2.0, 1.5)], [(1.0, 1.2)])
    assert labels(axes) == ("minutes of fitting", "held-out tokens a pass,\ngreedy drafts")
    places = pd.DataFrame({"kind": ["a", "a"], "place": [1, 2], "acceptance": [0.5, 0.2]})
    (axes,) = acceptance_by_place(places).axes
    assert line(axes, "a") == [(1.0, 0.5), (2.0, 0.2)]
    assert labels(axes) == ("position in the draft", "drafts right up to there")
