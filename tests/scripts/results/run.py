"""Measure what docs/results.md shows, on this machine: `make results`.

    python tests/scripts/results/run.py --minutes 60
    python tests/scripts/results/run.py --prompts prompts.jsonl --only questions,editing --machine epyc-zen5

`--prompts`: questions, an object a line with `prompt` and `task` (Spec-Bench's, for one); of their texts only digests
are kept. `--llama-python` and `--openvino-python` name the Python of an environment with `llama-cpp-python` (compiled
with CMAKE_ARGS="-DGGML_NATIVE=ON") or `openvino-genai`, to measure these too. Neither is a dependency.

Every run is a line of `build/results/MACHINE/COMPARISON.jsonl`, and is not done again at the same commit: interrupt
this script at any time. A comparison that is complete is summarised in `docs/results/COMPARISON.MACHINE.json`, and
`tables.py` writes the tables. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from subjects import (
    DOCUMENTS,
    HERE,
    MODEL,
    NEW,
    OUT,
    ROOT,
    Question,
    Run,
    code,
    digest,
    documents,
    editing,
    held_out,
    in_torch,
    questions,
)

BUILTIN_PROFILE = "profiles/stdlib-llama-3.7m.yaml"
METHODS = {
    "plain": "plain",
    "selfspec": "profile",
    "drafts alone": "path",
    "lookup alone": "lookup",
    "no search": "default",
}
QUANTIZED = {"no search, in int4": "quantized"}
LOW_BIT = {"int8 drafts alone": "int8", "int4 drafts alone": "int4"}
OURS = METHODS | LOW_BIT | QUANTIZED
OF_PROFILE = ("profile", "path", "int8", "int4")  # those of `OURS` that a searched profile is needed for
PEERS = ("transformers", "transformers, prompt lookup", "llama.cpp, float32", "llama.cpp, 8 bits", "llama.cpp, 4 bits")
PEERS += ("openvino-genai, 4 bits", "plain, the 4-bit file")


@dataclass(frozen=True)
class Comparison:
    """Methods that answer the same prompts by turns, in settings (dtype, temperature) of their own.

    `methods`: the method names of a dtype. `rounds`: rounds of selfspec's methods by temperature. Peers take turns with
    plain decoding in one further round before these, greedily, on one prompt of each `peers_every`.
    `contexts`: numbers of tokens in the KV cache at which the costs of passes are timed, too.
    """

    name: str
    prompts: Callable[[Run], list[Question]]
    methods: dict[str, Sequence[str]]
    rounds: dict[float, int]
    source: str
    new: int = NEW
    peers_every: int = 1
    model: str = MODEL
    contexts: Sequence[int] = ()

    def measured(self, dtype: str, temperature: float) -> list[str]:
        """The methods of a dtype that are measured at a temperature: peers decode greedily only."""
        return [name for name in self.methods[dtype] if name in OURS or not temperature]

    def restricted(self, names: Sequence[str]) -> Comparison:
        """The comparison of these methods only."""
        return replace(self, methods={dtype: [n for n in own if n in names] for dtype, own in self.methods.items()})


class Worker:
    """A process that decodes, asked one thing after the other."""

    def __init__(self, python: str, kind: str, **given: Any) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(given["threads"]), "THP_MEM_ALLOC_ENABLE": "1"}
        command = [python, str(HERE / "decoders.py"), kind, json.dumps(given)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer()

    def ask(self, **ask: Any) -> dict[str, Any]:
        """What it answers."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(ask) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
                return answer
        raise SystemExit("a worker ended")

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def workers(run: Run, of: Comparison, dtype: str, temperature: float) -> dict[str, Worker]:
    """The process of each method at a dtype and temperature; methods whose peer is not there are left out."""
    names, threads = of.measured(dtype, temperature), run.given.threads
    common = {"model": run.model_of(of.model, dtype), "dtype": in_torch(dtype), "threads": threads}
    found: dict[str, Worker] = {}
    drafts = {name: method for name, method in OURS.items() if name in names}
    for name in drafts:
        if drafts[name] in OF_PROFILE:
            drafts[name] += f"@{run.searched(dtype, temperature) if of.model == MODEL else BUILTIN_PROFILE}"
        elif name in QUANTIZED:
            drafts[name] += f"@{run.int4(dtype)}"
    ours = Worker(sys.executable, "selfspec", drafts=drafts, **common)
    found |= dict.fromkeys(drafts, ours)
    if "plain, the 4-bit file" in names:
        file = {"model": str(run.files["4 bits"]), "dtype": "file", "threads": threads}
        found["plain, the 4-bit file"] = Worker(
            sys.executable, "selfspec", drafts={"plain, the 4-bit file": "plain"}, **file
        )
    if any(name.startswith("transformers") for name in names):
        worker = Worker(sys.executable, "transformers", **common)
        found |= {name: worker for name in names if name.startswith("transformers")}
    for name in names:
        peer, _, bits = name.partition(", ")
        python = {"llama.cpp": run.given.llama_python, "openvino-genai": run.given.openvino_python}.get(peer)
        if python:
            kind = "llama.cpp" if peer == "llama.cpp" else "openvino"
            settings = {"context": 8192 + NEW, "threads": threads}
            found[name] = Worker(python, kind, name=name, file=str(run.files[bits]), **settings)
    return found


