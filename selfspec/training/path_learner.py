"""Training of a draft path's adapter: distillation of the model into the path, on texts that the model generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from selfspec.draft_modules.heads import head_rows
from selfspec.draft_modules.module_files import PartFile
from selfspec.draft_modules.path_files import path_part
from selfspec.models.path_modules import Trained
from selfspec.runtime.base import Runtime
from selfspec.training.last_logits import LastLogits
from selfspec.training.options import Loss
from selfspec.training.path_net import PathNet
from selfspec.training.texts import TrainingText
from selfspec.types.draft_path import DraftPath

DEPTH = 2  # draft steps that are trained together: the second step reads the keys of the first
PLACES = 6  # draft positions with a held-out acceptance
LATER = 0.8  # factor on the loss of each further draft step


def _forward(log_p: Tensor, log_q: Tensor) -> Tensor:
    return log_p.exp() * (log_p - log_q)


def _reverse(log_p: Tensor, log_q: Tensor) -> Tensor:
    return log_q.exp() * (log_q - log_p)


def _variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    return 0.5 * (log_p.exp() - log_q.exp()).abs()


LOSSES: dict[Loss, Callable[[Tensor, Tensor], Tensor]] = {
    "forward-kl": _forward,
    "reverse-kl": _reverse,
    "tv": _variation,
}
"""Divergences of the model's distribution p and the draft's q, as terms for each token, from their logarithms.

Total variation ("tv") is one minus the acceptance probability of a sampled token.
"""


class PathLearner:
    """Trainer of a draft path's adapter. Raises `SelfspecError` as `PathNet` and `head_rows` do.

    `trained`: the bridges and updates that the path already has.
    """

    depth, places = DEPTH, PLACES

    def __init__(
        self, runtime: Runtime, path: DraftPath, trained: Trained, *, rank: int, loss: Loss, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.runtime, self._began = runtime, trained
        self.net = PathNet(runtime, path, trained, rank=rank)
        self._settings = {"rank": rank, "loss": loss}
        self._loss = LOSSES[loss]
        words = torch.arange(runtime.skeleton.identity.vocabulary or 0, device=runtime.device)
        self._logits = LastLogits(runtime, head_rows(runtime, words).float())

    def loss(self, windows: Sequence[TrainingText]) -> Tensor:
        """Return the divergence between the path's and the model's distributions, over windows of one length."""
        ids = torch.stack([window.tokens for window in windows]).to(self.runtime.device)
        keys, stream = self.net.model(ids)
        log_p = self._logits(stream).log_softmax(-1)
        self.net.round()
        total = torch.zeros((), device=ids.device)
        for k, out in enumerate(self.net(ids, keys, self.depth)):
            log_q = self._logits(out[:, k:]).log_softmax(-1)
            total = total + LATER**k * self._loss(log_p[:, k:], log_q).sum(-1).mean()
        return total

    @torch.no_grad()
    def acceptance(self, texts: Sequence[TrainingText]) -> list[float]:
        """Return, for each draft position, the fraction of drafts that match the text up to and including it.

        A draft matches if its greedy tokens are the text's tokens. Only drafts that start in answers count.
        """
        self.net.round()
        right, all_of = torch.zeros(self.places), 0
        for text in texts:
            starts = len(text.tokens) - self.places - (text.answer - 1)
            if starts < 1:
                continue
            ids = text.tokens[None].to(self.runtime.device)
            keys, _ = self.net.model(ids)
            so_far = torch.ones(starts, dtype=torch.bool)
            for k, out in enumerate(self.net(ids, keys, self.places)):
                span = slice(text.answer - 1 + k, text.answer - 1 + k + starts)
                so_far &= self._logits(out[0, span]).argmax(-1).cpu() == text.tokens[span.start + 1 : span.stop + 1]
                right[k] += so_far.sum()
            all_of += starts
        return (right / max(all_of, 1)).tolist()

    def trained(self) -> Trained:
        """Return the path's bridges, and its updates with the current weights."""
        return replace(self._began, updates={**self._began.updates, **self.net.trained()})

    def part(self) -> PartFile:
        """Return the path's bridges and current updates as a part file."""
        return path_part("adapter", self._settings, self.trained(), self.runtime)
