"""Batched generation: several prompts in one call, the generations in the order of the prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from selfspec.basics.errors import SelfspecError, short
from selfspec.llm.batch import Batch, BatchModel
from selfspec.llm.options import ManyOptions, Options
from selfspec.llm.request import Request
from selfspec.llm.sampling_plan import Plan, new_tokens
from selfspec.llm.stream import Generation
from selfspec.speculation.sampling import as_integer
from selfspec.text.prompt_template import Prompt


def generate_many(llm: BatchModel, prompts: Iterable[Prompt], options: ManyOptions) -> list[Generation]:
    """Continue several prompts in a batch, each as `generate` would; return the generations in the prompts' order.

    Greedy and seeded text does not depend on the other prompts. At most `batch_size` sequences are decoded at a time
    (continuous batching: the next prompt starts as soon as a sequence has ended). `memory`: size of the KV cache in
    GiB. A prefix that several prompts share is prefilled once. Draft lengths, which may be 0, are chosen by measured
    round costs. `ended`: called with a prompt's index and generation when the generation ends. The other options are
    those of `generate`.

    Raises `SelfspecError` for a wrong option, and before anything is decoded for an invalid prompt or one that the
    context or the memory cannot hold; the message names it, such as `prompts[1]`. If a prompt fails later, the error
    is raised when all other prompts have ended.
    """
    batch_size = as_integer(options.batch_size, "batch_size", least=1)
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise SelfspecError(f"prompts: {short(prompts)}; expected several prompts, such as a list of texts")
    prompts = list(prompts)
    encoded, plans = list[list[int]](), dict[int, Plan]()
    for number, prompt in enumerate(prompts):
        with number_errors(number):
            encoded.append(llm.encode(prompt))
            if plans:  # the first prompt's plan has checked the options
                llm.check_fits(encoded[number], options)
            else:
                plans[number] = llm.plan(encoded[number], options)
    results: dict[int, Generation] = {}
    failed = list[SelfspecError]()
    rows = max(1, min(batch_size, len(prompts)))
    with Batch(llm, rows=rows, memory=options.memory, longest=longest(llm, encoded, options)) as batch:
        for number, ids in enumerate(encoded):
            with number_errors(number):
                check_memory(batch, ids, options)
        for number, request in decode_many(batch, enumerate(encoded), options, plans=plans):
            results[number] = request.result
            if request.error is not None:
                failed.append(SelfspecError(f"prompts[{number}]: {request.error}"))
            elif options.ended is not None:
                options.ended(number, results[number])
    if failed:
        raise failed[0]
    return [results[number] for number in range(len(prompts))]


def longest(llm: BatchModel, prompts: Sequence[Sequence[int]], options: Options) -> int:
    """Return the largest sum of a prompt's tokens and its maximum number of new tokens; 1 without prompts."""
    return max((len(prompt) + new_tokens(llm.model, options, len(prompt)) for prompt in prompts), default=1)


def check_memory(batch: Batch, prompt: Sequence[int], options: Options) -> None:
    """Raise `SelfspecError` if the batch's KV cache cannot hold an encoded prompt and its new tokens."""
    batch.check_fits(len(prompt), new_tokens(batch.llm.model, options, len(prompt)))


def decode_many(
    batch: Batch, prompts: Iterable[tuple[int, Prompt]], options: Options, *, plans: Mapping[int, Plan]
) -> Iterator[tuple[int, Request]]:
    """Decode numbered prompts in a batch; yield the number and the request of each prompt when the request ends.

    At most `batch.rows` encoded prompts wait at a time. `plans`: plans that have been made already, by prompt number.
    Raises `SelfspecError` for an invalid prompt.
    """
    numbers: dict[Request, int] = {}
    left = iter(prompts)
    while True:
        while len(batch.waiting) < batch.rows and (numbered := next(left, None)) is not None:
            number, prompt = numbered
            request = batch.add(prompt, options, planned=plans.get(number))
            numbers[request] = number
        if batch.idle:
            return
        for request in batch.step():
            if request.done:
                yield numbers.pop(request), request


@contextmanager
def number_errors(number: int) -> Iterator[None]:
    """Name the prompt of index `number` in any `SelfspecError` raised in this context."""
    try:
        yield
    except SelfspecError as error:
        raise SelfspecError(f"prompts[{number}]: {error}") from error
