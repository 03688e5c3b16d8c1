"""Bridges (linear maps in place of skipped layers), fitted by ridge regression, first to last (ReplaceMe, 2505.02819).

Each bridge maps the draft's hidden states before a run of skipped layers to the target's hidden states after the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.models.quantized_sublayers import Bridge, Trained
from selfspec.runtime.base import Runtime
from selfspec.runtime.compiled_path import CompiledPath
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.training.texts import TrainingText
from selfspec.types.draft_path import DraftPath

_NUMBERS = count()  # of the bridges that were registered while others are fitted
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # in units of the inputs' mean variance; held-out error selects one


@dataclass(slots=True)
class _Moments:
    """Sums over positions, in float64: of inputs x, of differences y, and of the products of x with x and with y."""

    count: int
    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor

    @classmethod
    def from_width(cls, width: int) -> _Moments:
        zeros = torch.zeros(width, dtype=torch.float64)
        square = torch.zeros(width, width, dtype=torch.float64)
        return cls(0, zeros, zeros.clone(), square, square.clone())

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add n positions with inputs `x` and differences `y`, each `[n, D]`."""
        x, y = x.double().cpu(), y.double().cpu()
        self.count += len(x)
        self.x += x.sum(0)
        self.y += y.sum(0)
        self.xx += x.t() @ x
        self.xy += x.t() @ y

    def about(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean products of x with x, and of x with y, after subtracting the means `x` and `y` `[D]`."""
        n = self.count
        mean_x, mean_y = self.x / n, self.y / n
        between = torch.outer(mean_x, x), torch.outer(mean_x, y) + torch.outer(x, mean_y)
        return (
            self.xx / n - between[0] - between[0].t() + torch.outer(x, x),
            self.xy / n - between[1] + torch.outer(x, y),
        )


def drafted(
    runtime: Runtime,
    compiled: CompiledPath,
    tokens: Tensor,
    *,
    of_model: Sequence[int] = (),
    of_draft: Sequence[int] = (),
    logits: Literal["all"] | None = "all",
) -> tuple[ForwardOutput, ForwardOutput]:
    """Run the model and a draft path at each of `tokens` `[n]`, and return both outputs.

    `of_model` and `of_draft`: which hidden states to return, numbered as in `ForwardOutput.hidden`. At each token the
    draft attends to the model's keys and values of all earlier tokens, as the first token of every draft does.
    """
    n = len(tokens)
    tokens = tokens.to(runtime.device).unsqueeze(0)
    positions = torch.arange(n, device=runtime.device)
    mask = torch.cat((positions < positions.unsqueeze(1), positions == positions.unsqueeze(1)), 1)
    positions = positions.unsqueeze(0)
    with runtime.session(2 * n):
        model_output = runtime.forward(tokens, 0, hidden=of_model, logits=logits)
        own = runtime.forward(
            tokens,
            positions,
            slots=positions + n,
            mask=mask.unsqueeze(0),
            path=compiled,
            hidden=of_draft,
            logits=logits,
        )
    return model_output, own


def fit_bridges(
    runtime: Runtime,
    path: DraftPath,
    texts: Sequence[TrainingText],
    held_out_texts: Sequence[TrainingText],
    *,
    began: Trained | None = None,
    rank: int | None = None,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Trained:
    """Fit a bridge over each run of layers that `path` skips whole; `rank` limits the rank of the bridges.

    Returns the bridges and `began`, the bridges and updates that the path already has. `on_progress` receives the
    number of finished bridges. Raises `SelfspecError` for a rank above the hidden size.
    """
    width = runtime.skeleton.sizes.hidden
    if rank is not None and rank > width:
        raise SelfspecError(f"rank {rank}: expected at most {width}, the hidden size of the model")
    trained = began or Trained()
    for number, (first, end) in enumerate(path.runs(runtime.layers)):
        name = f"bridges under way {next(_NUMBERS)}"
        runtime.register_trained(name, trained)
        compiled = runtime.compile(replace(path, trained=name))
        train, held_out = (_moments(runtime, compiled, split, first, end) for split in (texts, held_out_texts or texts))
        runtime.unregister_trained(name)
        trained = replace(trained, bridges={**trained.bridges, (first, end): _bridge(train, held_out, rank)})
        on_progress(number + 1)
    return trained


def _moments(runtime: Runtime, compiled: CompiledPath, texts: Sequence[TrainingText], first: int, end: int) -> _Moments:
    moments = _Moments.from_width(runtime.skeleton.sizes.hidden)
    for text in texts:
        model_output, own = drafted(runtime, compiled, text.tokens, of_model=[end], of_draft=[first], logits=None)
        x = own.hidden[first][0]
        moments.add(x, model_output.hidden[end][0] - x)
    return moments


def _bridge(train: _Moments, held_out: _Moments, rank: int | None) -> Bridge:
    """Return the least-squares bridge, with the ridge penalty of `RIDGES` that has the lowest held-out error."""
    x, y = train.x / train.count, train.y / train.count
    xx, xy = train.about(x, y)
    held_xx, held_xy = held_out.about(x, y)
    variance = xx.diagonal().mean()
    eye = torch.eye(len(x), dtype=torch.float64)

    def fitted(ridge: float) -> Tensor:
        solution = torch.linalg.solve(xx + ridge * variance * eye, xy)
        return solution if rank is None else _low_rank(solution, xx, rank)[2]

    def error(candidate: Tensor) -> float:  # up to a constant that does not depend on the map
        return float((candidate * (held_xx @ candidate)).sum() - 2 * (candidate * held_xy).sum())

    weight = min((fitted(ridge) for ridge in RIDGES), key=error)
    bias = y - x @ weight
    if rank is None:
        return Bridge(None, weight.t().float().contiguous(), bias.float())
    into, onto, _ = _low_rank(weight, xx, rank)
    return Bridge(into.float().contiguous(), onto.float().contiguous(), bias.float())


def _low_rank(weight: Tensor, xx: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best rank-`rank` approximation of a map `[D, D]` (x @ map): both factors, and their product.

    Reduced-rank regression (Izenman 1975): a projection onto the principal directions of the fitted values.
    """
    directions = torch.linalg.eigh(weight.t() @ xx @ weight).eigenvectors[:, -rank:]
    into = (weight @ directions).t()
    return into, directions, into.t() @ directions.t()


def agreement(runtime: Runtime, path: DraftPath, texts: Sequence[TrainingText]) -> tuple[float, float]:
    """Return the share of answer positions where a path's most likely token is the model's, and the mean overlap.

    The overlap of the path's and the model's distributions is the sum over tokens of the smaller probability.
    """
    compiled, right, shared, places = runtime.compile(path), 0.0, 0.0, 0
    for text in texts:
        model_output, own = drafted(runtime, compiled, text.tokens)
        assert model_output.logits is not None
        assert own.logits is not None
        model, draft = model_output.logits[0, text.answer - 1 :].float(), own.logits[0, text.answer - 1 :].float()
        right += float((model.argmax(-1) == draft.argmax(-1)).sum())
        shared += float(torch.minimum(model.softmax(-1), draft.softmax(-1)).sum())
        places += len(model)
    return right / max(places, 1), shared / max(places, 1)
