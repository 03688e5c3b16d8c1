"""Data frames of benchmarks, rounds and profiles, number by number."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from selfspec.basics.errors import SelfspecError
from selfspec.show.tables import (
    bench_frame,
    bench_position_frame,
    learning_frame,
    place_frame,
    position_frame,
    read_bench,
    read_trainings,
    source_frame,
)
from selfspec.types.stats import Round

REAL = Path(__file__).parents[2] / "scripts" / "bench.json"


@pytest.fixture
def bench():
    return json.loads(REAL.read_text())


def test_bench(bench):
    frame = bench_frame(bench)
    methods = ["plain", "profile", "guarded", "hf", "hf-early-exit", "hf-prompt-lookup"]
    assert list(zip(frame["temperature"], frame["method"], strict=True)) == [(t, m) for t in (0, 0.8) for m in methods]
    drafted = frame.iloc[1]
    said = bench["temperatures"][0]["methods"]["profile"]
    assert drafted["speedup"] == said["ratio"]["plain"]["median"] == pytest.approx(0.935, abs=1e-3)
    assert (drafted["low"], drafted["high"]) == (said["ratio"]["plain"]["low"], said["ratio"]["plain"]["high"])
    assert drafted["next_ms"] == pytest.approx(1e3 * said["inter_token_seconds"]["p50"])
    assert drafted["next_ms_95"] == pytest.approx(1e3 * said["inter_token_seconds"]["p95"])
    assert drafted["first_token_ms"] == pytest.approx(1e3 * said["first_token_seconds"]["p50"])
    assert drafted["acceptance_rate"] == said["acceptance_rate"]
    assert math.isnan(frame.iloc[0]["acceptance_rate"]), "plain decoding drafts nothing"


def test_bench_positions(bench):
    frame = bench_position_frame(bench)
    assert set(frame["method"]) == {"profile", "guarded"}
    mine = frame[(frame["method"] == "profile") & (frame["temperature"] == 0.8)]
    assert mine["acceptance"].tolist() == bench["temperatures"][1]["methods"]["profile"]["acceptance_by_position"]
    assert mine["position"].tolist() == list(range(1, len(mine) + 1))
    assert mine["drafts"].isna().all()


def test_sources_by_task(bench):
    assert source_frame(bench).empty, "one of before sources were told"
    of = {"sources": {"draft path": 0.5, "lookup": 0.25}}
    for at in bench["temperatures"]:
        at["methods"]["profile"] |= {**of, "by_task": {"tasks": [{"task": "qa", **of}, {"task": "rag", "sources": {}}]}}
    frame = source_frame(bench)
    assert set(frame["method"]) == {"profile"}
    first = frame[frame["temperature"] == 0]
    assert [tuple(row) for row in first[["task", "source", "share"]].itertuples(index=False)] == [
        ("qa", "draft path", 0.5),
        ("qa", "lookup", 0.25),
        ("all", "draft path", 0.5),
        ("all", "lookup", 0.25),
    ]


def test_positions_of_rounds():
    rounds = [Round(2, 2, 3, 0.1), Round(2, 1, 2, 0.1), Round(1, 0, 1, 0.1), Round(0, 0, 1, 0.1)]
    frame = position_frame(rounds)
    assert frame["position"].tolist() == [1, 2]
    assert frame["acceptance"].tolist() == pytest.approx([2 / 3, 1 / 2])
    assert frame["drafts"].tolist() == [3, 2]
    assert position_frame([Round(0, 0, 1, 0.1)]).empty


WRONG = {
    "no methods": (lambda b: b["temperatures"][0].pop("methods"), r"temperatures\.0\.methods: Field required"),
    "a word": (lambda b: b.update(threads="many"), "threads: .* integer.*, got 'many'"),
    "no number": (
        lambda b: b["temperatures"][0]["methods"]["profile"].update(acceptance_by_position=[0.5, 1.5]),
        r"temperatures\.0\..*\.acceptance_by_position\.1: .* got 1\.5",
    ),
    "no method": (lambda b: b["temperatures"][1].update(methods={}), r"temperatures\.1\.methods: .*"),
    "nothing measured": (lambda b: b.update(temperatures=[]), "temperatures: .*"),
}


@pytest.mark.parametrize(("spoil", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_benchmark_is_one_clear_line(bench, tmp_path, spoil, said):
    spoil(spoiled := copy.deepcopy(bench))
    with pytest.raises(SelfspecError, match=said):
        bench_frame(spoiled)
    (tmp_path / "b.json").write_text(json.dumps(spoiled))
    with pytest.raises(SelfspecError, match=rf"b\.json: not what selfspec bench --out writes \({said}\)"):
        read_bench(tmp_path / "b.json")


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000], ids=["empty", "cut", "list", "null", "deep"])
def test_no_benchmark_at_all(tmp_path, text):
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(SelfspecError, match=r"b\.json: not ") as error:
        read_bench(tmp_path / "b.json")
    assert "\n" not in str(error.value)


def test_what_is_plotted_without_a_model_imports_no_torch():
    code = "import selfspec.show.tables, sys\nfrom selfspec.show.plots import bench_plots, profile_plots"
    assert (
        subprocess.run([sys.executable, "-c", f"{code}\nsys.exit('torch' in sys.modules)"], check=False).returncode == 0
    )


def told(kind, **other):
    how = {"model": "m", "machine": "none", "threads": 1, "texts": 20, "tokens": 900, "steps": 40, "seconds": 120.0}
    found = {"tokens_per_pass": 1.5, "acceptance": [0.4, 0.1], "history": [[0.0, 1.0], [120.0, 1.5]]}
    return json.dumps({"kind": kind} | how | found | other)


def test_all_of_a_folder(tmp_path):
    for kind in ("medusa", "eagle"):
        (tmp_path / f"{kind}.json").write_text(told(kind))
    trainings = read_trainings(tmp_path)
    assert [of.kind for of in trainings] == ["eagle", "medusa"]
    learning = learning_frame(trainings)
    assert learning[learning["kind"] == "eagle"]["minutes"].tolist() == [0.0, 2.0]
    assert learning["tokens_per_pass"].tolist() == [1.0, 1.5] * 2
    assert place_frame(trainings[:1]).to_dict("list") == {
        "kind": ["eagle", "eagle"],
        "place": [1, 2],
        "acceptance": [0.4, 0.1],
    }
    assert read_trainings(tmp_path / "eagle.json") == trainings[:1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (told("eagle", acceptance=[2.0]), "acceptance.0: Input should be less than or equal to 1"),
        ("[]", "it: Input should be an object"),
        ("{", "it: Invalid JSON"),
    ],
)
def test_what_is_no_training(tmp_path, text, said):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(SelfspecError, match=f"not what selfspec train writes \\({said}"):
        read_trainings(tmp_path / "a.json")


def test_a_folder_without_any(tmp_path):
    with pytest.raises(SelfspecError, match="holds no .json file of a training"):
        read_trainings(tmp_path)
