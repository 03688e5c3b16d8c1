"""Ten thousand wrong command lines, profiles and files: one clear line each, exit code 2, no traceback, no model."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
import warnings

import pytest
import typer.main
import yaml
from amount import examples
from builtin_model import on_builtin
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selfspec.cli import main
from selfspec.profile.reading import write_profile
from selfspec.profile.shipped import find_profile_file

FEW, MANY = 1000, 2500
get_command = functools.cache(typer.main.get_command)  # typer reads every signature anew at each call: 50 ms
quick = {
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    "database": None,
}


class ModelLoadedError(Exception):
    """Everything that can be checked beforehand was found right."""


@pytest.fixture
def cli(monkeypatch, tmp_path):
    """Run the command: exit code and what it said; code 0 where it would have loaded a model."""
    monkeypatch.chdir(tmp_path)

    def loaded(*_, **__):
        raise ModelLoadedError

    for module in ("llm.llm", "measure.model_copies"):
        monkeypatch.setattr(f"selfspec.{module}.load_model", loaded)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(typer.main, "get_command", get_command)
    (tmp_path / "sets.json").write_text(SETS)
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(RIGHT))

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["selfspec", *on_builtin(args)])
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except ModelLoadedError:
                return 0, ""
            except SystemExit as ended:
                return ended.code, err.getvalue()
        raise AssertionError("main returned")

    return run


def is_refused(result):
    """Exit code 2, and one line that says something."""
    code, err = result
    assert code == 2, (code, err)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert len(err) > 15
    assert "Traceback" not in err


def is_refused_or_right(result):
    if result[0] != 0:
        is_refused(result)


# What a command line can hold: no NUL, and no surrogates but those that stand for bytes.
words = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=12)
no_numbers = words.filter(lambda text: not _is_number(text))
too_small = st.integers(-(10**30), 0).map(str)
negative = st.floats(max_value=-1e-9).map(str) | st.sampled_from(["nan", "inf", "-inf", "-0.5"])


def _is_number(text):
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


def unknown(*known):
    return words.filter(lambda text: text not in known and text.partition(":")[0].strip() not in known)


CONTROLLERS = ("fixed", "static", "adaptive")
controllers = (
    unknown(*CONTROLLERS)
    | st.tuples(st.sampled_from(CONTROLLERS), words.filter(lambda w: w.strip(" ,"))).map(lambda p: f"{p[0]}:{p[1]}")
    | st.integers(65, 10**9).map(lambda k: f"fixed:k={k}")
    | st.floats(1.0001, 1e9).map(lambda x: f"static:threshold={x}")
    | st.sampled_from(["adaptive:k=3", "fixed:k=2,k=2", "fixed:k=1.5", "static:threshold=nan", "adaptive:floor=.9"])
)
SHARED = {
    "--dtype": unknown("auto", "float32", "float64", "bfloat16", "float16"),
    "--threads": too_small | no_numbers,
    "--device-map": unknown("auto", "balanced", "balanced_low_0", "sequential"),
    "--device-memory": words,  # without --device-map, as the next
    "--offload-folder": words,
    "--controller": controllers,
    "--model": st.sampled_from(["", "/no/such/folder", "a b", "~", "..", "x/y/z", "\n", "-"]),
    "--temperature": negative | no_numbers,
    "--max-new-tokens": too_small | no_numbers,
    "--seed": st.integers(max_value=-2).map(str) | no_numbers,
}
SAMPLING = {
    "--top-k": too_small | no_numbers,
    "--top-p": negative | no_numbers | st.floats(1.0001, 1e9).map(str),
}
SHAPES = {"--column": words, "--template": words}  # without data
COMMANDS = {
    "generate": {
        **SHARED,
        **SAMPLING,
        "--profile": unknown("auto", "none", "stdlib-llama-3.7m").map(lambda name: f"no-{name}"),
        "--rule": unknown("greedy", "match", "block", "token"),
        "--generation-config": words.map(lambda name: f"no-{name}"),
        "--set": words.map(lambda w: w.replace("=", "")) | words.map(lambda w: f"no_{w.replace('=', '')}=1"),
        "--regex": st.sampled_from(["(", "[", "a{2", "*", "(?<n"]),
        "--json-schema": words.map(lambda name: f"no-{name}"),
    },
    "search": {
        **SHARED,
        **SAMPLING,
        "--prompts": words.map(lambda name: f"no-{name}")
        | st.sampled_from(["", "missing.jsonl", "no.parquet", "gsm8k"]),
        **SHAPES,
        "--objective": unknown("replay", "wallclock"),
        "--strategy": unknown("climb", "tpe", "dp", "greedy", "cmaes", "gp", "skopt", "random"),
        "--trials": too_small | no_numbers,
        "--minutes": negative | st.just("0") | no_numbers,
        "--num-prompts": too_small | no_numbers,
        "--out": st.sampled_from(["missing/p.yaml", ".", "/proc/none/p.yaml", "x" * 300]),
        "--context": too_small | no_numbers,
        "--keep-layers": no_numbers.filter(lambda w: w.replace(",", " ").strip() != ""),
        "--granularity": unknown("sublayer", "layer"),
        "--max-draft-cost": negative | st.just("0") | no_numbers,
    },
    "audit": {
        **SHARED,
        "--profile": unknown("auto", "stdlib-llama-3.7m").map(lambda name: f"no-{name}"),
        "--prompts": words.map(lambda name: f"no-{name}")
        | st.sampled_from(["", "missing.jsonl", "no.parquet", "xsum"]),
        **SHAPES,
        "--num-prompts": too_small | no_numbers,
    },
}
COMMANDS["bench"] = {
    **COMMANDS["audit"],
    "--methods": unknown("plain", "profile", "hf").map(lambda name: f"plain,{name}-"),
    "--widen": too_small | no_numbers,
    "--rounds": too_small | no_numbers,
    "--max-new-tokens": too_small | no_numbers,
    "--temperature": negative | words.map(lambda word: f"0,x{word}"),
    "--out": st.sampled_from(["missing/b.json", ".", "/proc/none/b.json", "x" * 300]),
}
COMMANDS["profile import"] = {
    "--format": unknown("draft-verify"),
    "--model": SHARED["--model"],
    "--key": unknown("a", "b"),
    "--layers": too_small | no_numbers | st.integers(10_001).map(str) | st.integers(1, 7).map(str),
    "--out": st.sampled_from(["missing/p.yaml", ".", "/proc/none/p.yaml", "x" * 300, "sets.json"]),
}
COMMANDS["plot"] = {
    "--kind": unknown("skip-map", "confidence"),
    "--storage": words.map(lambda name: f"no-{name}"),
    "--width": too_small | no_numbers,
    "--out": st.sampled_from(["missing/p.svg", ".", "/proc/none/p.svg", "x" * 300, "p.gif", "p.yaml"]),
}
COMMANDS["report"] = {
    **{option: SHARED[option] for option in SHARED if option not in ("--controller", "--temperature", "--seed")},
    **{option: COMMANDS["audit"][option] for option in ("--profile", "--prompts", "--num-prompts", *SHAPES)},
    "--study": words.map(lambda name: f"no-{name}"),
    "--storage": words,
    "--bench": words.map(lambda name: f"no-{name}") | st.just("p.yaml"),
    "--out": st.sampled_from(["missing/r.html", ".", "/proc/none/r.html", "x" * 300]),
}
SETS = '{"a": {"attention": [1, 7], "mlp": [3]}, "b": {"attention": [], "mlp": []}}'
RIGHT_BESIDE = {
    "generate": ["x"],
    "plot": ["p.yaml", "--out=p.svg"],
    "report": ["--profile=stdlib-llama-3.7m"],
    "profile import": ["sets.json", "--model=org/model", "--layers=8", "--key=a"],
}
one_wrong_option = st.sampled_from(sorted(COMMANDS)).flatmap(
    lambda command: st.sampled_from(sorted(COMMANDS[command])).flatmap(
        lambda option: COMMANDS[command][option].map(lambda value: (command, option, value))
    )
)


@settings(max_examples=examples(MANY), **quick)
@given(one_wrong_option)
def test_a_wrong_option(cli, case):
    command, option, value = case
    is_refused(cli(*command.split(), *RIGHT_BESIDE.get(command, []), f"{option}={value}"))


@settings(max_examples=examples(200), **quick)
@given(words.map(lambda name: f"no-{name}"))
def test_a_profile_that_is_none(cli, name):
    for args in (["show", name], ["validate", name], ["diff", "p.yaml", name], ["diff", name, "p.yaml"]):
        is_refused(cli("profile", *args))
    is_refused(cli("profile", "list", name))
    is_refused(cli("profile", "import", name, "--model=org/model", "--layers=8"))


def test_what_is_made_wrong_is_right(cli):
    assert cli("profile", "import", *RIGHT_BESIDE["profile import"])[0] == 0
    assert cli("profile", "diff", "p.yaml", "p.yaml")[0] == 0


@settings(max_examples=examples(FEW), **quick)
@given(
    st.lists(
        words
        | st.sampled_from(
            [*COMMANDS, "chat", "profile", "show", "list", "diff", "import", "schema", "--json", "--seed", "-1", "--"]
        ),
        max_size=6,
    )
)
def test_any_command_line(cli, args):
    code, err = cli(*args)
    if code == 2 and err == "":
        assert not args or args[-1] == "profile"  # what shows its help
    else:
        is_refused_or_right((code, err))


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
RIGHT = {
    "version": 2,
    "model": {"layers": 16, "hidden": 128},
    "draft": {
        "kind": "layer-skip",
        "skip": {"attention": [1, 2], "mlp": [3]},
        "controller": {"name": "static", "options": {"threshold": 0.5}},
        "candidates": 2,
    },
    "note": "right",
}
FIELDS = {
    "model": json_like.filter(lambda v: not (isinstance(v, dict) and type(v.get("layers")) is int)),
    "draft": json_like,
    "skip": json_like,
    "measured": json_like.filter(lambda v: v != []),
    "costs": json_like.filter(lambda v: v is not None),
    "search": json_like.filter(lambda v: v is not None),
    "versions": json_like.filter(lambda v: not isinstance(v, dict)),
    "version": json_like.filter(lambda v: v != 2),
    "other": json_like,
}
wrong_profiles = st.sampled_from(sorted(FIELDS)).flatmap(
    lambda name: FIELDS[name].map(lambda value: yaml.safe_dump({**RIGHT, name: value}))
)


def test_the_profile_that_is_made_wrong_is_right(cli, tmp_path):
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(RIGHT))
    assert cli("profile", "validate", "p.yaml")[0] == 0


@settings(max_examples=examples(MANY), **quick)
@given(wrong_profiles)
def test_a_wrong_profile(cli, tmp_path, text):
    (tmp_path / "p.yaml").write_text(text)
    is_refused(cli("profile", "validate", "p.yaml"))


@settings(max_examples=examples(300), **quick)
@given(
    st.binary(max_size=60)
    | json_like.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(words, json_like).map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_as_published_sets(cli, tmp_path, content):
    (tmp_path / "s.json").write_bytes(content)
    is_refused(cli("profile", "import", "s.json", "--model=org/model", "--layers=8"))


@settings(max_examples=examples(150), **quick)
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_any_bytes_to_be_shown(cli, tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    is_refused(cli("plot", "x", "--out=p.svg"))
    is_refused(cli("report", "--bench=x"))


@settings(max_examples=examples(FEW), **quick)
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_any_bytes_as_a_profile(cli, tmp_path, content):
    (tmp_path / "p.yaml").write_bytes(content)
    is_refused(cli("generate", "x", "--profile", "p.yaml"))


rows = json_like.filter(lambda row: not (isinstance(row, dict) and {"prompt", "text"} & row.keys()))
wrong_rows = (
    rows.map(json.dumps)
    | st.sampled_from(["prompt", "text"]).flatmap(
        lambda key: json_like.filter(lambda value: not _is_text(value)).map(lambda value: json.dumps({key: value}))
    )
    | st.text(min_size=1, max_size=20).filter(lambda text: text.strip() and not _is_json(text)).map(str.strip)
)


def _is_text(value):
    """Whether a row's value is a prompt: a text, or a list of turns that begins with one."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, str) and bool(first.strip())


