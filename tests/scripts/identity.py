"""Speculation equals plain decoding token for token in float64: a million tokens of random cases.

    python tests/scripts/identity.py --out tests/scripts/identity.json
    python tests/scripts/identity.py --out tests/scripts/identity.json --minutes 5

A case is drawn from its number: a model (the built-in one, SmolLM2, a tiny one of each family), a drafter (draft paths
that skip, in int8, int4 and mixed; controllers, candidates, lookup; draft heads, alone and below a path; the drafters
that need no path), and how it decodes: one text alone, a batch whose sequences join and leave at random and of which
some begin alike, so that rows take over what others hold, or a conversation whose turns find their prefix cached.
Greedy texts are compared with plain greedy texts, seeded texts of rule `match` with plain texts of the same seed.

`--out` has what all cases counted, and which are done. The next run adds to it: interrupt it at any time; without that
file it begins anew. Exit code 1 when any token differs, 3 while tokens are missing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import torch
from families import FAMILY_CONFIGS
from heads import random_head
from models import tiny

import selfspec
from selfspec import builtin, drafters
from selfspec.basics.files import write_text
from selfspec.controllers import AdaptiveThreshold, Controller, FixedK, RateOptimal, StaticThreshold
from selfspec.draft_modules.registry import HEADS
from selfspec.drafters.head_drafter import HeadBelow, HeadDrafter
from selfspec.engine.block_scheduler import WORTH_COPYING
from selfspec.engine.engine import Engine
from selfspec.models.low_precision import fake
from selfspec.proposers.base import ProposerChain
from selfspec.proposers.lookup import Lookup
from selfspec.runtime.base import Runtime
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.drafter import Drafter
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.acceptance import PROBABILITY, Confidence, PayoffModel
from selfspec.types.draft_path import MODES, DraftPath

ROWS = 4
GOALS = {  # tokens, by model and rule
    ("builtin", "greedy"): 300_000,
    ("smollm2-135m", "greedy"): 20_000,
    ("families", "greedy"): 680_000,
    ("builtin", "match"): 100_000,
    ("families", "match"): 100_000,
}
CASES_A_TURN = {"builtin": 24, "smollm2-135m": 2, "families": 72}  # of each goal that is not met
PRICES = (1.0, 1.1, 1.2, 1.3)
HOWS = ("alone", "batch", "conversation")
PATHS = {"skip": ("full", "skip"), "int8": ("int8",), "int4": ("int4",), "mixed": MODES}


class Case(NamedTuple):
    """A case: its model, its rule, and its number, from which all else is drawn."""

    model: str
    rule: str
    number: int


class Target(NamedTuple):
    """A model with one row and with several, its prompts, and how many tokens its texts have."""

    alone: Runtime
    rows: Runtime
    prompts: list[list[int]]
    room: int


@cache
def target(name: str) -> Target:
    """The runtimes of a model: `builtin`, `smollm2-135m` or a family's name."""
    if name in FAMILY_CONFIGS:
        model, draw = tiny(FAMILY_CONFIGS[name]), random.Random(name)
        prompts = [draw.choices(range(61), k=draw.randrange(1, 20)) for _ in range(40)]
        return Target(LeanRuntime(model, kernel=fake), LeanRuntime(model, rows=ROWS, kernel=fake), prompts, 60)
    llm = selfspec.load(name, profile="none", dtype="float64")
    texts = builtin.prompts("heldout")
    prompts = [llm.encode(text) for text in (texts if name == "builtin" else texts[:40])]
    return Target(llm.runtime, llm.runtime.with_new_cache(rows=ROWS), prompts, 48 if name == "builtin" else 32)


def controller(draw: random.Random) -> Controller:
    """A controller with random options."""
    return draw.choice(
        [
            lambda: FixedK(draw.randrange(1, 9)),
            lambda: StaticThreshold(draw.uniform(0.05, 0.9), draw.randrange(1, 9)),
            lambda: AdaptiveThreshold(k_max=draw.randrange(1, 9)),
            lambda: RateOptimal(floor=0.05, payoff=PayoffModel(draw.uniform(0.05, 0.5))),
        ]
    )()


