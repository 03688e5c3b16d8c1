"""One server process under mixed traffic: clients that come, go, cancel, stall, send nonsense and ask properly.

    python tests/scripts/soak.py --minutes 120 --out /tmp/soak.json

Starts `selfspec serve` in float64, so that texts do not depend on which sequences decode together. Each client asks in
turn for a text, a stream, four seeded texts, a text of a JSON schema; or leaves in the middle of a stream, stalls,
sends nonsense, or a wrong request. Every greedy text must be what `selfspec generate` gives, and every wrong request
gets one clear error. Then no client asks for a while: no text may run or wait any longer, and all slots of the KV cache
are free that were free at the beginning. At the end SIGTERM arrives while clients ask again: what runs is answered, and
the process ends with 0.

Tells the counts, the 95th percentile of the queue time (the bound of its bucket), and how much the server's memory
grew from the first tenth after a warm-up tenth to the last tenth. Exit code 1 when anything failed, or memory grew by
more than 2% in a run of at least 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import httpx2
from rude import misbehave, request
from wrong_requests import WrongRequest, wrong_requests

from selfspec import builtin

CLIENTS, TOKENS, PROMPTS = 32, 24, 12
ENDING = 120  # seconds that the server may take to end, four times its grace
RESTING = 60  # seconds that the server may take until nothing runs, once no client asks
COMPILING = 600  # seconds until the server serves, native kernels compiled while others work
AGAIN = 3  # seconds in which clients ask again before the end
SELFSPEC = (sys.executable, "-m", "selfspec")
MODEL = ("--model", "builtin", "--dtype", "float64", "--profile", "stdlib-llama-3.7m")
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["function", "class", "module"]}, "tested": {"type": "boolean"}},
    "required": ["kind", "tested"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


def commanded(prompts: list[str], *options: str) -> dict[str, str]:
    """What `selfspec generate` gives for each prompt."""
    with tempfile.TemporaryDirectory() as folder:
        asked, out, schema = (Path(folder) / name for name in ("prompts.jsonl", "out.jsonl", "schema.json"))
        asked.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        schema.write_text(json.dumps(SCHEMA))
        how = [str(schema) if option == "SCHEMA" else option for option in options]
        command = [*SELFSPEC, "generate", *MODEL, "--prompts", asked, "--out", out, "--max-new-tokens", str(TOKENS)]
        subprocess.run([*command, *how], check=True, capture_output=True)
        return {line["prompt"]: line["text"] for line in map(json.loads, out.read_text().splitlines())}


class Soak:
    """The server process, what is expected of it, and what its clients found."""

    def __init__(self, url: str) -> None:
        prompts = builtin.prompts("heldout")[:PROMPTS]
        self.url, self.texts = url, commanded(prompts)
        self.guided = commanded(prompts[:4], "--json-schema", "SCHEMA")
        self.wrong = [wrong for wrong in wrong_requests() if wrong.content_type]
        self.counts, self.failures = Counter[str](), list[str]()
        self.seeded: dict[tuple[str, int], list[str]] = {}
        self.asking, self.ending = threading.Event(), threading.Event()
        self.asking.set()

    def client(self, number: int) -> None:
        """One client: it asks until the server ends."""
        draw = random.Random(number)
        ways: list[tuple[Callable[[httpx2.Client, random.Random], bool], int]] = [
            (self.ask, 6),
            (self.stream, 4),
            (self.four, 2),
            (self.schema, 2),
            (self.cancel, 3),
            (self.stall, 1),
            (self.nonsense, 2),
            (self.mistake, 4),
        ]
        chosen, weights = zip(*ways, strict=True)
        while not self.ending.is_set():
            with httpx2.Client(base_url=self.url, timeout=120) as client:
                for _ in range(draw.randrange(1, 12)):  # then it goes, and comes again
                    way = draw.choices(chosen, weights)[0]
                    self.asking.wait()
                    if self.ending.is_set():
                        return
                    try:
                        self.counts[way.__name__] += way(client, draw)
                    except httpx2.TransportError as error:
                        if not self.ending.is_set():
                            self.failures.append(f"{way.__name__}: {type(error).__name__}: {error}")
                    except Exception as error:
                        self.failures.append(f"{way.__name__}: {type(error).__name__}: {error}")
            self.ending.wait(draw.expovariate(2))

    def rest(self, idle: dict[str, float]) -> None:
        """Let no client ask until the server's gauges are `idle` again, then let them go on."""
        self.asking.clear()
        try:
            until(lambda: gauges(self.url) == idle, RESTING)
        except AssertionError:
            self.failures.append(f"no client asks, and the server has {gauges(self.url)}; expected {idle}")
        finally:
            self.counts["rests"] += 1
            self.asking.set()

    def post(self, client: httpx2.Client, **fields: Any) -> dict[str, Any] | None:
        """The answer to a completion; None where the queue is full, or the server ends."""
        answer = client.post("/v1/completions", json={"model": "builtin", "max_tokens": TOKENS, **fields})
        if answer.status_code in (429, 503):
            self.counts[f"status {answer.status_code}"] += 1
            assert answer.json()["error"]["message"]
            self.ending.wait(1)
            return None
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def ask(self, client: httpx2.Client, draw: random.Random) -> bool:
        """A greedy text."""
        prompt = draw.choice(list(self.texts))
        answer = self.post(client, prompt=prompt, temperature=0)
        return answer is not None and self.same(answer["choices"][0], self.texts[prompt])

    def same(self, choice: dict[str, Any], expected: str) -> bool:
        """Whether a text is the command's; one that the server's end cut off is its beginning."""
        cut = self.ending.is_set() and choice.get("finish_reason") not in ("stop", "length")
        right = expected.startswith(choice["text"]) if cut else choice["text"] == expected
        assert right, f"{choice}; expected {expected!r}"
        return True

    def stream(self, client: httpx2.Client, draw: random.Random, most: int | None = None) -> bool:
        """A greedy text, piece by piece; with `most`, the client leaves after so many pieces."""
        prompt, pieces, finish = draw.choice(list(self.texts)), list[str](), None
        body = {"model": "builtin", "max_tokens": TOKENS, "prompt": prompt, "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code in (429, 503):
                self.counts[f"status {answer.status_code}"] += 1
                self.ending.wait(1)
                return False
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"] or [{"text": ""}]
                    pieces.append(choice["text"])
                    finish = choice.get("finish_reason") or finish
                if most is not None and len(pieces) >= most:
                    assert self.texts[prompt].startswith("".join(pieces)), pieces
                    return True
        return self.same({"text": "".join(pieces), "finish_reason": finish}, self.texts[prompt])

    def cancel(self, client: httpx2.Client, draw: random.Random) -> bool:
        """A stream that the client leaves."""
        return self.stream(client, draw, draw.randrange(1, 5))

    def four(self, client: httpx2.Client, draw: random.Random) -> bool:
        """Four seeded texts."""
        prompt, seed = draw.choice(list(self.texts)), draw.randrange(3)
        answer = self.post(client, prompt=prompt, n=4, seed=seed, temperature=1.0)
        if answer is None:
            return False
        texts = [choice["text"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
        assert len(texts) == 4, texts
        first = self.seeded.setdefault((prompt, seed), texts)
        assert first == texts or self.ending.is_set(), f"seed {seed}: {texts}; expected {first}"
        return True

    def schema(self, client: httpx2.Client, draw: random.Random) -> bool:
        """A text of a JSON schema."""
        prompt = draw.choice(list(self.guided))
        answer = self.post(client, prompt=prompt, temperature=0, response_format=FORMAT)
        return answer is not None and self.same(answer["choices"][0], self.guided[prompt])

    def stall(self, client: httpx2.Client, draw: random.Random) -> bool:
        """Half a request, or a stream that is not read, and a long wait."""
        whole = request("x = ", max_tokens=200, stream=True).replace(b'"toy"', b'"builtin"')
        with socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])), timeout=30) as raw:
            raw.sendall(whole[: len(whole) if draw.random() < 0.5 else draw.randrange(len(whole))])
            self.ending.wait(draw.uniform(0.5, 5))
        return True

    def nonsense(self, client: httpx2.Client, draw: random.Random) -> bool:
        """Bytes that are no request."""
        misbehave(int(self.url.rpartition(":")[2]), draw.randrange(2**32))
        return True

    def mistake(self, client: httpx2.Client, draw: random.Random) -> bool:
        """A wrong request."""
        wrong: WrongRequest = draw.choice(self.wrong)
        body = wrong.body.replace(b'"model": "toy"', b'"model": "builtin"')
        headers = {"content-type": wrong.content_type}
        answer = client.request(wrong.method, wrong.path, content=body, headers=headers)
        assert 400 <= answer.status_code < 500 or answer.status_code == 503, f"{wrong}: {answer.status_code}"
        assert answer.json()["error"]["message"].isprintable(), wrong
        return True


