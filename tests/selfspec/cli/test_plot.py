"""`selfspec plot`: what a file is, is seen from what it holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from studies import small_study

BENCH = Path(__file__).parents[2] / "scripts" / "bench.json"


def training(**other):
    """What a training wrote."""
    told = {"kind": "eagle", "model": "m", "machine": "none", "threads": 1, "texts": 20, "tokens": 900, "steps": 40}
    how = {"seconds": 90.0, "tokens_per_pass": 1.5, "acceptance": [0.4, 0.1], "history": [[0.0, 1.0], [90.0, 1.5]]}
    return told | how | other


@pytest.fixture
def cli(cli, tmp_path):
    """`selfspec plot` in a folder that holds one file of each kind: exit code, standard error."""
    small_study(tmp_path / "trials.jsonl")
    shutil.copy(BENCH, tmp_path / "b.json")
    bench = json.loads(BENCH.read_text())
    bench["temperatures"][0]["methods"]["profile"]["sources"] = {"draft path": 0.5, "lookup": 0.2}
    (tmp_path / "sources.json").write_text(json.dumps(bench))
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "eagle.json").write_text(json.dumps(training()))
    (tmp_path / "p.yaml").write_text(
        "version: 2\nmodel: {layers: 4}\ndraft: {kind: layer-skip, skip: {attention: [1], mlp: [2, 3]}}\n"
    )
    (tmp_path / "p.json").write_text(
        '{"version": 2, "model": {"layers": 4}, "draft": {"kind": "layer-skip", "skip": {"mlp": [2]}}}'
    )

    def run(*args):
        code, _, err = cli("plot", *args)
        return code, err

    return run


DRAWN = {
    ("stdlib-llama-3.7m",): "skip-map of a profile",
    ("stdlib-llama-3.7m", "--kind", "confidence"): "confidence of a profile",
    ("p.yaml",): "skip-map of a profile",
    ("p.json",): "skip-map of a profile",
    ("trials.jsonl",): "skipped of a study",
    ("trials.jsonl", "--kind", "sensitivity"): "sensitivity of a study",
    ("trials.jsonl", "--kind", "progress"): "progress of a study",
    ("selfspec", "--storage", "trials.jsonl", "--kind", "pareto"): "pareto of a study",
    ("b.json",): "bars of a benchmark",
    ("b.json", "--kind", "position"): "position of a benchmark",
    ("sources.json", "--kind", "sources"): "sources of a benchmark",
    ("parts",): "learning of a training",
    ("parts/eagle.json", "--kind", "places"): "places of a training",
}


@pytest.mark.parametrize("args", DRAWN, ids=" ".join)
def test_each_kind(cli, tmp_path, args):
    assert cli(*args, "--out", "a.svg") == (0, f"saved a.svg: {DRAWN[args]}\n")
    assert "</svg>" in (tmp_path / "a.svg").read_text()


def test_width_and_title(cli, tmp_path):
    cli("p.yaml", "--out", "a.svg", "--width", 5, "--title", "50 $ & <script>")
    text = (tmp_path / "a.svg").read_text()
    assert 'width="360pt"' in text
    assert "50 $ &amp; &lt;script&gt;" in text


def test_trials_under_any_name(cli, tmp_path):
    (tmp_path / "trials.jsonl").rename(tmp_path / "p2.yaml")
    assert cli("p2.yaml", "--out", "a.png") == (0, "saved a.png: skipped of a study\n")


WRONG = {
    "another kind's": ("p.yaml --kind bars", "--kind bars: p.yaml is a profile; expected skip-map or confidence"),
    "another kind's of a study": (
        "trials.jsonl --kind x",
        "is a study; expected skipped, pareto, sensitivity or progress",
    ),
    "no file": ("nothing.yaml", "profile nothing.yaml: no such file, and no shipped profile of that name"),
    "empty name": ([""], "the profile's name is empty"),
    "another JSON": (
        "other.json",
        "other.json: expected a profile, a search's file of trials, or a file that selfspec bench",
    ),
    "cut JSON": ("cut.json", "cut.json: expected a profile, a search's file of trials, or a file that selfspec bench"),
    "damaged trials": ("damaged.jsonl", "damaged.jsonl is damaged"),
    "no sources": ("b.json --kind sources", "the benchmark does not tell where tokens came from"),
    "a spoiled benchmark": ("spoiled.json", "spoiled.json: not what selfspec bench --out writes"),
    "a picture": ("x.png", "x.png: not UTF-8 text"),
    "a folder": (".", ".: holds no .json file of a training; expected the folder of selfspec train"),
    "a spoiled training": ("parts", "not what selfspec train writes (steps"),
    "no curve": ("p.yaml --kind confidence", "the profile holds no acceptance curve"),
    "no such study": ("mine --storage trials.jsonl", "study 'mine': not in this storage; the storage holds"),
    "no such storage": ("mine --storage none.jsonl", "--storage none.jsonl: no such file"),
    "its name": ("p.yaml --out a.gif", "a.gif: expected a name that ends with .png, .svg or .pdf"),
    "its folder": ("p.yaml --out no/a.png", "the folder no does not exist"),
    "over itself": ("p.yaml --out p.yaml", "--out p.yaml would write over the file to be drawn"),
    "over the storage": (
        "selfspec --storage trials.jsonl --out trials.jsonl",
        "--out trials.jsonl would write over the file to be drawn",
    ),
    "its width": ("p.yaml --width 0", "--width"),
}


@pytest.mark.parametrize(("line", "said"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_clear_line(cli, tmp_path, line, said):
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "cut.json").write_text(BENCH.read_text()[:2000])
    trials = (tmp_path / "trials.jsonl").read_text()
    (tmp_path / "damaged.jsonl").write_text(trials.replace('"acceptance_rate"', '"x"'))
    bench = json.loads(BENCH.read_text())
    bench["temperatures"][0]["methods"]["plain"] = 3
    (tmp_path / "spoiled.json").write_text(json.dumps(bench))
    (tmp_path / "parts" / "hydra.json").write_text(json.dumps(training(steps="many")))
    (tmp_path / "x.png").write_bytes(b"\x89PNG\xff")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    args = line.split() if isinstance(line, str) else line
    code, err = cli(*args, *([] if "--out" in args else ["--out", "a.png"]))
    assert code == 2
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
