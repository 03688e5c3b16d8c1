"""The options of a training, defined once; the command line is derived from them. Imports nothing heavy.

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
"""The kinds that belong to a draft path; `distill` and `layerskip` make models, and the other kinds are heads."""
PUBLISHED: tuple[Kind, ...] = ("eagle", "medusa", "hydra", "mlp")  # heads that others publish, too
MOST_SEED = 2**64 - 1  # the largest that PyTorch takes
FEWEST = 2  # the fewest texts that can be fitted to


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of a training. Raises `SelfspecError` for a value out of range.

    `minutes`: the time limit of generating texts and fitting; if `texts` is set, of fitting only. `max_new_tokens`: the
    most tokens of each generated answer. `vocabulary`: the number of tokens that a head may draft. `rank`: the rank of
    bridges (None: full) or of adapters (None: 16). `loss`: the divergence between the model's and the draft's
    distributions that adapters, `distill` and `layerskip` minimise. `student`: the model to distil into (None: a copy
    of `layers` of the model's own layers). `layers`: the layers that `distill` keeps, or after which drafts of
    `layerskip` exit (None: a fifth of the model's layers). `texts` and `steps`: fixed numbers, whatever time they take;
    if both are set, the same call trains the same module. `batch_size`: texts decoded together.
    """

    minutes: Annotated[float, Option(help="Time limit of everything; with --texts, of fitting only.")] = 20.0
    max_new_tokens: Annotated[
        int, Option(flags=("--max-new-tokens", "-n"), min=16, metavar="N", help="New tokens of each training text.")
    ] = 128
    vocabulary: Annotated[int, Option(min=16, metavar="N", help="Draft vocabulary size of a head.")] = 8192
    rank: Annotated[
        int | None, Option(min=1, metavar="N", help="Rank of bridges and adapters; bridges have full rank by default.")
    ] = None
    loss: Annotated[Loss, Option(help="Loss of adapters, distill and layerskip.")] = "forward-kl"
    student: Annotated[
        str | None, Option(metavar="MODEL", help="Student of distill; by default a subset of the model's own layers.")
    ] = None
    layers: Annotated[
        int | None,
        Option(
            min=1, metavar="N", help="Layers that distill keeps, or after which layerskip exits; a fifth by default."
        ),
    ] = None
    texts: Annotated[
        int | None, Option(min=FEWEST, metavar="N", help="Number of training texts, whatever time they take.")
    ] = None
    steps: Annotated[
        int | None, Option(min=1, metavar="N", help="Number of training steps, whatever time they take.")
    ] = None
    batch_size: Annotated[int, Option(min=1, metavar="N", help="Batch size for generating texts.")] = 128
    seed: Annotated[int, Option(min=0, help="Random seed of prompts, texts and training.")] = 0

    def __post_init__(self) -> None:
        if not 0 < self.minutes < math.inf:
            raise SelfspecError(f"minutes {self.minutes}: expected more than 0")
        if self.loss not in get_args(Loss):
            raise SelfspecError(f"loss '{self.loss}': expected {', '.join(get_args(Loss))}")
        if not 0 <= self.seed <= MOST_SEED:
            raise SelfspecError(f"seed {self.seed}: expected 0 to {MOST_SEED}")
        for name, least in (
            ("max_new_tokens", 16),
            ("vocabulary", 16),
            ("batch_size", 1),
            ("rank", 1),
            ("layers", 1),
            ("texts", FEWEST),
            ("steps", 1),
        ):
            if (value := getattr(self, name)) is not None and value < least:
                raise SelfspecError(f"{name} {value}: expected at least {least}")


def check_kind(kind: str) -> Kind:
    """Return `kind` as a `Kind`. Raises `SelfspecError` for an unknown kind."""
    for known in KINDS:
        if kind == known:
            return known
    raise SelfspecError(f"method '{kind}' cannot be trained; expected {', '.join(KINDS)}")