def resident(pid: int) -> int:
    """The resident memory of a process, in bytes."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0


def gauges(url: str) -> dict[str, float]:
    """The texts that run and that wait, and the free slots of the KV cache."""
    metrics = httpx2.get(f"{url}/metrics", timeout=60).text
    return {
        name: float(value)
        for name, value in re.findall(r"^selfspec_(running|waiting|kv_slots_free) (\S+)", metrics, re.M)
    }


def queue_p95(metrics: str) -> float:
    """The bucket bound of the 95th percentile of the queue time, in seconds."""
    buckets = re.findall(r'selfspec_queue_seconds_bucket\{le="([^"]+)"\} (\S+)', metrics)
    total = float(buckets[-1][1]) if buckets else 0.0
    return next((float(bound) for bound, count in buckets if float(count) >= 0.95 * total), 0.0)


def soak(minutes: float, log: Path) -> dict[str, Any]:
    """Run the server and its clients, and return what was found."""
    command = [*SELFSPEC, "serve", *MODEL, "--port", "0", "--queue", "24", "--memory", "0.25", "--read-timeout", "3"]
    with log.open("w") as errors:
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        server = subprocess.Popen(command, stderr=errors, stdout=subprocess.DEVNULL, env=environment)
    try:
        until(lambda: "serving builtin at" in log.read_text() or server.poll() is not None, COMPILING)
        found = re.search(r"at (http://\S+)", log.read_text())
        assert found, log.read_text()
        traffic = Soak(found[1])
        idle = gauges(traffic.url)
        assert idle["running"] == idle["waiting"] == 0 < idle["kv_slots_free"], idle
        clients = [threading.Thread(target=traffic.client, args=(number,), daemon=True) for number in range(CLIENTS)]
        for thread in clients:
            thread.start()
        memory, ends = list[int](), time.monotonic() + 60 * minutes
        while time.monotonic() < ends and server.poll() is None:
            time.sleep(1)
            memory.append(resident(server.pid))
        traffic.rest(idle)
        time.sleep(AGAIN)
        metrics = httpx2.get(f"{traffic.url}/metrics", timeout=60).text
        traffic.ending.set()
        server.send_signal(signal.SIGTERM)
        try:
            code = server.wait(ENDING)
        except subprocess.TimeoutExpired:
            server.send_signal(signal.SIGABRT)  # its threads' stacks go to the log
            code = server.wait()
            traffic.failures.append(f"the server did not end within {ENDING} seconds of SIGTERM: {log}")
        for thread in clients:
            thread.join()
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    tenth = max(len(memory) // 10, 1)
    by_tenth = [statistics.median(memory[i * tenth : (i + 1) * tenth] or memory) for i in range(10)]
    first, last = by_tenth[1], statistics.median(memory[-tenth:])
    if code != 0:
        traffic.failures.append(f"the server ended with {code}")
    if "Traceback" in log.read_text():
        traffic.failures.append(f"the server's log has a traceback: {log}")
    return {
        "minutes": minutes,
        "counts": dict(traffic.counts.most_common()),
        "queue p95 at most, seconds": queue_p95(metrics),
        "memory, MiB": [round(first / 2**20), round(last / 2**20)],
        "memory by tenths, MiB": [round(size / 2**20, 1) for size in by_tenth],
        "memory grew by": round(last / first - 1, 4),
        "failures": traffic.failures[:20],
    }


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Wait until something holds."""
    given_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < given_up, "it never came"
        time.sleep(0.1)


def main() -> None:
    """Soak, and write what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = soak(options.minutes, options.out.with_suffix(".log"))
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    sys.exit(bool(found["failures"]) or (options.minutes >= 10 and found["memory grew by"] > 0.02))


if __name__ == "__main__":
    main()
