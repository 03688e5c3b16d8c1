"""Several prompts, one call: their generations in the order of the prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from selfspec.basics.errors import SelfspecError
from selfspec.llm.batch import Batch, Profiled
from selfspec.llm.options import ManyOptions, Options
from selfspec.llm.request import Request
from selfspec.llm.stream import Generation
from selfspec.text.prompt import Prompt


def generate_many(llm: Profiled, prompts: Sequence[Prompt], options: ManyOptions) -> list[Generation]:
    """Continue several prompts together, each as `generate` would continue it alone; in their order.

    Greedy text, and text with a seed, is each one's own: what is decoded beside it does not matter. At most
    `batch_size` are decoded at a time, and who ends is followed at once by the next; `memory` GiB hold their keys and
    values, and what prompts begin with together is read once. How much is drafted follows from what rounds of so many
    were measured to take, down to nothing. `ended` is called with the number and the generation of each prompt as it
    ends. Other options are those of `generate`.

    Raises `SelfspecError` for a wrong option and, before anything is decoded, for a prompt that cannot be; for one that
    fails later when all others have ended.
    """
    if options.batch_size < 1:
        raise SelfspecError(f"batch_size {options.batch_size}: expected at least 1")
    for number, prompt in enumerate(prompts):
        with of_prompt(number):
            llm.plan(prompt, options)
    found: dict[int, Generation] = {}
    failed = list[SelfspecError]()
    with Batch(llm, rows=max(1, min(options.batch_size, len(prompts))), memory=options.memory) as batch:
        for number, request in decoded(batch, enumerate(prompts), options, probabilities=options.probabilities):
            found[number] = request.result
            if request.error is not None:
                failed.append(SelfspecError(f"prompt {number + 1}: {request.error}"))
            elif options.ended is not None:
                options.ended(number, found[number])
    if failed:
        raise failed[0]
    return [found[number] for number in range(len(prompts))]


def decoded(
    batch: Batch, prompts: Iterable[tuple[int, Prompt]], options: Options, *, probabilities: bool = False
) -> Iterator[tuple[int, Request]]:
    """Prompts, each with its number, decoded by a batch; each as it ends. No more are made out than soon have a turn.

    Raises `SelfspecError` for one that cannot be.
    """
    numbers: dict[Request, int] = {}
    left = iter(prompts)
    while True:
        while len(batch.waiting) < batch.rows and (one := next(left, None)) is not None:
            with of_prompt(one[0]):
                numbers[batch.add(one[1], options, probabilities=probabilities)] = one[0]
        if batch.idle:
            return
        for request in batch.step():
            if request.done:
                yield numbers.pop(request), request


@contextmanager
def of_prompt(number: int) -> Iterator[None]:
    """What is wrong with it names the prompt, counted from 1."""
    try:
        yield
    except SelfspecError as error:
        raise SelfspecError(f"prompt {number + 1}: {error}") from error