def _is_json(text):
    with contextlib.suppress(ValueError):
        json.loads(text)
        return True
    return False


@settings(max_examples=examples(1500), **quick)
@given(st.lists(st.just('{"prompt": "right"}'), max_size=3), wrong_rows, st.sampled_from(["search", "audit"]))
def test_a_data_file_with_a_wrong_row(cli, tmp_path, before, wrong, command):
    (tmp_path / "d.jsonl").write_bytes("\n".join([*before, wrong]).encode("utf-8", "surrogatepass"))
    result = cli(command, "--prompts", "d.jsonl")
    is_refused(result)
    assert "d.jsonl" in result[1]


@settings(max_examples=examples(500), **quick)
@given(st.binary(max_size=40), st.sampled_from(["d.jsonl", "d.txt", "d.parquet", "d.csv", "d"]))
def test_any_bytes_as_data(cli, tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    is_refused_or_right(cli("audit", "--prompts", name))


@settings(max_examples=examples(500), **quick)
@given(st.text("{}[]()!:.\\\\n text", max_size=12) | words, st.sampled_from(["search", "audit"]))
def test_any_template(cli, tmp_path, template, command):
    (tmp_path / "d.jsonl").write_text('{"text": "right", "n": 1}')
    is_refused_or_right(cli(command, "--prompts", "d.jsonl", f"--template={template}"))


@settings(max_examples=examples(FEW), **quick)
@given(st.binary(max_size=40) | json_like.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_as_a_generation_config_or_a_schema(cli, tmp_path, content):
    (tmp_path / "c.json").write_bytes(content)
    is_refused_or_right(cli("generate", "x", "--generation-config", "c.json"))
    is_refused_or_right(cli("generate", "x", "--json-schema", "c.json"))


@pytest.mark.parametrize(
    "command",
    [
        "index texts.txt --model builtin --out texts.txt",
        "bench --profile profile.yaml --out profile.yaml",
        "bench --profile stdlib-llama-3.7m --methods plain,profile.yaml --out profile.yaml",
        "compare --profile profile.yaml --out profile.yaml",
        "compare --model builtin --methods plain,profile.yaml --out profile.yaml",
        "profile join profile.yaml other.yaml",
        "profile pick trials --storage trials.jsonl --out trials.jsonl",
        "quantize --profile profile.yaml --out profile.safetensors",
    ],
)
def test_what_a_command_reads_it_does_not_write_over(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    for name in ("profile.yaml", "other.yaml"):
        write_profile(find_profile_file("stdlib-llama-3.7m"), tmp_path / name)
    for name in ("texts.txt", "trials.jsonl"):
        (tmp_path / name).write_text("import os\n")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    monkeypatch.setattr(sys, "argv", ["selfspec", *command.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "would write over a file that is read; expected another path" in capsys.readouterr().err.replace("\n", " ")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
