"""What more texts to learn from bring: trainings of a kind, each on so many of the same texts, on the same others.

    selfspec train eagle --model smollm2-135m --texts 60 --minutes 10 --out parts-60
    selfspec train eagle --model smollm2-135m --texts 960 --minutes 10 --out parts-960
    python tests/scripts/held_out.py --model smollm2-135m --kind eagle --of 60:parts-60 --of 960:parts-960

Each training holds out every sixteenth of its texts; all are held against those of the largest, which none learnt from.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import selfspec
from selfspec.basics.machine import machine
from selfspec.training.fit import EVAL_TEXTS, _checkpoint_config, _learner
from selfspec.training.options import FEWEST, TrainOptions, check_kind
from selfspec.training.state import State, folder_of
from selfspec.training.texts import TextStore


def main() -> None:
    """A line for each training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--kind", default="eagle")
    parser.add_argument("--of", action="append", required=True, metavar="TEXTS:FOLDER")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    kind, llm = check_kind(given.kind), selfspec.load(given.model, profile="none")
    folder = folder_of(llm, None, False, TrainOptions(texts=FEWEST))
    of = [(int(count), Path(out)) for count, out in (one.split(":", 1) for one in given.of)]
    every = TextStore(folder, max(count for count, _ in of))
    unseen = [every.read(number) for number in every.numbers(held_out=True)[:EVAL_TEXTS]]
    print(f"{machine(torch.device('cpu'))}; {given.model}; {kind}; {len(unseen)} texts that none learnt from")
    for count, out in of:
        texts, options = TextStore(folder, count), TrainOptions(texts=count)
        state = State(out / f"{kind}.checkpoint", _checkpoint_config(kind, texts, options, None))
        learner = _learner(llm, kind, texts, options, None)
        state.best_into(learner)
        places, done = learner.acceptance(unseen), state.progress
        learnt = sum(len(texts.tokens(number)) for number in texts.numbers(held_out=False))
        right = ", ".join(f"{share:.1%}" for share in places)
        print(
            f"{count} texts, {learnt:,} tokens learnt from, {done.steps} steps in {done.seconds / 60:.1f} minutes: "
            f"{1 + sum(places):.2f} tokens a pass, right up to each place {right}",
            flush=True,
        )


if __name__ == "__main__":
    main()
