"""Unknown keyword arguments: a `TypeError` that says what other libraries' names are called here."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

# Names in vLLM, transformers, the OpenAI API and llama.cpp, and the arguments that mean the same here.
RENAMED = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "generation_config": "config",
    "text": "prompt",
    "inputs": "prompt",
    "input_ids": "prompt",
    "torch_dtype": "dtype",
    "model_name": "model",
    "model_id": "model",
    "pretrained_model_name_or_path": "model",
}
EXPLAINED = {
    "prompts": "several prompts are for generate_many",
    "batch_size": "several prompts are for generate_many",
    "messages": "messages are for chat",
    "do_sample": "a temperature above 0 samples, and 0 is greedy",
    "sampling_params": "its fields are arguments here, such as temperature=0.8",
    "stream": "stream(prompt) yields the text in pieces",
    "streamer": "stream(prompt) yields the text in pieces",
    "device_map": "for a model larger than one device: device=selfspec.DeviceMap()",
    "tensor_parallel_size": "tensor_parallel=True in each process that torchrun starts",
}
P = ParamSpec("P")
R = TypeVar("R")


def with_keyword_hints(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, whose `TypeError` for an unknown keyword argument says what was probably meant."""
    known = inspect.signature(function).parameters

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        check_keywords(function.__name__, known, kwargs)
        return function(*args, **kwargs)

    return call


def check_keywords(function: str, known: Collection[str], given: Iterable[str]) -> None:
    """Raise `TypeError`, with a hint where there is one, for the first given keyword that is not known."""
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'{_hint(name, known)}")


def _hint(name: str, known: Collection[str]) -> str:
    if RENAMED.get(name) in known:
        return f"; did you mean {RENAMED[name]}?"
    if name in EXPLAINED:
        return f"; {EXPLAINED[name]}"
    if near := difflib.get_close_matches(name, known, 1, cutoff=0.7):
        return f"; did you mean {near[0]}?"
    if "settings" in known and _is_setting(name):
        return f"; a field of transformers' GenerationConfig is given as settings={{'{name}': ...}}"
    return ""


def _is_setting(name: str) -> bool:
    from transformers import GenerationConfig

    return not name.startswith("_") and name in vars(GenerationConfig())
