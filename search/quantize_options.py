"""The options of `selfspec quantize`, written once. Imports no torch; annotations are kept as values."""

import math
from dataclasses import dataclass
from typing import Annotated

from selfspec.basics.errors import SelfspecError
from selfspec.basics.option import Option
from selfspec.types.methods import INT4_CHOICES, INT4_GROUP_SIZES


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """How weights are quantised to int4. Raises `SelfspecError` for a value out of range.

    `method`: one of `METHODS`, or "auto": GPTQ. `group`: inputs that share a scale and a zero point. `texts`: the
    number of prompts that the model continues, by at most `max_new_tokens` tokens each, sampled at `temperature`.
    `minutes`: the time limit of continuing (None: unlimited).
    """

    method: Annotated[
        str, Option(flags=("--int4",), metavar="METHOD", help="Quantiser: nearest, weighted, or gptq (auto).")
    ] = "auto"
    group: Annotated[int, Option(metavar="N", help="Inputs that share a scale and a zero point: 64 or 32.")] = 64
    texts: Annotated[
        int, Option(flags=("--num-prompts",), min=1, metavar="N", help="Number of prompts that the model continues.")
    ] = 64
    max_new_tokens: Annotated[
        int, Option(flags=("--max-new-tokens", "-n"), min=1, metavar="N", help="New tokens of each text.")
    ] = 192
    temperature: Annotated[float, Option(min=0, metavar="X", help="Sampling temperature of the texts.")] = 0.8
    minutes: Annotated[float | None, Option(min=0, metavar="X", help="Time limit of continuing the prompts.")] = None
    seed: Annotated[int, Option(min=0, max=2**32 - 1, metavar="N", help="Random seed of prompts and texts.")] = 0

    def __post_init__(self) -> None:
        if self.method not in INT4_CHOICES:
            raise SelfspecError(f"method '{self.method}' is not known; known: {', '.join(INT4_CHOICES)}")
        if self.group not in INT4_GROUP_SIZES:
            raise SelfspecError(f"group {self.group}: expected {' or '.join(map(str, INT4_GROUP_SIZES))}")
        if self.texts < 1 or self.max_new_tokens < 1:
            raise SelfspecError(
                f"expected at least 1 text of at least 1 token, got {self.texts} of {self.max_new_tokens}"
            )
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise SelfspecError(f"minutes {self.minutes}: expected more than 0, and finite")
        if not 0 <= self.temperature < math.inf:
            raise SelfspecError(f"temperature {self.temperature}: expected 0 or more, and finite")
