"""selfspec, `transformers` and llama.cpp on the same prompts, by turns: tokens per second and their ratios.

    python -m venv llamacpp    # llama.cpp in its own environment; it is compiled, for minutes
    CMAKE_ARGS="-DGGML_NATIVE=ON" llamacpp/bin/pip install llama-cpp-python
    pip install gguf           # in selfspec's
    python tests/scripts/widen_gguf.py 4-bit.gguf float32.gguf
    python tests/scripts/llama_cpp.py --model FOLDER --prompts prompts.jsonl --python llamacpp/bin/python \\
        --gguf float32=float32.gguf --gguf 4-bit=4-bit.gguf --out compared.json

Told are tokens per second (medians over prompts), their ratio to selfspec's plain decoding (the median over prompts of
each prompt's own ratio, with its 95% bootstrap interval), and milliseconds to the first token and to each next one.
Every prompt of the file, an object a line with `prompt` or `turns`, is made a chat by the tokenizer's template. Each
method decodes as many tokens as plain decoding gives before it ends, and goes from token ids to token ids, the prompt's
pass included. The methods of one setting (dtype, threads, temperature) are processes of their own that take turns,
prompt by prompt; those that wait compute nothing (`compared_decoders.py`). `transformers`' assisted generation is slow,
so it is run on the first `--slow` prompts only. llama.cpp computes in its files' dtypes, its keys and values are
float16, whatever `--dtypes` says of the others. Run it with nothing else running.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answers = dict[str, list[list[dict[str, Any]]]]
"""What each method answered: by prompt, then by round."""


class Worker:
    """A process of one kind, asked one thing after the other."""

    def __init__(self, python: str, kind: str, **given: Any) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(given["threads"]), "THP_MEM_ALLOC_ENABLE": "1"}
        command = [python, str(Path(__file__).with_name("compared_decoders.py")), kind, json.dumps(given)]
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


Methods = dict[str, tuple[Worker, str]]
"""Each method by the name that it is shown by: its worker, and the worker's name of it."""
SLOW = ("prompt lookup", "early exit")  # transformers' assisted generation


def start(given: argparse.Namespace, dtype: str, threads: int) -> Methods:
    """The workers of one dtype and number of threads."""
    common = {"model": given.model, "dtype": dtype, "threads": threads}

    def ours(profile: str | None) -> Worker:
        return Worker(sys.executable, "selfspec", profile=profile, layout=given.layout, **common)

    found: Methods = {"plain": (ours(None), "selfspec")}
    if given.profile:
        found["profile"] = (ours(given.profile), "selfspec")
    if not given.without_transformers:
        worker = Worker(sys.executable, "transformers", **common)
        found["transformers"] = (worker, "generate")
        found |= {f"transformers, {name}": (worker, name) for name in SLOW if given.slow}
    for named in given.gguf:
        name, file = named.split("=", 1)
        settings = {"file": file, "context": given.context, "repack": not given.without_repacking, "threads": threads}
        found[f"llama.cpp, {name}"] = (Worker(given.python, "llama.cpp", **settings), "llama.cpp")
    return found


def compare(given: argparse.Namespace, methods: Methods, prompts: list[list[int]], temperature: float) -> Answers:
    """What every method answered."""
    answers: Answers = {name: [[] for _ in prompts] for name in methods}
    worker, plain = methods["plain"]
    new = [len(worker.ask(method=plain, ids=ids, new=-given.new_tokens, temperature=0.0)["tokens"]) for ids in prompts]
    for turn in range(-1, given.rounds):  # the first, on one prompt, warms up
        for number, ids in enumerate(prompts if turn >= 0 else prompts[:1]):
            names = [name for name, (_, own) in methods.items() if own not in SLOW or number < given.slow]
            shift = (turn + number) % len(names)
            for name in names[shift:] + names[:shift]:
                worker, method = methods[name]
                answer = worker.ask(method=method, ids=ids, new=new[number], temperature=temperature)
                assert len(answer["tokens"]) == new[number], name
                if turn >= 0:
                    answers[name][number].append(answer)
    return answers


def speed(answer: dict[str, Any]) -> float:
    """Tokens per second, the prompt's pass included."""
    return float(len(answer["tokens"]) / answer["seconds"])


def later(answer: dict[str, Any]) -> float:
    """Tokens per second after the first."""
    return float((len(answer["tokens"]) - 1) / (answer["seconds"] - answer["first"]))