def planned(of: Comparison, prompts: Sequence[Question], most: int) -> Iterator[tuple[str, float, int, Question, str]]:
    """Each run of a comparison in order: its dtype, temperature, round, prompt and method. `most`: rounds at most."""
    for dtype in of.methods:
        for temperature, rounds in of.rounds.items():
            methods = of.measured(dtype, temperature)
            ours, peers = [name for name in methods if name in OURS], [name for name in methods if name not in OURS]
            for turn in range(0 if peers else 1, 1 + min(rounds, most)):
                names = ours if turn else ["plain", *peers]
                for at, prompt in enumerate(prompts if turn else prompts[:: of.peers_every]):
                    shift = at % len(names)
                    for name in names[shift:] + names[:shift]:
                        yield dtype, temperature, turn, prompt, name


def measure(run: Run, of: Comparison) -> Iterator[dict[str, Any]]:
    """Run everything that the comparison's file lacks, and yield all runs. Raises `TimeoutError` when time is up."""
    file, commit = run.folder / f"{of.name}.jsonl", revision()
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if done and done[0]["commit"] != commit and not run.given.any_commit:
        done = []
        file.unlink()
    yield from done
    known = {(one["dtype"], one["temperature"], one["round"], one["prompt"], one["method"]) for one in done}
    lengths = {(one["dtype"], one["prompt"]): one["tokens"] for one in done if one["method"] == "plain"}
    prompts, started = of.prompts(run), dict[str, Worker]()
    started_for: tuple[str, float] | None = None
    for dtype, temperature, turn, prompt, name in planned(of, prompts, run.given.rounds):
        if (dtype, temperature, turn, prompt.number, name) in known:
            continue
        if time.time() > run.ends:
            raise TimeoutError
        if (dtype, temperature) != started_for:
            close(started)
            started, started_for = workers(run, of, dtype, temperature), (dtype, temperature)
            for method, worker in started.items():  # the first call warms up
                worker.ask(method=method, ids=prompts[0].ids[::-1], new=24, temperature=0.0)
        if name not in started:
            continue
        if (dtype, prompt.number) not in lengths:
            ask = {"method": "plain", "ids": prompt.ids, "new": -of.new, "temperature": 0.0}
            lengths[dtype, prompt.number] = len(started["plain"].ask(**ask)["tokens"])
        new = lengths[dtype, prompt.number]
        answer = started[name].ask(method=name, ids=prompt.ids, new=new, temperature=temperature)
        tokens = answer.pop("tokens")
        assert len(tokens) == new, (name, len(tokens), new)
        one = {"commit": commit, "dtype": dtype, "temperature": temperature, "round": turn}
        one |= {"prompt": prompt.number, "task": prompt.task, "prompt_digest": prompt.digest}
        one |= {"method": name, "tokens": new, "text": digest(tokens), **answer}
        with file.open("a") as lines:
            lines.write(json.dumps(one) + "\n")
        yield one
    close(started)


