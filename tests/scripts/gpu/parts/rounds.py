"""Rounds on the device (`SELFSPEC_DEVICE_ROUND=1`) beside rounds on the host: texts, and what a round takes.

The built-in model at 1 billion parameters, so that acceptance is real. Every text is decoded once beforehand, so that
what is captured is captured before the clock starts.

Texts are the host's in greedy decoding and with the rule `match`, whatever is drafted. With the rules `token` and
`block` they depend on what is drafted, which is the same with a fixed number of tokens.
"""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

from measuring import Part, synchronise
from subjects import as_on_cuda, load_widened, paths, size_cache

from selfspec import builtin
from selfspec.controllers import AdaptiveThreshold, FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.engine.engine import Engine, decode
from selfspec.proposers.base import ProposerChain
from selfspec.proposers.lookup import Lookup
from selfspec.runtime.base import Runtime
from selfspec.runtime.device_rounds import ENV_VAR
from selfspec.speculation.rules import RULES
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState

part = Part("rounds")
as_on_cuda(part)
os.environ[ENV_VAR] = "0"
llm = load_widened(part, 18)
prompt = llm.encode(builtin.prompts("heldout")[0])
os.environ[ENV_VAR] = "1"
runtimes = {"host": llm.runtime, "device": llm.runtime.with_new_cache()}
size_cache(runtimes["device"], 1024)
tokens, lengths = (8, (2,)) if part.toy else (128, (2, 4, 6, 8, 12))
few = lengths[:1] if part.toy else (4, 8)  # lengths with which trees are measured
controllers = {**{f"{k} tokens": FixedK(k) for k in lengths}, "adaptive": AdaptiveThreshold()}
TREES: dict[str, dict[str, Any]] = {
    "": {},
    "lookup": {"proposer_chain": ProposerChain([Lookup()])},
    "lookup, 2 candidates": {"proposer_chain": ProposerChain([Lookup()]), "candidates": 2},
}


class Case(NamedTuple):
    """A way to decode: the path, controller and tree of drafts; the sampling, and its verification rule."""

    drafts: str
    controller: str = ""
    tree: str = ""
    temperature: float = 0.0
    rule: str = "greedy"


SAMPLED = {rule: {"temperature": 0.8, "rule": rule} for rule in ("match", "token", "block")}
cases = [
    Case("plain"),
    *(Case(name, key) for name in ("int8", "int4") for key in controllers),
    *(Case("int4", f"{k} tokens", tree) for k in few for tree in TREES if tree),
    *(Case("plain", **SAMPLED[rule]) for rule in ("match", "token")),
    *(Case("int4", f"{few[0]} tokens", tree, **SAMPLED["match"]) for tree in TREES if tree),
    *(Case("int4", f"{few[0]} tokens", **SAMPLED[rule]) for rule in ("token", "block")),
    *(Case("int4", key, **SAMPLED["match"]) for key in controllers),
]


def decoded(where: str, case: Case) -> tuple[list[int], float, int]:
    """Return the text, and the seconds and the number of its rounds after the first, whose token the prefill brings."""
    runtime = runtimes[where]
    drafter = PlainDrafter()
    if case.drafts != "plain":
        path, controller = paths(runtime.layers)[case.drafts], controllers[case.controller].start()
        drafter = LayerSkipDrafter(runtime, path, controller, **TREES[case.tree])
    tied, seed = case.rule not in ("token", "block"), 1 if case.temperature else None
    sampler = Sampler(temperature=case.temperature, seed=seed, tied=tied)
    seq = SequenceState(list(prompt), tokens, sampler, frozenset(), rule=None if tied else RULES[case.rule])
    rounds = decode(runtime, drafter, seq)
    next(rounds)
    synchronise(part.device)
    begun = time.perf_counter()
    later = len(list(rounds))
    return seq.tokens[len(prompt) :], time.perf_counter() - begun, later


texts: dict[str, Any] = {}
compiled = [llm.runtime.compile(path) for name, path in paths(llm.runtime.layers).items() if name != "skip"]  # kept
for case in cases:
    if part.left() < 5:
        break
    with part.attempt("rounds", **case._asdict()):
        for where in runtimes:
            decoded(where, case)
            texts[where], seconds, rounds = decoded(where, case)
            part.line(
                "rounds", **case._asdict(), on=where, ms=1e3 * seconds / rounds, tokens_a_round=(tokens - 1) / rounds,
                tokens_per_second=(tokens - 1) / seconds, as_on_host=texts[where] == texts["host"],
            )  # fmt: skip


def captured(runtime: Runtime) -> dict[str, object]:
    """Return how many rounds a runtime has captured, of which lengths, and over how many cache rows."""
    keys = [key for made in runtime.device_rounds._made.values() for key in made]
    return {
        "rounds": len(keys), "lengths": str(sorted({key.length for key in keys})),
        "trees": str(sorted({(*key[:2], key.lookup or 0) for key in keys if key.lookup or key.candidates > 1})),
        "rows": str(sorted({key.batch for key in keys})),
    }  # fmt: skip


part.line("captured", sequences=1, **captured(runtimes["device"]))


def decoded_together(where: str, count: int, name: str, temperature: float) -> tuple[list[list[int]], float, int]:
    """Return the texts of sequences that end one after the other, and the seconds and the number of their rounds."""
    runtime = runtimes[where]
    drafter = PlainDrafter()
    if name != "plain":
        drafter = LayerSkipDrafter(runtime, paths(runtime.layers)[name], FixedK(2 if part.toy else 4))
    samplers = [Sampler(temperature=temperature, seed=1 + i if temperature else None) for i in range(count)]
    seqs = [SequenceState(list(prompt), tokens - i, each, frozenset()) for i, each in enumerate(samplers)]
    with Engine(runtime, drafter) as engine:
        for seq in seqs:
            engine.join(seq)
        engine.step()  # the first tokens, which the prefills bring
        synchronise(part.device)
        begun, rounds = time.perf_counter(), 0
        while engine.running:
            engine.step()
            rounds += 1
        return [seq.tokens[len(prompt) :] for seq in seqs], time.perf_counter() - begun, rounds


for count in (3,) if part.toy else (2, 3, 5, 8):
    if part.left() < 10:
        break
    runtimes.clear()
    for where, on in (("host", "0"), ("device", "1")):
        os.environ[ENV_VAR] = on
        runtimes[where] = llm.runtime.with_new_cache(rows=count)
        size_cache(runtimes[where], 1024)
    for temperature in (0.0, 0.8):
        for name in ("plain", "int4"):
            about = {"sequences": count, "drafts": name, "temperature": temperature}
            with part.attempt("together", **about):
                for where in runtimes:
                    decoded_together(where, count, name, temperature)
                    texts[where], seconds, rounds = decoded_together(where, count, name, temperature)
                    part.line(
                        "together", **about, on=where, ms=1e3 * seconds / rounds,
                        tokens_per_second=sum(len(text) - 1 for text in texts[where]) / seconds,
                        as_on_host=texts[where] == texts["host"],
                    )  # fmt: skip
    part.line("captured", sequences=count, **captured(runtimes["device"]))
