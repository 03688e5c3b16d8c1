"""The trainer of draft heads of every kind, on texts that the model generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.draft_modules.heads import LayerShape, head_rows, make_part_file
from selfspec.draft_modules.mlp_heads import Hydra, Medusa, MlpSpeculatorNet, Steps
from selfspec.draft_modules.module_files import PartFile
from selfspec.runtime.base import Runtime
from selfspec.training.pairs import ChimeraNet, EagleNet, MtpNet
from selfspec.training.texts import LastLogits, TrainingText

LATER = 0.8  # factor on the loss of each further draft step
PLACES = 6  # draft positions with a held-out acceptance, at most


class Net(NamedTuple):
    """A draft network to train.

    `settings`: the settings of its part file. `depth`: draft steps that are trained together. `places`: draft positions
    whose acceptance is measured. `last`: whether it reads only the hidden states after the last layer, normed.
    """

    module: nn.Module
    settings: dict[str, Any]
    depth: int
    places: int
    last: bool


def _shape(runtime: Runtime) -> LayerShape:
    s = runtime.skeleton.sizes
    return LayerShape(s.hidden, s.intermediate, s.heads, s.kv_heads, s.head_dim, s.eps)


def _eagle(runtime: Runtime, streams: int) -> Net:
    shape = _shape(runtime)
    net = EagleNet(shape, layers=streams)
    net.layer.begin(*_ends_of(runtime))
    return Net(net, {"shape": asdict(shape)}, 3, PLACES, last=False)


def _mtp(runtime: Runtime, streams: int) -> Net:
    shape, places = _shape(runtime), 3
    net = MtpNet(shape, places, layers=streams)
    for layer in net.stack:
        layer.begin(*_ends_of(runtime))
    return Net(net, {"shape": asdict(shape), "places": places}, places, places, last=False)


def _chimera(runtime: Runtime, _streams: int) -> Net:
    shape, places = _shape(runtime), 4
    net = ChimeraNet(shape, places)
    net.begin(*_ends_of(runtime))
    return Net(net, {"shape": asdict(shape), "places": places}, places, places, last=True)


def _ends_of(runtime: Runtime) -> tuple[nn.Module, Tensor, float]:
    parts = runtime.skeleton.parts
    return parts.layers[-1].module, runtime.skeleton.gain, parts.formula.plus


def _steps(kind: type[Steps], places: int, **more: Any) -> Callable[[Runtime, int], Net]:
    def make(runtime: Runtime, _streams: int) -> Net:
        sizes = runtime.skeleton.sizes
        made = {"hidden": sizes.hidden, "places": places, **more}
        if kind is MlpSpeculatorNet:
            made["inner"] = sizes.hidden
        net = kind(**made)
        for parameter in net.parameters():  # heads start from the model's own next-token prediction
            if parameter.dim() > 1 and kind is not MlpSpeculatorNet:
                nn.init.normal_(parameter, 0, 0.005)
        for block in net.modules():
            short = getattr(block, "short", None)
            if short is not None:
                with torch.no_grad():
                    short.weight[:, : sizes.hidden] += torch.eye(sizes.hidden)
        return Net(net, {"net": made, "eps": sizes.eps}, places, places, last=True)

    return make


NETS: dict[str, Callable[[Runtime, int], Net]] = {
    "eagle": _eagle,
    "medusa": _steps(Medusa, 4),
    "hydra": _steps(Hydra, 4),
    "mlp": _steps(MlpSpeculatorNet, 4),
    "mtp": _mtp,
    "chimera": _chimera,
}


class Learner:
    """Trainer of a draft head of the given `kind`. `words`: the tokens of its draft vocabulary.

    `layers`: the layers whose output hidden states the texts hold; the last entry is the model's last layer. Raises
    `SelfspecError` if the weight of the model's head cannot be read.
    """

    def __init__(self, runtime: Runtime, kind: str, words: Sequence[int], layers: Sequence[int], *, seed: int) -> None:
        self.runtime, self.kind = runtime, kind
        torch.manual_seed(seed)
        self._words = torch.tensor(sorted(words), device=runtime.device)
        self._head = head_rows(runtime, self._words).detach().float()
        self._norm, self._eps = runtime.skeleton.gain.float(), runtime.skeleton.sizes.eps
        self._last = LastLogits(runtime, self._head)
        made = NETS[kind](runtime, len(layers))
        self.net, self._made = made.module.float().to(runtime.device), made
        self.depth, self.places = made.depth, made.places
        self._layers = tuple(layers[-1:] if made.last else layers)

    def loss(self, windows: Sequence[TrainingText]) -> Tensor:
        """Return the cross-entropy against the model's own distribution over the draft vocabulary.

        Windows have n + `depth` tokens each; a draft starts at each of the first n (token, hidden state) pairs.
        """
        tokens, streams = torch.stack([w.tokens for w in windows]), torch.stack([w.streams for w in windows])
        n = streams.shape[1] - self.depth
        ids, embedded, streams = self._read(tokens[:, 1:], streams)
        with torch.no_grad():
            targets = self._last(streams[:, 1:, -1]).softmax(-1)
        total = torch.zeros((), device=streams.device)
        for k, out in enumerate(self.net(ids, embedded, self._net_input(streams[:, :n]), self.depth)):
            drafted = self._last.of_normed(out).log_softmax(-1)
            total = total - LATER**k * (targets[:, k : k + n] * drafted).sum(-1).mean()
        return total

    def _read(self, tokens: Tensor, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        device = self.runtime.device
        tokens = tokens.to(device)
        return tokens, self.runtime.skeleton.embed(tokens).float(), streams.to(device).float()

    def _net_input(self, streams: Tensor) -> Tensor:
        """Return the network's input from hidden states `[B, n, layers, D]`."""
        return self._normed(streams[:, :, -1]) if self._made.last else streams.flatten(2)

    def _normed(self, streams: Tensor) -> Tensor:
        return F.rms_norm(streams, streams.shape[-1:], self._norm, self._eps)

    @torch.no_grad()
    def acceptance(self, texts: Sequence[TrainingText]) -> list[float]:
        """Return, for each draft position, the fraction of drafts that match the text up to and including it.

        A draft matches if its greedy tokens are the text's tokens. Only drafts that start in answers count.
        """
        right, all_of = torch.zeros(self.places), 0
        for text in texts:
            n = text.pairs(self.places)
            if n <= text.answer:
                continue
            ids, embedded, streams = self._read(text.tokens[None, 1 : n + self.places], text.streams[None, :n])
            so_far = torch.ones(n - text.answer, dtype=torch.bool)
            for k, out in enumerate(self.net(ids, embedded, self._net_input(streams), self.places)):
                best = self._words[self._last.of_normed(out[0]).argmax(-1)].cpu()
                so_far &= (best == text.tokens[k + 2 : k + 2 + n])[text.answer :]
                right[k] += so_far.sum()
            all_of += n - text.answer
        return (right / max(all_of, 1)).tolist()

    def part(self) -> PartFile:
        """Return the head with its current weights as a part file."""
        tensors = dict(self.net.state_dict())
        if self._made.last:
            tensors["given_norm.weight"] = self._norm
        settings = {**self._made.settings, "layers": list(self._layers)}
        return make_part_file(self.kind, settings, tensors, self._words.tolist(), self.runtime)