def costs(run: Run, of: Comparison) -> dict[str, dict[str, dict[str, float]]]:
    """The costs of passes by dtype and context, by `costs.py`; those of this commit are not timed again."""
    file, commit = run.folder / f"{of.name}.costs.jsonl", revision()
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {one["dtype"]: one["costs"] for one in done if one["commit"] == commit or run.given.any_commit}
    for dtype in of.methods:
        if dtype not in known:
            settings = {"model": run.model_of(of.model, dtype), "dtype": in_torch(dtype), "threads": run.given.threads}
            command = [sys.executable, str(HERE / "costs.py"), json.dumps({**settings, "contexts": [*of.contexts]})]
            environment = {**os.environ, "OMP_NUM_THREADS": str(run.given.threads), "THP_MEM_ALLOC_ENABLE": "1"}
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
            known[dtype] = json.loads(said.splitlines()[-1])
            with file.open("a") as lines:
                lines.write(json.dumps({"commit": commit, "dtype": dtype, "costs": known[dtype]}) + "\n")
    return {dtype: known[dtype] for dtype in of.methods}


def close(started: dict[str, Worker]) -> None:
    """Let workers end."""
    for worker in set(started.values()):
        worker.close()


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """For each dtype, temperature and method: speeds, ratios to plain decoding in the same round, equal texts."""
    from selfspec.measure.timing import interval

    found: dict[str, Any] = {}
    for dtype in dict.fromkeys(run["dtype"] for run in runs):
        for temperature in dict.fromkeys(run["temperature"] for run in runs if run["dtype"] == dtype):
            some = [run for run in runs if (run["dtype"], run["temperature"]) == (dtype, temperature)]
            plain = {(run["round"], run["prompt"]): run for run in some if run["method"] == "plain"}
            for name in dict.fromkeys(run["method"] for run in some):
                mine = [run for run in some if run["method"] == name]
                pairs = [(run, plain[run["round"], run["prompt"]]) for run in mine]
                tasks, turns = dict.fromkeys(run["task"] for run in mine), {run["round"] for run in mine}
                if name == "plain" and len(turns) > 1:  # of the rounds with selfspec's own methods
                    pairs = [(run, other) for run, other in pairs if run["round"]]
                    mine, turns = [run for run in mine if run["round"]], turns - {0}
                ratios = by_prompt(pairs, whole)
                later = by_prompt([pair for pair in pairs if pair[0]["tokens"] > 1], after_first)
                found.setdefault(dtype, {}).setdefault(f"{temperature:g}", {})[name] = {
                    "rounds": len({run["round"] for run in mine}),
                    "prompts": len({run["prompt"] for run in mine}),
                    "tokens": sum(run["tokens"] for run in mine),
                    "tokens_per_second": sum(run["tokens"] for run in mine) / sum(run["seconds"] for run in mine),
                    "ratio_of_means": ratio_of_means(pairs),
                    "median": [statistics.median(ratios), *interval(ratios)],
                    "first_ms": statistics.median(run["first"] for run in mine) * 1e3,
                    "after_first": [statistics.median(later), *interval(later)],
                    "after_first_tokens_per_second": sum(run["tokens"] - 1 for run in mine)
                    / sum(map(after_first, mine)),
                    "by_task": {
                        task: ratio_of_means([pair for pair in pairs if pair[0]["task"] == task]) for task in tasks
                    },
                    "first_ms_by_task": {
                        task: statistics.median(run["first"] for run in mine if run["task"] == task) * 1e3
                        for task in tasks
                    },
                    "after_first_by_task": {
                        task: ratio_of_means([pair for pair in pairs if pair[0]["task"] == task], after_first)
                        for task in tasks
                    },
                    "same_text": None
                    if temperature
                    else sum(run["text"] == other["text"] for run, other in pairs if run["round"] == min(turns)),
                }
    return found


def whole(run: dict[str, Any]) -> float:
    """Seconds of a run, the prompt's pass included."""
    return float(run["seconds"])


def after_first(run: dict[str, Any]) -> float:
    """Seconds after the first token."""
    return float(run["seconds"] - run["first"])


