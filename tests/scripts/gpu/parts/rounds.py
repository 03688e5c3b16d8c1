"""Rounds on the device (`SELFSPEC_DEVICE_ROUND=1`) beside rounds on the host: texts, and what a round takes.

The built-in model at 1 billion parameters, so that acceptance is real. Every text is decoded once beforehand, so that
what is captured is captured before the clock starts.
"""

from __future__ import annotations

import os
import time

from measuring import Part, synchronise
from subjects import as_on_cuda, load_widened, paths, size_cache

from selfspec import builtin
from selfspec.controllers import AdaptiveThreshold, FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.engine.loop import decode
from selfspec.runtime.device_rounds import ENV_VAR
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState

part = Part("rounds")
as_on_cuda(part)
llm = load_widened(part, 18)
prompt = llm.encode(builtin.prompts("heldout")[0])
os.environ[ENV_VAR] = "1"
runtimes = {"host": llm.runtime, "device": llm.runtime.with_new_cache()}
size_cache(runtimes["device"], 1024)
tokens, lengths = (8, (2,)) if part.toy else (128, (2, 4, 6, 8, 12))
controllers = {**{f"{k} tokens": FixedK(k) for k in lengths}, "adaptive": AdaptiveThreshold()}
cases = [("plain", ""), *((name, key) for name in ("int8", "int4") for key in controllers)]


def decoded(where: str, name: str, controller: str, temperature: float) -> tuple[list[int], float, int]:
    """Return the text, and the seconds and the number of its rounds after the first, whose token the prefill brings."""
    runtime = runtimes[where]
    drafter = PlainDrafter()
    if name != "plain":
        drafter = LayerSkipDrafter(runtime, paths(runtime.layers)[name], controllers[controller].start())
    sampler = Sampler(temperature=temperature, seed=1 if temperature else None)
    seq = SequenceState(list(prompt), tokens, sampler, frozenset())
    rounds = decode(runtime, drafter, seq)
    next(rounds)
    synchronise(part.device)
    begun = time.perf_counter()
    later = len(list(rounds))
    return seq.tokens[len(prompt) :], time.perf_counter() - begun, later


compiled = [llm.runtime.compile(path) for name, path in paths(llm.runtime.layers).items() if name != "skip"]  # kept
for temperature in (0.0, 0.8):
    for name, controller in cases:
        if part.left() < 5:
            break
        about = {"drafts": name, "controller": controller, "temperature": temperature}
        with part.attempt("rounds", **about):
            texts = {}
            for where in runtimes:
                decoded(where, name, controller, temperature)
                texts[where], seconds, rounds = decoded(where, name, controller, temperature)
                part.line(
                    "rounds", **about, on=where, ms=1e3 * seconds / rounds, tokens_a_round=(tokens - 1) / rounds,
                    tokens_per_second=(tokens - 1) / seconds, as_on_host=texts[where] == texts["host"],
                )  # fmt: skip
made = runtimes["device"].device_rounds._made
part.line(
    "captured", rounds=sum(map(len, made.values())), lengths=str(sorted({k.length for m in made.values() for k in m}))
)