def path(draw: random.Random, layers: int, vocabulary: int) -> tuple[str, DraftPath]:
    """A random draft path, and its kind."""
    kind = draw.choice(list(PATHS))
    modes = draw.choices(PATHS[kind], k=2 * layers)
    head = draw.choice(["full", "int8", "int4"]) if kind == "mixed" else kind if kind != "skip" else "full"
    words = tuple(sorted(draw.sample(range(vocabulary), vocabulary * 9 // 10))) if draw.random() < 0.2 else None
    return kind, DraftPath.from_modes(modes, head=head, vocabulary=words)


def drafter(draw: random.Random, runtime: Runtime) -> tuple[str, Drafter]:
    """A random drafter, and its name."""
    vocabulary, layers = runtime.skeleton.identity.vocabulary or 0, runtime.layers
    words = tuple(range(min(vocabulary, 400) - 1))

    def along(*, below: bool = False) -> tuple[str, Drafter]:
        kind, drawn = path(draw, layers, vocabulary)
        lookup = draw.random() < 0.4
        head = draw.choice(["eagle", "mtp"]) if below else None
        made = drafters.LayerSkipDrafter(
            runtime,
            drawn,
            controller(draw),
            candidates=draw.randrange(1, 5),
            confidence=Confidence(bias=0.2, probability=0.4, gap=0.8) if draw.random() < 0.3 else PROBABILITY,
            proposer_chain=ProposerChain([Lookup()], PRICES) if lookup else None,
            below=None if head is None else HeadBelow(random_head(runtime, words, head), (1.0,) * 5, 0.01),
        )
        return f"{kind} path{', lookup' if lookup else ''}{f', {head} below' if head else ''}", made

    def head() -> tuple[str, Drafter]:
        kind = draw.choice(sorted(HEADS))
        return f"{kind} head", HeadDrafter(
            random_head(runtime, words, kind), controller(draw), candidates=draw.randrange(1, 4)
        )

    def free() -> tuple[str, Drafter]:
        makers = {
            "lookup": lambda: drafters.LookupDrafter([Lookup()], controller(draw)),
            "recycle": lambda: drafters.RecycleDrafter(controller(draw), candidates=draw.randrange(1, 4)),
            "input": lambda: drafters.InputDrafter(controller(draw)),
            "jacobi": lambda: drafters.JacobiDrafter(draw.choice(["jacobi", "gauss-seidel", "hybrid"])),
            "lookahead": lambda: drafters.LookaheadDrafter(window=3, ngram=3, guesses=2),
            "swift": lambda: drafters.SwiftDrafter(runtime, controller(draw), window=6, every=1, candidates=2),
            "clasp": lambda: drafters.ClaspDrafter(runtime, controller(draw), skip=layers - 1, every=1),
            "merged": lambda: drafters.MergedDrafter(
                [along()[1], drafters.LookupDrafter([Lookup()], controller(draw)), head()[1]]
            ),
        }
        name = draw.choice(list(makers))
        return name, makers[name]()

    chosen = draw.choices([along, lambda: along(below=True), head, free], [6, 1, 1, 2])[0]
    return chosen()


def sequences(draw: random.Random, at: Target, rule: str, texts: int) -> list[tuple[list[int], int, int | None]]:
    """Prompts, rooms and seeds of the case's texts."""
    return [
        (list(draw.choice(at.prompts)), draw.randrange(at.room // 2, at.room + 1), draw.randrange(2**32))
        if rule == "match"
        else (list(draw.choice(at.prompts)), draw.randrange(at.room // 2, at.room + 1), None)
        for _ in range(texts)
    ]


def opened_alike(draw: random.Random, texts: Sequence[Any]) -> list[tuple[list[int], int, int | None]]:
    """The texts, half of them with the same opening, which is longer than what is worth copying from another row."""
    opening = [token for prompt, _, _ in texts for token in prompt][: WORTH_COPYING + 8]
    return [([*opening, *prompt] if draw.random() < 0.5 else prompt, room, seed) for prompt, room, seed in texts]


def state(runtime: Runtime, prompt: Sequence[int], room: int, seed: int | None) -> SequenceState:
    """A sequence of its own."""
    sampler = Sampler() if seed is None else Sampler(temperature=0.9, top_p=0.95, seed=seed)
    return SequenceState(list(prompt), room, sampler, runtime.skeleton.ends)


def alone(runtime: Runtime, drafting: Drafter, prompt: Sequence[int], room: int, seed: int | None) -> list[int]:
    """The new tokens of one text, with what an earlier one left in the cache."""
    seq = state(runtime, prompt, room, seed)
    with Engine(runtime, drafting, reuse=True) as engine:
        engine.join(seq)
        while seq.remaining:
            engine.step()
    return seq.tokens[len(prompt) :]


def conversation(runtime: Runtime, drafting: Drafter, turns: Sequence[Any]) -> list[list[int]]:
    """Each turn's new tokens: its prompt is all before it, and a message."""
    text, found = list[int](), []
    for prompt, room, seed in turns:
        text += prompt
        found.append(alone(runtime, drafting, text, room, seed))
        text += found[-1]
    return found


@cache
def greedily(name: str, prompt: tuple[int, ...]) -> list[int]:
    """Plain greedy decoding of a prompt, as long as a text may be."""
    at = target(name)
    return alone(at.alone, drafters.PlainDrafter(), prompt, at.room, None)


def plainly(name: str, prompt: Sequence[int], room: int, seed: int | None) -> list[int]:
    """The new tokens of plain decoding."""
    if seed is None:
        return greedily(name, tuple(prompt))[:room]
    return alone(target(name).alone, drafters.PlainDrafter(), prompt, room, seed)


def batch(
    draw: random.Random, runtime: Runtime, drafting: Drafter, texts: Sequence[Any]
) -> list[tuple[list[int], bool]]:
    """The new tokens of texts that join a batch at random; and whether the text left early, as some do."""
    seqs = [state(runtime, *text) for text in texts]
    waiting, left = list(seqs), set[SequenceState]()
    with Engine(runtime, drafting, reuse=True) as engine:
        while waiting or engine.running:
            while waiting and len(engine.running) < runtime.rows and (draw.random() < 0.6 or not engine.running):
                engine.join(waiting.pop(0))
            engine.step()
            if engine.running and draw.random() < 0.02:
                left.add(leaving := draw.choice(engine.running))
                engine.leave(leaving)
    return [(seq.tokens[len(prompt) :], seq in left) for seq, (prompt, _, _) in zip(seqs, texts, strict=True)]


def run(case: Case) -> dict[str, Any]:
    """Decode a case with drafts and plainly, and count the tokens that differ."""
    torch.set_num_threads(1)
    draw = random.Random(repr(tuple(case)))
    name = draw.choice(list(FAMILY_CONFIGS)) if case.model == "families" else case.model
    at, how = target(name), draw.choice(HOWS)
    runtime = at.rows if how == "batch" else at.alone
    named, drafting = drafter(draw, runtime)
    texts = sequences(draw, at, case.rule, {"batch": 6, "alone": 4, "conversation": 2}[how])
    if how == "conversation":
        room = (runtime.skeleton.context - sum(len(prompt) for prompt, _, _ in texts)) // len(texts)
        texts = [(prompt, min(new, room), seed) for prompt, new, seed in texts]
        found, expected = (conversation(runtime, each, texts) for each in (drafting, drafters.PlainDrafter()))
    elif how == "batch":
        texts = opened_alike(draw, texts)
        together = batch(draw, runtime, drafting, texts)
        found, expected = [new for new, _ in together], [plainly(name, *text) for text in texts]
        expected = [all_[: len(new)] if left else all_ for all_, (new, left) in zip(expected, together, strict=True)]
    else:
        found = [alone(runtime, drafting, *text) for text in texts]
        expected = [plainly(name, *text) for text in texts]
    different = sum(
        max(len(a), len(b))
        - next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in zip(found, expected, strict=True)
    )
    tokens = sum(map(len, expected))
    return {**case._asdict(), "family": name, "how": how, "drafter": named, "tokens": tokens, "different": different}


class Proof:
    """The tokens compared so far, the cases that are done, and the file `out` that stores both after every case.

    `tables`: tokens and differing tokens, by each of `TABLES`. `commits`: tokens by the commit that decoded them.
    `wrong`: the cases with differing tokens. `done`: the numbers of the cases that are done, by model and rule.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        known = json.loads(out.read_text()) if out.exists() else {}
        self.wrong: list[dict[str, Any]] = known.get("wrong", [])
        self.commits = Counter[str](known.get("commits", {}))
        self.tables: dict[str, dict[str, dict[str, int]]] = {name: known.get(name, {}) for name in TABLES}
        self.done = {key: numbers(known.get("done", {}).get(", ".join(key), "")) for key in GOALS}
        self.commit = commit()

    @property
    def tokens(self) -> int:
        """The tokens compared."""
        return self.commits.total()

    @property
    def different(self) -> int:
        """The tokens that differ."""
        return sum(total["different"] for total in self.tables["goals"].values())

    def add(self, line: dict[str, Any]) -> None:
        """Add a case that has ended, and write the file."""
        self.done[line["model"], line["rule"]].add(line["number"])
        self.commits[self.commit] += line["tokens"]
        self.wrong += [line] if line["different"] else []
        for name, fields in TABLES.items():
            total = self.tables[name].setdefault(", ".join(line[field] for field in fields), dict.fromkeys(COUNTED, 0))
            for key in COUNTED:
                total[key] += line[key]
        write_text(self.out, json.dumps(self.as_dict(), indent=1) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """Return the contents of the file."""
        return {
            "claim": "float64: token for token what plain decoding gives",
            "tokens": self.tokens,
            "different": self.different,
            "wrong": self.wrong,
            "commits": self.commits,
            "torch": torch.__version__,
            **{name: dict(sorted(table.items())) for name, table in self.tables.items()},
            "done": {", ".join(key): ranges(ended) for key, ended in self.done.items()},
        }

    def missing(self) -> Iterator[Case]:
        """The next cases of every goal that is not met."""
        for key, goal in GOALS.items():
            if self.tables["goals"].get(", ".join(key), {}).get("tokens", 0) < goal:
                left = (number for number in count() if number not in self.done[key])
                yield from (Case(*key, number) for number in islice(left, CASES_A_TURN[key[0]]))


def numbers(text: str) -> set[int]:
    """The numbers that `ranges` wrote."""
    pairs = (part.partition("-") for part in text.split(",") if part)
    return {number for low, _, high in pairs for number in range(int(low), int(high or low) + 1)}


def ranges(numbers: set[int]) -> str:
    """Numbers as text, such as 0-4,7."""
    runs = [[*run] for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else f"{run[0][1]}" for run in runs)


def commit() -> str:
    """Return the abbreviated hash of the checked-out commit, or its tag."""
    command = ["git", "describe", "--always"]
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()


COUNTED = ("tokens", "different")
TABLES = {"goals": ("model", "rule"), "families": ("family",), "ways": ("how",), "drafters": ("drafter",)}


def main() -> None:
    """Run cases until all goals are met, and write what they counted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, help="stop after so many; run it again to go on")
    options = parser.parse_args()
    proof, begun = Proof(options.out), time.monotonic()
    ends, before = begun + 60 * options.minutes if options.minutes else float("inf"), proof.tokens
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        while (cases := list(proof.missing())) and time.monotonic() < ends:
            for line in pool.imap_unordered(run, cases):
                proof.add(line)
                if time.monotonic() > ends:
                    break
    rate = (proof.tokens - before) / (time.monotonic() - begun)
    print(f"{proof.tokens} tokens of {sum(GOALS.values())}, {proof.different} different; {rate:.0f} tokens/s")
    sys.exit(1 if proof.different else 3 if list(proof.missing()) else 0)


if __name__ == "__main__":
    main()