def ratio(mine: list[list[dict[str, Any]]], plain: list[list[dict[str, Any]]], of: Callable[..., float]) -> list[float]:
    """The median over prompts of mine / plain, and its 95% interval; of each prompt, the median over rounds."""
    from selfspec.measure.timing import interval

    pairs = [(a, b) for a, b in zip(mine, plain, strict=True) if a and len(a[0]["tokens"]) > 1]
    values = [statistics.median(of(x) / of(y) for x, y in zip(a, b, strict=True)) for a, b in pairs]
    return [statistics.median(values), *interval(values)]


def summary(answers: Answers) -> dict[str, Any]:
    """For each method: its speed with the prompt's pass and without, the ratios to plain decoding's, and same texts."""
    found: dict[str, Any] = {}
    for name, mine in answers.items():
        runs = [answer for prompt in mine for answer in prompt if len(answer["tokens"]) > 1]
        same = [a[0]["tokens"] == b[0]["tokens"] for a, b in zip(mine, answers["plain"], strict=True) if a]
        found[name] = {
            "prompts": len(same),
            "tokens": sum(len(prompt[0]["tokens"]) for prompt in mine if prompt),
            "tokens_per_second": statistics.median(map(speed, runs)),
            "to_plain": ratio(mine, answers["plain"], speed),
            "first_ms": statistics.median(answer["first"] for answer in runs) * 1e3,
            "later_tokens_per_second": statistics.median(map(later, runs)),
            "later_to_plain": ratio(mine, answers["plain"], later),
            "same_as_plain": sum(same),
        }
    return found


def table(found: dict[str, Any]) -> str:
    """As Markdown."""
    lines = [
        "| method | tokens/s | / plain | first token, ms | after it, tokens/s | / plain | same text |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, of in found.items():
        whole, after = ("{:.2f} ({:.2f} to {:.2f})".format(*of[key]) for key in ("to_plain", "later_to_plain"))
        lines.append(
            f"| {name} | {of['tokens_per_second']:.1f} | {whole} | {of['first_ms']:.0f} "
            f"| {of['later_tokens_per_second']:.1f} | {after} | {of['same_as_plain']} of {of['prompts']} |"
        )
    return "\n".join(lines)


def chats(file: Path, model: str, limit: int) -> list[list[int]]:
    """The token ids of the first prompts of a file, each a chat's first message; spread over its lines."""
    from selfspec.models.loading import load_tokenizer

    tokenizer = load_tokenizer(model)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    texts = [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]
    texts = [texts[i * len(texts) // limit] for i in range(limit)] if 0 < limit < len(texts) else texts
    if tokenizer.chat_template is None:
        return [list(tokenizer(text).input_ids) for text in texts]
    messages = [[{"role": "user", "content": text}] for text in texts]
    return [list(tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False)) for one in messages]


def options() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=0, help="prompts, spread evenly over the file; 0: all")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtypes", default="float32", help="such as float32,bfloat16: selfspec's and transformers'")
    parser.add_argument("--temperatures", default="0")
    parser.add_argument("--layout", default="auto", help="of selfspec's weights")
    parser.add_argument("--profile", help="draft with this profile, too")
    parser.add_argument("--slow", type=int, default=0, help="prompts for transformers' assisted generation")
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--python", default=sys.executable, help="of the environment that has llama-cpp-python")
    parser.add_argument("--gguf", action="append", default=[], metavar="NAME=FILE", help="for llama.cpp; repeated")
    parser.add_argument("--without-repacking", action="store_true", help="of llama.cpp's weights for its AMX kernels")
    parser.add_argument("--context", type=int, default=2048, help="of llama.cpp")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    """A table for each setting; everything as JSON."""
    given = options()
    import torch

    from selfspec.basics.machine import machine

    prompts = chats(given.prompts, given.model, given.limit)
    found: list[dict[str, Any]] = []
    for dtype in given.dtypes.split(","):
        for threads in map(int, given.threads.split(",")):
            methods = start(given, dtype, threads)
            for temperature in map(float, given.temperatures.split(",")):
                result = summary(compare(given, methods, prompts, temperature))
                setting = {"dtype": dtype, "threads": threads, "temperature": temperature}
                found.append({**setting, "machine": machine(torch.device("cpu")), "methods": result})
                print(f"\n{dtype}, {threads} threads, temperature {temperature:g}:\n\n{table(result)}", flush=True)
                if given.out is not None:
                    given.out.write_text(json.dumps(found, indent=1) + "\n")
            for worker in {worker for worker, _ in methods.values()}:
                worker.close()


if __name__ == "__main__":
    main()
