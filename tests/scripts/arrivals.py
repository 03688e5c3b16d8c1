"""Requests that arrive by chance (Poisson) at a server that runs: how long until the first token, and until the next.

    selfspec serve --model smollm2-135m --max-num-seqs 8 --queue 1000 --threads 2 &
    python tests/scripts/arrivals.py --prompts prompts.jsonl --loads 0.5,0.9,1.2 --seconds 120 --out arrivals.json

Its capacity is measured first: requests a second, `--batch-size` at a time, for `--warm` seconds. Then requests arrive
at shares of that, or of `--capacity` to compare two servers under the same load. Tokens come together where a draft was
accepted; the time between them is shared among them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx

from selfspec.text.prompt_files import read_prompts

SHARES = (0.5, 0.95, 0.99)


@dataclass
class Seen:
    """What became of the requests: seconds to each first token, and between later ones."""

    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    tokens: int = 0
    refused: int = 0
    lost: int = 0


async def ask(client: httpx.AsyncClient, model: str, prompt: str, tokens: int, seen: Seen) -> None:
    """One streamed answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "selfspec": True},
    }
    begun = last = time.perf_counter()
    known, ended = 0, False
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code == 429:
            seen.refused += 1
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                ended = ended or line == "data: [DONE]"
                continue
            told = json.loads(line[6:]).get("selfspec")
            if told is None or told["tokens"] == known:
                continue
            now, new = time.perf_counter(), told["tokens"] - known
            if known:
                seen.later += [(now - last) / new] * new
            else:
                seen.first.append(now - begun)
            known, last = told["tokens"], now
    seen.tokens += known
    seen.whole.append(time.perf_counter() - begun)
    seen.lost += not ended


async def closed(client: httpx.AsyncClient, given: argparse.Namespace, prompts: list[str], model: str) -> float:
    """Requests a second with `rows` at a time."""
    end, done = time.perf_counter() + given.warm, 0

    async def one(number: int) -> None:
        nonlocal done
        draw = random.Random(number)
        while time.perf_counter() < end:
            await ask(client, model, draw.choice(prompts), given.new_tokens, Seen())
            done += 1

    begun = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(given.batch_size)))
    return done / (time.perf_counter() - begun)


async def arriving(
    client: httpx.AsyncClient, given: argparse.Namespace, prompts: list[str], model: str, rate: float
) -> Seen:
    """Requests that arrive for so long, each answered to its end."""
    seen, draw, under_way = Seen(), random.Random(0), set[asyncio.Task[None]]()
    end = time.perf_counter() + given.seconds
    while time.perf_counter() < end:
        under_way.add(asyncio.create_task(ask(client, model, draw.choice(prompts), given.new_tokens, seen)))
        await asyncio.sleep(draw.expovariate(rate))
    await asyncio.gather(*under_way)
    return seen


def quantiles(seconds: list[float]) -> list[float]:
    """p50, p95 and p99, in milliseconds."""
    ordered = sorted(seconds)
    return [round(1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)], 1) for share in SHARES]


async def measured(given: argparse.Namespace) -> dict[str, object]:
    """Capacity, and a row for each load."""
    prompts = list(read_prompts(given.prompts).texts)
    async with httpx.AsyncClient(base_url=given.url, timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        capacity = await closed(client, given, prompts, model)
        loaded = given.capacity or capacity
        print(f"capacity: {capacity:.2f} requests/s, {given.batch_size} at a time", flush=True)
        rows = []
        for load in map(float, given.loads.split(",")):
            seen = await arriving(client, given, prompts, model, load * loaded)
            row = {"load": load, "requests": len(seen.whole), "tokens": seen.tokens, "refused": seen.refused}
            row |= {"lost": seen.lost, "first_ms": quantiles(seen.first), "next_ms": quantiles(seen.later)}
            row |= {"request_ms": quantiles(seen.whole)}
            print(row, flush=True)
            rows.append(row)
        health = (await client.get("/health")).json()
        figures = (await client.get("/metrics")).text
    left = [line for line in figures.splitlines() if line.startswith(("selfspec_kv_slots", "selfspec_running"))]
    print(health, left)
    return {
        "capacity": capacity,
        "loads_of": loaded,
        "rows": given.batch_size,
        "loads": rows,
        "health": health,
        "left": left,
    }


def main() -> None:
    """Measure, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--loads", default="0.5,0.9,1.2")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--capacity", type=float, help="requests a second that loads are shares of; as measured")
    parser.add_argument("--warm", type=float, default=40.0)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = asyncio.run(measured(given))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
