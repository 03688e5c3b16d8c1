"""Batched generation: several prompts in one call, the generations in the order of the prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from selfspec.basics.errors import SelfspecError
from selfspec.llm.batch import Batch, BatchModel
from selfspec.llm.options import ManyOptions, Options
from selfspec.llm.request import Request
from selfspec.llm.sampling_plan import Plan
from selfspec.llm.stream import Generation
from selfspec.text.prompt import Prompt


def generate_many(llm: BatchModel, prompts: Sequence[Prompt], options: ManyOptions) -> list[Generation]:
    """Continue several prompts in a batch, each as `generate` would; return the generations in the prompts' order.

    Greedy and seeded text does not depend on the other prompts. At most `batch_size` sequences are decoded at a time
    (continuous batching: the next prompt follows as soon as one ends). `memory` GiB hold the KV cache, and common
    prefixes of prompts are read once. Draft lengths follow from measured round costs, down to no drafts. `ended` is
    called with the index and the generation of each prompt as it ends. Other options are those of `generate`.

    Raises `SelfspecError` for a wrong option, and before decoding for an invalid prompt. If a prompt fails later, the
    error is raised when all other prompts have ended.
    """
    if options.batch_size < 1:
        raise SelfspecError(f"batch_size {options.batch_size}: expected at least 1")
    encoded = []
    for number, prompt in enumerate(prompts):
        with number_errors(number):
            encoded.append(llm.encode(prompt))
    first = check_prompts(llm, encoded, options)
    results: dict[int, Generation] = {}
    failed = list[SelfspecError]()
    with Batch(llm, rows=max(1, min(options.batch_size, len(prompts))), memory=options.memory) as batch:
        for number, request in decode_many(
            batch, enumerate(encoded), options, first=first, probabilities=options.probabilities
        ):
            results[number] = request.result
            if request.error is not None:
                failed.append(SelfspecError(f"prompt {number + 1}: {request.error}"))
            elif options.ended is not None:
                options.ended(number, results[number])
    if failed:
        raise failed[0]
    return [results[number] for number in range(len(prompts))]


def check_prompts(llm: BatchModel, prompts: Sequence[Sequence[int]], options: Options) -> Plan | None:
    """Raise `SelfspecError`, with the prompt's number, for wrong options and for a prompt that exceeds the context.

    The first prompt's plan, which is returned, shows whether the options are valid; of the other prompts only the
    length can be wrong. None if there is no prompt.
    """
    first = None
    for number, prompt in enumerate(prompts):
        with number_errors(number):
            if first is None:
                first = llm.plan(prompt, options)
            else:
                llm.check_fits(prompt, options)
    return first


def decode_many(
    batch: Batch,
    prompts: Iterable[tuple[int, Prompt]],
    options: Options,
    *,
    first: Plan | None = None,
    probabilities: bool = False,
) -> Iterator[tuple[int, Request]]:
    """Decode numbered prompts in a batch; yield each number and request as the request ends.

    At most `batch.rows` prompts are encoded ahead of their turn. `first`: the plan of prompt 0, if it was made already.
    Raises `SelfspecError` for an invalid prompt.
    """
    numbers: dict[Request, int] = {}
    left = iter(prompts)
    while True:
        while len(batch.waiting) < batch.rows and (numbered_prompt := next(left, None)) is not None:
            with number_errors(numbered_prompt[0]):
                planned = None if numbered_prompt[0] else first
                numbers[batch.add(numbered_prompt[1], options, planned=planned, probabilities=probabilities)] = (
                    numbered_prompt[0]
                )
        if batch.idle:
            return
        for request in batch.step():
            if request.done:
                yield numbers.pop(request), request


@contextmanager
def number_errors(number: int) -> Iterator[None]:
    """Add the prompt's number, counted from 1, to a `SelfspecError`."""
    try:
        yield
    except SelfspecError as error:
        raise SelfspecError(f"prompt {number + 1}: {error}") from error
