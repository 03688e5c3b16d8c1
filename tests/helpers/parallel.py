"""One of several processes that share a model: `python parallel.py MODEL OUT`, as torchrun starts it.

The first writes to OUT, as JSON, what each way of decoding gave in tensor parallel and what plain decoding of the whole
model, which it holds beside it, gives: `{name: [[tokens, tokens], ...]}`. Then it kills the other, and writes what that
comes to.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from selfspec.search import find_profile

import selfspec
from selfspec.controllers import make_controller, parse_controller
from selfspec.drafters import LayerSkipDrafter
from selfspec.engine.engine import Engine
from selfspec.llm.batch import Batch
from selfspec.llm.llm import LLM
from selfspec.llm.options import Options
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.schema import Profile
from selfspec.profile.shipped import choose_profile
from selfspec.runtime.base import Runtime
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState

NEW = 16
BEGINNING = "import os\nimport sys\n\n\ndef read_header(self, stream, size=None, *, strict=False):\n"  # of several
PROMPTS = ("def main(args):\n    for arg in args:\n", f"{BEGINNING}    return", f"{BEGINNING}    x = 1\n", "class A:")
SKIP = selfspec.DraftPath.from_modes(["full", "skip", "full", "full", "skip", "full"])
FEW_BITS = selfspec.DraftPath.from_modes(["int8", "int4", "skip", "int8", "int4", "full"])
TEMPERATURES, SEED = (0.0, 0.9), 7
Pairs = list[tuple[list[int], list[int]]]


@dataclass
class Both:
    """The model that processes share, and the whole one; `plain`: what that gave."""

    shared: LLM
    whole: LLM
    plain: dict[tuple[str, float], list[int]] = field(default_factory=dict)

    def want(self, prompt: str, temperature: float = 0.0) -> list[int]:
        """Plain decoding's tokens of the whole model; with a seed where it samples."""
        if (found := self.plain.get((prompt, temperature))) is None:
            text = self.whole.generate(prompt, **how(temperature))
            found = self.plain[prompt, temperature] = text.tokens
        return found

    def path(self, path: selfspec.DraftPath, candidates: int = 1) -> Any:
        """Drafts along a path."""
        return self.shared.layer_skip(path, "fixed:k=4", candidates=candidates)

    def guard(self) -> Any:
        """The same, guarded."""
        draft = LayerSkipSpec.from_path(FEW_BITS, parse_controller("fixed:k=3"))
        return self.shared.guarded_drafter(Profile(model=self.shared.identity, draft=draft))

    def method(self, name: str) -> Any:
        """Drafts by a method's name."""
        profile = choose_profile(self.shared.identity, "none", name)
        assert profile is not None
        return self.shared.drafter_for(profile)


def controller_of(text: str) -> Any:
    """A controller, made."""
    return make_controller(parse_controller(text))


def how(temperature: float) -> dict[str, Any]:
    """The options of a text."""
    return {"max_new_tokens": NEW, "temperature": temperature, "seed": SEED if temperature else None}


def texts(both: Both, make: Callable[[Both], Any], *, temperatures: tuple[float, ...] = TEMPERATURES) -> Pairs:
    """A text of each temperature, drafted so; one token is drafted at least."""
    drafter, drafted, pairs = make(both), 0, []
    for prompt, temperature in zip(PROMPTS, temperatures, strict=False):
        found = both.shared.generate(prompt, drafter=drafter, **how(temperature))
        drafted += found.stats.drafted
        pairs.append((found.tokens, both.want(prompt, temperature)))
    assert drafted
    return pairs


def plainly(both: Both) -> Pairs:
    """Without drafts."""
    return [
        (both.shared.generate(p, **how(t)).tokens, both.want(p, t))
        for p, t in zip(PROMPTS, 2 * TEMPERATURES, strict=True)
    ]


def batch(both: Both, *, adaptive: bool) -> Pairs:
    """All prompts together, two at a time, of which two begin alike; one is cancelled."""

    def make(runtime: Runtime) -> LayerSkipDrafter:
        return LayerSkipDrafter(runtime, SKIP, controller_of("fixed:k=2"))

    with Batch(both.shared, rows=2, memory=0.001, adaptive=adaptive, make=make) as many:
        asked = [(p, t, many.add(p, Options(**how(t)))) for p, t in zip(PROMPTS, 2 * TEMPERATURES, strict=True)]
        for _ in range(4):
            many.step()
        many.cancel(many.running[0])
        while not many.idle:
            many.step()
    assert adaptive or many.counters.drafted
    return [(one.tokens, both.want(p, t)[: len(one.tokens)]) for p, t, one in asked]