Pairs = list[tuple[dict[str, Any], dict[str, Any]]]


def by_prompt(pairs: Pairs, seconds: Callable[[dict[str, Any]], float]) -> list[float]:
    """Each prompt's ratio to plain decoding, the median over rounds."""
    prompts = dict.fromkeys(run["prompt"] for run, _ in pairs)
    return [
        statistics.median(seconds(plain) / seconds(run) for run, plain in pairs if run["prompt"] == prompt)
        for prompt in prompts
    ]


def ratio_of_means(pairs: Pairs, seconds: Callable[[dict[str, Any]], float] = whole) -> float:
    """The ratio of mean tokens per second, as in Spec-Bench: all tokens over all seconds."""
    return sum(seconds(plain) for _, plain in pairs) / sum(seconds(run) for run, _ in pairs)


def revision() -> str:
    """The commit that is measured, with a + where other files than these results differ from it."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    differ = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/results", ":!docs/results.md")
    return git("describe", "--always") + ("+" if differ else "")


SOME = ("plain", "selfspec", "drafts alone", "lookup alone")
LONG = ("plain", "selfspec", *LOW_BIT, "lookup alone")
COMPARISONS = (
    Comparison(
        "questions",
        questions,
        {
            "float32": (*METHODS, *PEERS),
            "bfloat16": ("plain", "selfspec", "no search", "transformers"),
            "held": ("plain", "no search"),
        },
        {0.0: 3, 0.8: 2},
        "",
        peers_every=2,
    ),
    Comparison(
        "held-out",
        held_out,
        {
            "float32": ("plain", "selfspec", "no search", *QUANTIZED),
            "bfloat16": ("plain", "no search", *QUANTIZED),
        },
        {0.0: 1, 0.8: 1},
        "",
    ),
    Comparison(
        "editing",
        editing,
        {"float32": (*SOME, "transformers"), "bfloat16": SOME},
        {0.0: 1},
        "12 functions of Python's library, one name to be replaced",
        new=200,
    ),
    Comparison(
        "documents",
        documents,
        {"float32": (*LONG, "transformers", "llama.cpp, float32"), "bfloat16": (*LONG, "transformers")},
        {0.0: 1, 0.8: 1},
        "modules of Python's library",
        peers_every=2,
        contexts=tuple(DOCUMENTS),
    ),
    Comparison(
        "code",
        code,
        {"float32": (*SOME, "transformers")},
        {0.0: 2, 0.8: 2},
        "12 held-out prompts of code",
        new=96,
        model="builtin",
    ),
)


def batches(run: Run) -> dict[str, Any]:
    """Prompts decoded together: plainly and with drafts by load, by `throughput.py`."""
    file, prompts = run.folder / "batches.json", run.folder / "prompts.jsonl"
    asked = questions(run)
    rows = [json.dumps({"prompt": run.tokenizer.decode(one.ids)}) for one in asked]
    prompts.write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    settings = {"model": run.model_of(MODEL, "float32"), "profile": run.searched("float32"), "prompts": prompts}
    settings |= {"methods": "plain,adaptive", "rounds": 3, "threads": run.given.threads, "out": file}
    script("throughput.py", **settings)
    table: list[dict[str, Any]] = json.loads(file.read_text())["table"]
    kept = [{key: value for key, value in row.items() if key != "said"} for row in table]
    return {"rows": kept, "prompts": {str(one.number): one.digest for one in asked}}


def guided(run: Run) -> dict[str, Any]:
    """Answers that fit a JSON schema, with and without drafts, by `guided.py`."""
    file = run.folder / "guided.jsonl"
    file.unlink(missing_ok=True)
    script("guided.py", model=MODEL, repeats=3, out=file)
    sys.path.insert(0, str(HERE.parent))
    from guided import summary as by_schema

    return {"rows": by_schema(file)}


def script(name: str, **settings: Any) -> None:
    """Run another script of `tests/scripts`."""
    options = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    subprocess.run([sys.executable, str(HERE.parent / name), *options], check=True, stdout=sys.stderr)


ON_REQUEST = ("held-out",)  # measured only where `--only` names it, so that a run takes about an hour
SCRIPTS = {
    "batches": (batches, "the questions, decoded together", NEW),
    "guided": (guided, "ten shapes of JSON schema", 128),
}


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="by default the chat prompts that come with selfspec")
    parser.add_argument("--source", help="what the prompts are, in the tables")
    parser.add_argument("--limit", type=int, default=40, help="questions, spread evenly over the file")
    usual = ",".join(name for name in (*(one.name for one in COMPARISONS), *SCRIPTS) if name not in ON_REQUEST)
    parser.add_argument("--only", default=usual)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1, help="most rounds of selfspec's methods")
    parser.add_argument("--methods", help="measure these methods only, such as 'plain,no search'")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--machine", help="name in the tables; by default of the processor and its instruction set")
    parser.add_argument("--llama-python", help="Python of an environment with llama-cpp-python")
    parser.add_argument("--openvino-python", help="Python of an environment with openvino-genai")
    parser.add_argument("--any-commit", action="store_true", help="go on with runs of other commits")
    return parser


def command(given: argparse.Namespace, name: str) -> str:
    """The command that measures this comparison again; of files and peers' Pythons only names, no folders."""
    shown = {**vars(given), "only": name, "minutes": None}  # how often measuring was interrupted does not matter
    shown["prompts"] = given.prompts and given.prompts.name
    for peer in ("llama_python", "openvino_python"):
        shown[peer] = vars(given)[peer] and "PYTHON"
    words = [f"SELFSPEC_ISA={os.environ['SELFSPEC_ISA']}"] if os.environ.get("SELFSPEC_ISA") else []
    words += ["python", "tests/scripts/results/run.py"]
    for option, value in shown.items():
        if value is not None and value is not False:
            words += [f"--{option.replace('_', '-')}", *([] if value is True else [shlex.quote(str(value))])]
    return " ".join(words)


