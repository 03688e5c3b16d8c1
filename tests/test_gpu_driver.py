"""The GPU driver: parts that fail, hang or die are reported and the next one starts; what travels; the tables."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPU = Path(__file__).parent / "scripts" / "gpu"


def module(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found  # dataclasses look there
    spec.loader.exec_module(found)
    return found


drive, pack = module("gpu_drive", GPU / "drive.py"), module("gpu_pack", GPU / "pack.py")

predict = module("gpu_predict", GPU / "predict.py")

PARTS = {
    "good": "",
    "raises": "raise ValueError('the device is lost')",
    "exits": "sys.exit(3)",
    "dies": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
Path(given.lines).with_name("child").write_text(str(child.pid))
time.sleep(60)""",
}
BEGINNING = """
import argparse, json, subprocess, sys, time
from pathlib import Path
parser = argparse.ArgumentParser()
for name in ("--lines", "--end"):
    parser.add_argument(name)
given = parser.parse_args()
with open(given.lines, "a") as file:
    file.write(json.dumps({"part": PART, "what": "measured", "gb_per_s": 1234.5678, "rows": 8}) + "\\n")
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A driver over small parts; gives what runs them with `--parts`, and returns its lines and its exit code."""
    (tmp_path / "parts").mkdir()
    for name, body in PARTS.items():
        (tmp_path / "parts" / f"{name}.py").write_text(BEGINNING.replace("PART", repr(name)) + body)
    monkeypatch.setattr(drive, "HERE", tmp_path)
    monkeypatch.setattr(drive, "PARTS", [drive.Part(name, 8 if name == "hangs" else 60, 1) for name in PARTS])

    def run(*arguments: str):
        out = tmp_path / "out"
        monkeypatch.setattr(sys, "argv", ["drive.py", "--out", str(out), *arguments])
        code = drive.main()
        return code, drive.read(out / "results.jsonl")

    return run


def test_a_part_that_fails_is_reported_and_the_next_one_starts(parts, capsys):
    code, lines = parts("--parts", "raises,exits,dies,good")
    ended = {line["part"]: line["ended"] for line in lines if line["what"] == "part"}
    assert ended == {"raises": 1, "exits": 3, "dies": -11, "good": 0}
    assert code == 1
    assert [line["part"] for line in lines if line["what"] == "measured"] == ["raises", "exits", "dies", "good"]
    assert "ValueError: the device is lost" in lines[1]["failure"]
    out = capsys.readouterr().out
    assert "- failed 1 times: ValueError: the device is lost" in out
    assert out.index("**good: measured**") < out.index("**parts**")