def broken_off(both: Both) -> Pairs:
    """Streams that are closed at random points, each followed by a whole text."""
    draw, pairs = random.Random(3), []
    drafter = both.path(SKIP, candidates=2)
    for _ in range(4):
        prompt, temperature = draw.choice(PROMPTS), draw.choice((0.0, 0.9))
        stream = both.shared.stream(prompt, drafter=drafter, **how(temperature))
        for _ in range(draw.randrange(4)):
            next(stream, None)
        stream.close()
        got = stream.result.tokens
        pairs.append((got, both.want(prompt, temperature)[: len(got)]))
        prompt = draw.choice(PROMPTS)
        pairs.append((both.shared.generate(prompt, drafter=drafter, **how(0.0)).tokens, both.want(prompt)))
    return pairs


def joining_and_leaving(both: Both) -> Pairs:
    """Sequences that join and leave at random; what each has by then is the beginning of its text."""
    draw = random.Random(5)
    runtime = both.shared.runtime.with_new_cache(rows=3)
    drafter = LayerSkipDrafter(runtime, FEW_BITS, controller_of("fixed:k=3"), candidates=2)
    running: dict[SequenceState, tuple[str, int]] = {}
    with Engine(runtime, drafter, reuse=True) as engine:
        for _ in range(24):
            if len(engine.running) < 3 and draw.random() < 0.6:
                prompt = draw.choice(PROMPTS)
                ids = both.shared.encode(prompt)
                seq = SequenceState(list(ids), NEW, Sampler())
                running[seq] = prompt, len(ids)
                engine.join(seq)
            engine.step()
            if engine.running and draw.random() < 0.2:
                engine.leave(draw.choice(list(engine.running)))
    return [(seq.tokens[n:], both.want(prompt)[: len(seq.tokens) - n]) for seq, (prompt, n) in running.items()]


def without_a_seed(both: Both) -> Pairs:
    """Draws are the first process's alone: nothing to compare, but all is over in time."""
    found = both.shared.generate(PROMPTS[0], max_new_tokens=NEW, temperature=0.9, drafter=both.path(SKIP, 2))
    return [([len(found.tokens)], [NEW])]


WAYS: dict[str, Callable[[Both], Pairs]] = {
    "plain": plainly,
    "skip": partial(texts, make=lambda both: both.path(SKIP)),
    "few bits": partial(texts, make=lambda both: both.path(FEW_BITS)),
    "candidates": partial(texts, make=lambda both: both.path(SKIP, candidates=3)),
    "lookup": partial(texts, make=lambda both: both.method("lookup"), temperatures=(0.0,)),
    "lookahead": partial(texts, make=lambda both: both.method("lookahead")),
    "another model": partial(texts, make=lambda both: both.method(f"model:{sys.argv[1]}")),
    "guard": partial(texts, make=Both.guard),
    "batch": partial(batch, adaptive=False),
    "batch by load": partial(batch, adaptive=True),
    "broken off": broken_off,
    "joining and leaving": joining_and_leaving,
    "without a seed": without_a_seed,
}


def refused(both: Both) -> list[str]:
    """What is said of what reads whole weights."""
    said = []
    for ask in (
        lambda: find_profile(both.shared, [PROMPTS[0]]),
        lambda: both.shared.model.generate(torch.tensor([[1, 2]]), custom_generate=selfspec.hf("none")),
        lambda: both.shared.runtime.compile(selfspec.DraftPath(trained="a part")),
        lambda: both.shared.runtime.skeleton.embed(torch.tensor([[1]])),
    ):
        try:
            said.append(f"nothing: {ask()}")
        except selfspec.SelfspecError as error:
            said.append(str(error))
    return said


def lost(both: Both, other: int) -> str:
    """What it comes to when the other process is killed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # with which torchrun ends us, too
    os.kill(other, signal.SIGKILL)
    try:
        both.shared.generate(PROMPTS[0], max_new_tokens=NEW)
    except selfspec.SelfspecError as error:
        return str(error)
    return "no error"


def main(model: str, out: Path) -> None:
    torch.set_num_threads(1)
    out.with_suffix(f".{os.environ['RANK']}").write_text(str(os.getpid()))
    shared = selfspec.load(model, dtype="float64", profile="none", tensor_parallel=True)
    assert os.environ["RANK"] == "0"  # no other comes back
    both = Both(shared, selfspec.load(model, dtype="float64", profile="none"))
    found: dict[str, Any] = {}
    for name, compiled in WAYS.items():
        found[name] = compiled(both)
        print(name, flush=True)
    found["sizes"] = [shared.runtime.skeleton.sizes.heads, both.whole.runtime.skeleton.sizes.heads]
    found["refused"] = refused(both)
    found["lost"] = lost(both, int(out.with_suffix(".1").read_text()))
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
