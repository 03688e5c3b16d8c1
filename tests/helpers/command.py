"""`selfspec` in a process of its own, in which something happens at a given point, however processes are scheduled.

`python command.py EVENT:N ARGUMENTS...`, with EVENT one of

- `together`: a search waits after each of its first N trials until another worker has made as many;
- `killed`: a search is killed (-9) when it has said what it scores next and N trials are known;
- `interrupted`: a search gets Ctrl-C at that point;
- `killed-text`, `interrupted-text`: a generation is killed, or gets Ctrl-C, at its Nth token, all texts counted;
- `chunks`: prompts are read N tokens at a time, as long ones are;
- `killed-fit`, `interrupted-fit`: a training is killed, or gets Ctrl-C, at its Nth step.

Costs are told, not measured.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

from selfspec.search import prepare
from selfspec.search.ledger import Ledger

from selfspec.cli import main
from selfspec.engine import engine
from selfspec.text.detokenizer import TextStream
from selfspec.training.learner import Learner
from selfspec.types.costs import CostModel

COSTS = CostModel(
    context=60, base=1e-4, attention=4e-5, mlp=4e-5, widths=[1, 2, 8], verify=[1.3e-3, 1.35e-3, 1.5e-3], round=4e-5
)


def together(n: int) -> None:
    """Wait for the other worker."""
    keep_score = Ledger.keep_score

    def keep_and_wait(self, *args, **options):
        keep_score(self, *args, **options)
        mine = sum(entry.worker == self.worker for entry in self.entries)
        given_up = time.monotonic() + 300  # the other has failed
        while sum(entry.worker != self.worker for entry in self.entries) < min(mine, n):
            assert time.monotonic() < given_up
            time.sleep(0.02)
            self.refresh()

    Ledger.keep_score = keep_and_wait


def sent(signal_number: signal.Signals) -> Callable[[int], None]:
    """Get a signal while a search scores."""

    def at(n: int) -> None:
        claim = Ledger.claim

        def claim_and_end(self, skip):
            claim(self, skip)
            if skip is not None and len(self.entries) >= n:
                os.kill(os.getpid(), signal_number)

        Ledger.claim = claim_and_end

    return at


def sent_at_call(kind: type, name: str, signal_number: signal.Signals) -> Callable[[int], None]:
    """Get a signal at the nth call of a method, all objects counted."""

    def at(n: int) -> None:
        method, calls = getattr(kind, name), itertools.count(1)

        def called(*args):
            if next(calls) == n:
                os.kill(os.getpid(), signal_number)
            return method(*args)

        setattr(kind, name, called)

    return at


def chunks(n: int) -> None:
    """Read prompts in chunks of n tokens."""
    engine.PROMPT_CHUNK = n


sent_to_text = partial(sent_at_call, TextStream, "push")
sent_to_fit = partial(sent_at_call, Learner, "loss")
EVENTS = {
    "together": together,
    "chunks": chunks,
    "killed": sent(signal.SIGKILL),
    "interrupted": sent(signal.SIGINT),
    "killed-text": sent_to_text(signal.SIGKILL),
    "interrupted-text": sent_to_text(signal.SIGINT),
    "killed-fit": sent_to_fit(signal.SIGKILL),
    "interrupted-fit": sent_to_fit(signal.SIGINT),
}

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a process in the background does without
    event, _, n = sys.argv[1].partition(":")
    EVENTS[event](int(n))
    prepare.measure_costs = lambda *_, **__: COSTS
    sys.argv = ["selfspec", *sys.argv[2:]]
    main()
