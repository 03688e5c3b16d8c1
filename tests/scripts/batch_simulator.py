"""Predicted speed of requests decoded together, by how much each round drafts: played over recorded drafts and costs.

    python tests/scripts/batch_simulator.py record --prompts prompts.jsonl --chat --out trace.json
    python tests/scripts/batch_simulator.py costs --threads 2 --out costs.json      # nothing else running
    python tests/scripts/batch_simulator.py play trace.json costs.json --requests 10000

`record` decodes some prompts plainly, and drafts from every position of their texts: the confidence in each token, and
how many are right. `costs` measures what passes over 1, 2, .. tokens take on this machine, and prompts. `play` needs no
model: all requests come together, their prompts in the prefix cache, or arrive by chance (Poisson) with new prompts, at
shares of plain decoding's capacity; each takes a recorded text. Nothing played is measured but those costs: guard,
lookup tokens, further candidates and the memory of keys and values are left out, and costs are those of short texts.

Policies:

- plain: no drafts; fixed N: each sequence drafts N tokens in every round
- common: as many further tokens for every sequence that drafts, with acceptance rates that all sequences share
- allocated: the scheduler of batches, `BatchDraftScheduler`
- oracle: an allocation that knows how many tokens of each draft are right, at the rate that it reaches itself times the
  best of some margins; it weighs one round at a time, so it is no strict bound

Regret is the throughput that a policy loses to the oracle's, as a share of it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from selfspec.search.continuations import DecodingSettings, continue_prompts
from selfspec.search.replay import Replay

import selfspec
from selfspec.basics.machine import clock, machine
from selfspec.controllers import BatchDraftScheduler, Controller, DraftLoop, FixedK, make_controller
from selfspec.controllers.batch_scheduler import FIRST, HORIZON, MARGIN, AcceptanceHistory, allocate_tokens
from selfspec.llm.batch import CHUNK, MIN_CHUNK, Batch
from selfspec.llm.llm import LLM
from selfspec.llm.prompt_encoding import encode
from selfspec.text.prompt_files import read_prompts
from selfspec.types.acceptance import AcceptanceCurve, PayoffModel
from selfspec.types.controller import ControllerSpec
from selfspec.types.costs import PassCosts
from selfspec.types.methods import MOST_ROWS

DEPTH = 9  # longest recorded draft, in tokens
PARTS = ("verify", "draft")  # of the costs
ORACLES = (1.0, 1.2, 1.5, 2.0, math.inf)  # margins of the oracles, of which the fastest counts; the last never drafts
READ = 256  # tokens of the prompts whose prefill is timed


def loaded(given: argparse.Namespace) -> LLM:
    """The model with its profile."""
    torch.set_num_threads(given.threads)
    return selfspec.load(given.model, profile=given.profile)


def record(given: argparse.Namespace) -> dict[str, Any]:
    """Drafts from every position of the model's own texts."""
    llm = loaded(given)
    profile = llm.profile
    if profile is None or profile.acceptance is None:
        raise SystemExit(f"--profile {given.profile}: expected one with an acceptance curve")
    prompts = [encode(llm, text, chat=given.chat)[-1024:] for text in read_prompts(given.prompts).texts]
    prompts = prompts[:: max(len(prompts) // given.num_prompts, 1)][: given.num_prompts]
    decoding = DecodingSettings(given.new_tokens)
    texts = continue_prompts(llm, prompts, decoding)
    with Replay(llm.model, texts, sampler=decoding.sampler(), depth=DEPTH, base_runtime=llm.runtime) as replay:
        replay.confidence = profile.draft.confidence
        traces = replay.trace(profile.path, [FixedK(DEPTH)])
    return {
        "model": given.model,
        "controller": profile.draft.controller.model_dump(mode="json"),
        "curve": profile.acceptance.model_dump(mode="json"),
        "first": profile.predicted.acceptance_rate if profile.predicted else FIRST,
        "texts": [
            {
                "prompt": text.prompt_length,
                "runs": list(trace.runs),
                "confidences": [[round(confidence, 4) for confidence in row] for row in trace.confidences],
            }
            for text, trace in zip(texts, traces, strict=True)
        ],
    }


def measure_costs(given: argparse.Namespace) -> dict[str, Any]:
    """The costs of passes on this machine, as a batch measures them when it begins; the least of some repetitions."""
    llm = loaded(given)
    measured = []
    for _ in range(given.repeats):
        with Batch(llm, rows=given.rows) as batch:
            assert batch._scheduler is not None
            measured.append(batch._scheduler.prices)
    least = {part: [min(at) for at in zip(*(getattr(m, part) for m in measured), strict=True)] for part in PARTS}
    draw, ids, prefills = random.Random(0), llm.runtime.skeleton.identity.vocabulary or 2, []
    for _ in range(3):  # a run of one new token is the prompt's pass
        prompt = [draw.randrange(ids) for _ in range(READ)]
        begun = clock()
        llm.generate(prompt, max_new_tokens=1)
        prefills.append((clock() - begun) / READ)
    where = {"machine": machine(llm.runtime.device), "threads": given.threads, "model": given.model}
    return {**least, "prefill": min(prefills), **where}


@dataclass(frozen=True)
class Text:
    """A recorded text: prompt length, and from each position the run of right drafted tokens, and all confidences."""

    prompt: int
    runs: Sequence[int]
    confidences: Sequence[Sequence[float]]


@dataclass(eq=False)
class Request:
    """A request on its way: `place` tokens of its text are emitted; times are in seconds since the beginning."""

    text: Text
    arrival: float
    place: int = 0
    last: float = 0.0  # when the latest token was emitted
    history: AcceptanceHistory = field(default_factory=AcceptanceHistory)

    @property
    def run(self) -> int:
        """How many drafted tokens of the next draft are right."""
        return self.text.runs[self.place]

    @property
    def longest(self) -> int:
        """The most tokens that the next draft may have."""
        return min(len(self.text.confidences[self.place]), len(self.text.runs) - self.place - 1)


class Plain:
    """A policy: how many tokens each sequence drafts in a round, and the seconds that drafting takes."""

    def __init__(self, costs: PassCosts) -> None:
        self.costs = costs

    def begin(self, requests: Sequence[Request], reading: int) -> None:
        """Begin a round of these sequences, while so many others are in prefill."""

    def lengths(self, requests: Sequence[Request]) -> list[int]:
        """Return the draft length of each sequence."""
        return [0] * len(requests)

    def observe(self, requests: Sequence[Request], lengths: Sequence[int], seconds: float) -> None:
        """Learn from a round before its tokens are emitted."""


class Fixed(Plain):
    """Every sequence drafts `length` tokens."""

    def __init__(self, costs: PassCosts, length: int) -> None:
        super().__init__(costs)
        self.length = length

    def lengths(self, requests: Sequence[Request]) -> list[int]:
        """Return the length, or what is left."""
        return [min(self.length, request.longest) for request in requests]


class CommonScheduler(BatchDraftScheduler):
    """The scheduler with one number of further tokens for all sequences that draft, instead of an allocation."""

    def draft_lengths(self, chances: Sequence[Sequence[float]], *, verified: int) -> list[int]:
        """Return the best of 1, 2, 4 and 8 further tokens, for those sequences whose next token is the likeliest."""
        super().draft_lengths(chances, verified=verified)
        order = sorted(range(len(chances)), key=lambda i: -chances[i][0])
        best, taken, length = 0.0, 0, 0
        for j in (j for j in (1, 2, 4, 8) if j <= max(map(len, chances))):
            brings = sum(self.later**d for d in range(j))
            for k, hope in enumerate(accumulate(chances[i][0] for i in order), start=1):
                worth = hope * brings - MARGIN * self.rate * (j * self._drafted(k) + self._wider(verified, k * j))
                if worth > best:
                    best, taken, length = worth, k, j
        return [length * (i in order[:taken]) for i in range(len(chances))]


class Scheduled(Plain):
    """A batch's scheduler and a shared controller, applied as `ChainDrafter` applies them; one sequence: its own."""

    def __init__(self, costs: PassCosts, scheduler: BatchDraftScheduler, controller: Controller, *, own: bool) -> None:
        super().__init__(costs)
        self.scheduler, self.controller, self.own = scheduler, controller, own
        self.loops: list[DraftLoop] = []

    def begin(self, requests: Sequence[Request], reading: int) -> None:
        """Begin a round."""
        self.scheduler.begin(len(requests), reading)

    def lengths(self, requests: Sequence[Request]) -> list[int]:
        """Draft in lockstep on the recorded confidences."""
        scheduler, together = self.scheduler, len(requests) > 1
        self.loops = [DraftLoop(self.controller, depth=one.longest, together=together) for one in requests]
        while live := [i for i, loop in enumerate(self.loops) if loop.wants]:
            if together:
                first = scheduler.first
                chances = [
                    self.loops[i].survival_chances(requests[i].history.chance(first) if self.own else first, HORIZON)
                    for i in live
                ]
                verified = sum(1 + len(loop.confidences) for loop in self.loops)
                for i, length in zip(live, scheduler.draft_lengths(chances, verified=verified), strict=True):
                    self.loops[i].wants = length > 0
                live = [i for i in live if self.loops[i].wants]
                if live:
                    scheduler.record_pass(len(live), self.costs.drafted(len(live)))
            for i in live:
                request = requests[i]
                self.loops[i].record(request.text.confidences[request.place][len(self.loops[i].confidences)])
        return [len(loop.confidences) for loop in self.loops]

    def observe(self, requests: Sequence[Request], lengths: Sequence[int], seconds: float) -> None:
        """Pass the round to scheduler, controller and histories."""
        for request, loop, length in zip(requests, self.loops, lengths, strict=True):
            accepted = min(request.run, length)
            self.scheduler.record_draft(length, accepted, accepted + 1, nodes=length)
            if length:
                request.history.record(accepted > 0)
                self.controller.observe(loop.confidences, accepted)
        self.scheduler.record_duration(seconds)


class Oracle(Plain):
    """The allocation of right tokens only; they must bring `margin` times the rate reached with as many sequences."""

    def __init__(self, costs: PassCosts, rates: dict[int, float], margin: float) -> None:
        super().__init__(costs)
        self.rates, self.margin = rates, margin
        self.tokens: Counter[int] = Counter()
        self.seconds: Counter[int] = Counter()

    def lengths(self, requests: Sequence[Request]) -> list[int]:
        """Return the allocation with certain acceptance."""
        rows, costs = len(requests), self.costs
        chances = [[1.0] * min(request.run, request.longest) for request in requests]
        rate = self.rates.get(rows, rows / costs.verified(rows))
        return allocate_tokens(chances, self.margin * rate, costs.drafted, lambda more: costs.wider(rows, more))

    def observe(self, requests: Sequence[Request], lengths: Sequence[int], seconds: float) -> None:
        """Count the round's tokens and time."""
        self.tokens[len(requests)] += sum(lengths) + len(requests)
        self.seconds[len(requests)] += seconds

    def reached(self) -> dict[int, float]:
        """Return the tokens per second by number of sequences."""
        return {rows: self.tokens[rows] / self.seconds[rows] for rows in self.tokens}


@dataclass
class Played:
    """What requests experienced: tokens in all, seconds in all, to each first token, and between later tokens."""

    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def play(texts: Sequence[Text], arrivals: Sequence[float], rows: int, policy: Plain, *, prefill: float) -> Played:
    """Decode a text for each arrival, in order, at most `rows` at a time, as `Batch` steps.

    A step prefills a chunk of a prompt, then runs a round. A first token comes with the prompt's last chunk, without a
    round. `prefill`: seconds for each token of a prompt; 0: the prompt is in the cache, but for its last token.
    """
    costs, played, now = policy.costs, Played(), 0.0
    waiting = deque(Request(text, arrival) for text, arrival in zip(texts, arrivals, strict=True))
    reading: deque[list[Any]] = deque()  # requests in prefill, each with the number of prompt tokens left
    running: list[Request] = []
    while waiting or reading or running:
        if not reading and not running:
            now = max(now, waiting[0].arrival)
        while waiting and waiting[0].arrival <= now and len(reading) + len(running) < rows:
            request = waiting.popleft()
            reading.append([request, request.text.prompt if prefill else 1])
        if reading:
            chunk = min(reading[0][1], MIN_CHUNK if running else CHUNK)
            now += max(costs.verified(1), prefill * chunk)
            reading[0][1] -= chunk
            if not reading[0][1]:
                request, _ = reading.popleft()
                played.first.append(now - request.arrival)
                _emit(request, 1, now, played)
                if request.place < len(request.text.runs):
                    running.append(request)
        if running:
            policy.begin(running, len(reading))
            lengths = policy.lengths(running)
            passes = [sum(length > d for length in lengths) for d in range(max(lengths))]
            seconds = sum(map(costs.drafted, passes)) + costs.verified(len(running) + sum(lengths))
            policy.observe(running, lengths, seconds)
            now += seconds
            played.drafted += sum(lengths)
            for request, length in zip(running, lengths, strict=True):
                _emit(request, 1 + min(request.run, length), now, played)
            running = [request for request in running if request.place < len(request.text.runs)]
    played.seconds = now
    return played


def _emit(request: Request, tokens: int, now: float, played: Played) -> None:
    """Emit tokens of a request; those of one round share the time since the round before."""
    if request.place:
        played.between += [(now - request.last) / tokens] * tokens
    request.place += tokens
    request.last = now
    played.tokens += tokens


def policies(trace: dict[str, Any]) -> dict[str, Callable[[], Plain]]:
    """A maker of each policy by its name, without the oracle."""
    costs = PassCosts(*(tuple(trace["costs"][part]) for part in PARTS))
    rounds = tuple(costs.verified(n) / costs.verified(1) for n in range(MOST_ROWS + 1))
    payoff = PayoffModel(costs.drafted(1) / costs.verified(1), rounds, AcceptanceCurve(**trace["curve"]))

    def scheduled(kind: type[BatchDraftScheduler], *, own: bool) -> Plain:
        controller = make_controller(ControllerSpec(**trace["controller"]), payoff)
        return Scheduled(costs, kind(costs, first=trace["first"]), controller, own=own)

    return {
        "plain": lambda: Plain(costs),
        "fixed 2": lambda: Fixed(costs, 2),
        "fixed 4": lambda: Fixed(costs, 4),
        "common": lambda: scheduled(CommonScheduler, own=False),
        "allocated": lambda: scheduled(BatchDraftScheduler, own=True),
    }


def compared(
    trace: dict[str, Any], texts: Sequence[Text], arrivals: Sequence[float], rows: int, *, prefill: float
) -> dict[str, Played]:
    """Return what every policy makes of the same requests; of the oracles, the fastest."""
    made = policies(trace)
    costs = made["plain"]().costs
    oracles = []
    for margin in ORACLES:
        rates: dict[int, float] = {}
        for number in (500, 500, len(texts)):  # its rates settle on a part
            oracle = Oracle(costs, rates, margin)
            played = play(texts[:number], arrivals[:number], rows, oracle, prefill=prefill)
            rates = {**rates, **oracle.reached()}
        oracles.append(played)
    found = {name: play(texts, arrivals, rows, make(), prefill=prefill) for name, make in made.items()}
    return {**found, "oracle": max(oracles, key=lambda played: played.throughput)}


def scenarios(trace: dict[str, Any], given: argparse.Namespace) -> Iterator[tuple[str, dict[str, Played]]]:
    """Yield what policies make of requests that come together, and then of requests that arrive at each load."""
    draw, recorded = random.Random(given.seed), [Text(**text) for text in trace["texts"]]
    for rows in map(int, given.sizes.split(",")):
        texts = [draw.choice(recorded) for _ in range(max(given.together, rows))]
        yield f"{rows} together", compared(trace, texts, [0.0] * len(texts), rows, prefill=0.0)
    if not given.requests:
        return
    texts = [draw.choice(recorded) for _ in range(given.requests)]
    costs, prefill = policies(trace)["plain"]().costs, trace["costs"]["prefill"]
    part = texts[: 25 * given.rows]
    capacity = len(part) / play(part, [0.0] * len(part), given.rows, Plain(costs), prefill=prefill).seconds
    for load in map(float, given.loads.split(",")):
        arrivals = list(accumulate(draw.expovariate(load * capacity) for _ in texts))
        name = f"{load:g} of {capacity:.2f} requests/s, {given.rows} rows"
        yield name, compared(trace, texts, arrivals, given.rows, prefill=prefill)


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of the values, in milliseconds."""
    ordered = sorted(values)
    return 1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]


HEADER = ("requests", "policy", "tokens/s", "over plain", "drafted a token", "regret")
HEADER += ("TTFT p50, ms", "p95", "between tokens p50, ms", "p95")


def lines(name: str, found: dict[str, Played]) -> Iterator[str]:
    """Yield a line of the table for each policy."""
    plain, best = found["plain"].throughput, found["oracle"].throughput
    for policy, played in found.items():
        speed = played.throughput
        cells = [name, policy, f"{speed:.1f}", f"{speed / plain:.2f}", f"{played.drafted / played.tokens:.2f}"]
        cells += [f"{1 - speed / best:.1%}"]
        cells += [f"{quantile(of, q):.0f}" for of in (played.first, played.between) for q in (0.5, 0.95)]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Record or play."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording, costing = commands.add_parser("record"), commands.add_parser("costs")
    for parts in recording, costing:
        parts.add_argument("--model", default="smollm2-135m")
        parts.add_argument("--profile", default="auto")
        parts.add_argument("--threads", type=int, default=2)
        parts.add_argument("--out", type=Path, required=True)
    recording.add_argument("--prompts", required=True)
    recording.add_argument("--chat", action="store_true")
    recording.add_argument("--num-prompts", type=int, default=40)
    recording.add_argument("--new-tokens", type=int, default=64)
    costing.add_argument("--rows", type=int, default=32)
    costing.add_argument("--repeats", type=int, default=2)
    playing = commands.add_parser("play")
    playing.add_argument("trace", type=Path)
    playing.add_argument("costs", type=Path)
    playing.add_argument("--sizes", default="1,2,4,8,16,32")
    playing.add_argument("--together", type=int, default=40, help="requests that come together, and as many as rows")
    playing.add_argument("--loads", default="0.5,0.9,1.2")
    playing.add_argument("--requests", type=int, default=1000, help="that arrive by chance at each load; may be 0")
    playing.add_argument("--rows", type=int, default=8, help="the most sequences of a round while requests arrive")
    playing.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.command != "play":
        found = record(given) if given.command == "record" else measure_costs(given)
        given.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
        return
    trace, costs = (json.loads(file.read_text(encoding="utf-8")) for file in (given.trace, given.costs))
    trace["costs"] = costs
    print(f"{costs['model']}, {costs['machine']}, {costs['threads']} threads; predicted, not measured\n")
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for name, found in scenarios(trace, given):
        print("\n".join(lines(name, found)), flush=True)


if __name__ == "__main__":
    main()