def test_a_part_that_hangs_is_killed_with_what_it_started(parts, tmp_path):
    code, lines = parts("--parts", "hangs,good")
    assert code == 1
    assert [line["ended"] for line in lines if line["what"] == "part"] == ["killed after 8 s", 0]
    status = Path(f"/proc/{(tmp_path / 'out' / 'child').read_text()}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_what_succeeds_exits_with_0(parts):
    assert parts("--parts", "good")[0] == 0


def test_without_time_parts_are_left_out_and_reported(parts):
    code, lines = parts("--parts", "good,exits", "--seconds", "1")
    assert code == 1
    assert [line["ended"] for line in lines] == ["left out", "left out"]


def test_wheels_that_are_missing_are_reported_and_parts_run_all_the_same(parts, tmp_path):
    code, lines = parts("--parts", "good", "--wheels", str(tmp_path / "nothing"))
    assert code == 1
    assert "expected the folder that pack.py makes" in lines[0]["failure"]
    assert lines[-1]["ended"] == 0


def test_a_line_that_was_cut_off_is_no_line(tmp_path):
    (tmp_path / "lines").write_text('{"what": "a", "x": 1}\n\n{"what": "a", "x"')
    assert drive.read(tmp_path / "lines") == [{"what": "a", "x": 1}]


def test_numbers_of_a_table():
    lines = [
        {"part": "p", "what": "speed", "of": "a|b", "ms": 0.0123456, "n": 12345},
        {"part": "p", "what": "speed", "of": "c", "ms": 2345.6, "same": True},
        {"part": "p", "what": "speed", "of": "d", "failure": "first\nlast"},
    ]
    assert drive.table(lines).splitlines() == [
        "**p: speed**",
        "",
        "| of | ms | n | same |",
        "|---|---|---|---|",
        "| a/b | 0.0123 | 12345 |  |",
        "| c | 2346 |  | True |",
        "",
        "- failed 1 times: last",
    ]


def test_the_driver_needs_nothing_but_python():
    for path in (GPU / "drive.py", GPU / "pack.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


def test_each_part_has_its_script_and_both_calls_end_in_time():
    named = {part.name for part in drive.PARTS}
    assert named == {path.stem for path in (GPU / "parts").glob("*.py")}
    for call in (1, 2):
        assert sum(part.seconds for part in drive.PARTS if part.call in (0, call)) <= 560


def test_what_is_packed_is_what_the_image_lacks():
    names = ("pydantic", "typing_extensions", "SQLAlchemy", "numpy")
    report = {"install": [{"metadata": {"name": name, "version": "1.0"}} for name in names]}
    image = pack.names_in("# a comment\nnumpy\ntyping-extensions>=4  # another\n\ntorch==2.11.0\n")
    assert image == {"numpy", "typing-extensions", "torch"}
    assert pack.lacking(report, image) == ["pydantic==1.0", "sqlalchemy==1.0"]


def test_the_machine_and_its_attention_are_measured(tmp_path):
    command = [
        sys.executable,
        str(GPU / "drive.py"),
        "--rehearse",
        "--out",
        str(tmp_path),
        "--parts",
        "machine,attention",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {"copy, read and written", "launch of one operation"} <= {line.get("of") for line in lines}
    assert all(line["math"] > 0 for line in lines if line["what"] == "microseconds")
    assert [line["ended"] for line in lines if line["what"] == "part"] == [0, 0]


@pytest.mark.proof
def test_a_rehearsal_runs_every_part(tmp_path):
    command = [sys.executable, str(GPU / "drive.py"), "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    lines = drive.read(tmp_path / "results.jsonl")
    assert {line["part"] for line in lines} == {part.name for part in drive.PARTS}
    same = [line for line in lines if line["what"] == "as transformers"]
    assert same
    assert all(line["same"] == line["texts"] for line in same)
    assert not any(line["bugs"] for line in lines if line["what"] == "audit")


def test_what_a_pass_reads_is_every_weight_but_the_embedding_and_the_cache():
    from transformers import LlamaConfig, LlamaForCausalLM

    names = {"hidden_size": "hidden", "intermediate_size": "intermediate", "num_attention_heads": "heads",
             "num_key_value_heads": "kv_heads", "num_hidden_layers": "layers", "vocab_size": "vocabulary"}  # fmt: skip
    shape = predict.LLAMA_8B._replace(layers=2)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{name: getattr(shape, ours) for name, ours in names.items()}))
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    read = 2 * sum(read for _, read in predict.layer_nodes(shape, 1, 2047, 2.0))
    read += sum(read for _, read in predict.other_nodes(shape, 1, 2.0))
    cache = 2 * 2048 * shape.layers * 2 * shape.kv_heads * shape.head_dim
    assert 2 * weights + cache < read < 1.002 * (2 * weights + cache)
    took = predict.pass_seconds(shape, 1, 2047, ("bfloat16", "bfloat16"), 1e12, 0.0)
    assert took == pytest.approx(read / 1e12)
    nodes = 2 * 9 + 5
    assert predict.pass_seconds(shape, 1, 2047, ("int4", "int8"), 1e30, 1e-6) == pytest.approx(nodes * 1e-6)


def test_a_round_is_its_passes_and_what_it_decides():
    """Every weight is read once a pass; the draft's weights once for each drafted token."""
    found = {length: (nodes, took) for length, nodes, took in predict.rounds(predict.LLAMA_8B, 2048, 3e12, 1.5e-6)}
    one = 32 * 9 + 5
    assert found[0][0] == one + predict.PLAIN_NODES
    assert found[8][0] == 9 * one + predict.ROUND_NODES + 8 * predict.STEP_NODES
    trees = {length: (nodes, took) for length, nodes, took in predict.trees(predict.LLAMA_8B, 2048, 3e12, 1.5e-6)}
    assert trees[8][0] == found[8][0] + predict.TREE_NODES
    assert all(0 < took / found[length][1] - 1 < 0.03 for length, (_, took) in trees.items())  # nearly free
    draft = predict.pass_seconds(predict.LLAMA_8B, 1, 2048, ("int4", "int8"), 3e12, 1.5e-6)
    assert found[8][1] - found[6][1] == pytest.approx(2 * draft, rel=0.01)