def main() -> None:
    """Measure, summarise, and write the tables."""
    parser = arguments()
    given = parser.parse_args()
    names = [*(one.name for one in COMPARISONS), *SCRIPTS]
    if unknown := sorted(set(given.only.split(",")) - set(names)):
        parser.error(f"--only {','.join(unknown)}: expected some of {','.join(names)}")
    import tables
    import torch

    from selfspec.basics.machine import machine
    from selfspec.models.native_library import instruction_set

    torch.set_num_threads(1)  # of this process, which only tokenises
    isa, where = instruction_set() or "torch", machine(torch.device("cpu"))
    given.machine = given.machine or f"{where.split(',')[0].lower().replace(' ', '-')}-{isa}"
    run = Run(given, time.time() + 60 * given.minutes)
    OUT.mkdir(exist_ok=True)

    def write(name: str, source: str, model: str, new: int, commit: str, **found: Any) -> None:
        about = {"comparison": name, "machine": given.machine, "processor": where, "instruction_set": isa}
        about |= {"threads": given.threads, "model": model, "source": source, "new_tokens": new, "commit": commit}
        about |= {"date": datetime.now(UTC).date().isoformat(), "command": command(given, name)}
        file = OUT / f"{name}.{given.machine}.json"
        file.write_text(json.dumps({**about, **found}, indent=1) + "\n", encoding="utf-8")
        print(file, flush=True)

    asked = given.only.split(",")
    for of in COMPARISONS:
        if given.methods:
            of = of.restricted(given.methods.split(","))
        if of.name in asked:
            try:
                runs = list(measure(run, of))
            except TimeoutError:
                sys.exit(f"time is up in {of.name}; run this again to go on")
            prompts = {str(one["prompt"]): one["prompt_digest"] for one in runs}
            source = of.source or run.source
            found = {"results": summary(runs), "prompts": prompts} | ({"costs": costs(run, of)} if of.contexts else {})
            write(of.name, source, of.model, of.new, runs[0]["commit"], **found)
    for name, (measured, source, new) in SCRIPTS.items():
        if name in asked:
            if time.time() > run.ends:
                sys.exit(f"time is up before {name}; run this again to go on")
            write(name, source, MODEL, new, revision(), **measured(run))
    tables.write()


if __name__ == "__main__":
    main()
