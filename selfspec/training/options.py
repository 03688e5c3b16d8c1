"""What a training can be told, written once: the command line follows from it. Imports nothing heavy.

Annotations are kept as values, for the command line.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from selfspec.basics.errors import SelfspecError
from selfspec.basics.option import Option

Kind = Literal["eagle", "medusa", "hydra", "mlp", "mtp", "chimera", "bridge", "adapter", "distill", "layerskip"]
Loss = Literal["forward-kl", "reverse-kl", "tv"]
KINDS: tuple[Kind, ...] = get_args(Kind)
OF_PATHS: tuple[Kind, ...] = ("bridge", "adapter")
"""What belongs to a draft path; `distill` and `layerskip` give models, and the other kinds are heads."""
FEWEST = 2  # texts without which nothing can be fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """`minutes` in all, of fitting alone where `texts` are counted; `max_new_tokens` of each text's answer.

    `vocabulary`: tokens that a head may draft.
    `rank` of bridges (whole when left out) and of adapters (16); `loss` of adapters and models, between the model's
    distribution and the draft's. `student`: the model to distil into, else `layers` of the model's own, a fifth of them
    when left out; after so many, drafts of `layerskip` exit. `texts` and `steps`: so many, whatever time they take;
    with both, the same call gives the same part. `rows`: texts that are decoded together. Raises `SelfspecError` for a
    value out of range.
    """

    minutes: Annotated[float, Option(help="For all of it; with --texts, for fitting alone.")] = 20.0
    max_new_tokens: Annotated[int, Option(min=16, metavar="N", help="Tokens of each answer to learn from.")] = 128
    vocabulary: Annotated[int, Option(min=16, metavar="N", help="Tokens that a head may draft.")] = 8192
    rank: Annotated[
        int | None, Option(min=1, metavar="N", help="Of bridges and adapters; bridges are whole when left out.")
    ] = None
    loss: Annotated[Loss, Option(help="Of adapters, distill and layerskip.")] = "forward-kl"
    student: Annotated[
        str | None, Option(metavar="MODEL", help="Of distill; some of the model's own layers when left out.")
    ] = None
    layers: Annotated[
        int | None,
        Option(min=1, metavar="N", help="That distill keeps, or after which layerskip exits; a fifth."),
    ] = None
    texts: Annotated[
        int | None, Option(min=FEWEST, metavar="N", help="Texts to learn from, whatever time they take.")
    ] = None
    steps: Annotated[int | None, Option(min=1, metavar="N", help="Steps of fitting, likewise.")] = None
    rows: Annotated[int, Option(min=1, metavar="N", help="Texts that are decoded together.")] = 128
    seed: Annotated[int, Option(min=0, help="Of prompts, texts and fitting.")] = 0

    def __post_init__(self) -> None:
        if not 0 < self.minutes < math.inf:
            raise SelfspecError(f"minutes {self.minutes}: expected more than 0")
        for name, least in (
            ("max_new_tokens", 16),
            ("vocabulary", 16),
            ("rows", 1),
            ("rank", 1),
            ("layers", 1),
            ("texts", FEWEST),
            ("steps", 1),
        ):
            if (value := getattr(self, name)) is not None and value < least:
                raise SelfspecError(f"{name} {value}: expected at least {least}")


def check_kind(kind: str) -> Kind:
    """The kind itself. Raises `SelfspecError` for one that is not known."""
    for known in KINDS:
        if kind == known:
            return known
    raise SelfspecError(f"kind '{kind}' of parts is not known; known: {', '.join(KINDS)}")
