"""Training of a draft path's adapter: a trainable path over the model's modules, into which the model is distilled.

Only the updates are trained. Gradients pass straight through the rounding (Bengio et al. 1308.3432).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.heads import head_rows
from selfspec.draft_modules.module_files import PartFile, path_part
from selfspec.models.families.base import SubLayer
from selfspec.models.linears import Group
from selfspec.models.low_precision import Bits, is_quantizable, quantize
from selfspec.models.quantized_sublayers import Bridge, Trained, Update
from selfspec.runtime.base import Runtime
from selfspec.runtime.compiled_path import BITS
from selfspec.training.options import Loss
from selfspec.training.texts import LastLogits, TrainingText
from selfspec.types.draft_path import DraftPath, Mode

SMALL = 0.02  # standard deviation of the initial `down`; `up` starts at 0


class _StepCache:
    """A KV cache for attention: the model's keys and values `[B, H, n, d]`, then those of each draft step."""

    def __init__(self, of_model: Mapping[int, tuple[Tensor, Tensor]] | None = None) -> None:
        self.cached = {layer: [pair] for layer, pair in (of_model or {}).items()}

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the keys and values of a pass to a layer; return all keys and values of the layer."""
        pairs = self.cached.setdefault(layer, [])
        pairs.append((keys, values))
        k, v = zip(*pairs, strict=True)
        return torch.cat([each.to(keys.dtype) for each in k], 2), torch.cat([each.to(values.dtype) for each in v], 2)


class _ZeroSubLayer(nn.Module):
    """The replacement of a skipped sub-layer, which returns zeros."""

    def __init__(self, *, returns_tuple: bool) -> None:
        """Initialise; `returns_tuple`: whether the sub-layer returns a second output."""
        super().__init__()
        self._returns_tuple = returns_tuple

    def forward(self, x: Tensor | None = None, **kwargs: Any) -> Any:
        nothing = torch.zeros_like(kwargs["hidden_states"] if x is None else x)
        return (nothing, None) if self._returns_tuple else nothing


class _UpdatedGroup:
    """A group of quantised linears with a trainable low-rank update."""

    def __init__(self, group: Group, bits: Bits, update: nn.ParameterDict) -> None:
        self._bits, self._update = bits, update
        self._weights = [module.weight.detach() for module in group.modules]
        self._biases = [None if m.bias is None else m.bias.detach() for m in group.modules]
        self._starts = [0]
        for weight in self._weights:
            self._starts.append(self._starts[-1] + len(weight))
        self._now: list[Tensor] = []

    @torch.no_grad()
    def round(self) -> None:
        """Quantise the weights with the current update."""
        change = self._update["up"] @ self._update["down"]
        self._now = [
            quantize(weight + change[start : start + len(weight)].to(weight), self._bits).weight(weight.dtype)
            for weight, start in zip(self._weights, self._starts, strict=False)
        ]

    def product(self, number: int, x: Tensor) -> Tensor:
        """Return the output of the group's linear `number` for x; gradients ignore the rounding of weights."""
        up = self._update["up"][self._starts[number] : self._starts[number + 1]].to(x.dtype)
        through = F.linear(F.linear(x.detach(), self._update["down"].to(x.dtype)), up)
        return F.linear(x, self._now[number], self._biases[number]) + (through - through.detach())


class _UpdatedLinear(nn.Module):
    def __init__(self, group: _UpdatedGroup, number: int) -> None:
        super().__init__()
        self._group_and_number = (group, number)

    def forward(self, x: Tensor) -> Tensor:
        group, number = self._group_and_number
        return group.product(number, x)


class PathNet(nn.Module):
    """A draft path with trainable updates of rank `rank` to all its quantised sub-layers.

    `trained`: the path's bridges, and the updates from which training starts, if there are any. Raises
    `SelfspecError` if no sub-layer is quantised.
    """

    def __init__(self, runtime: Runtime, path: DraftPath, trained: Trained, *, rank: int) -> None:
        super().__init__()
        layers = runtime.layers
        modes = path.modes(layers)
        self.updates = nn.ModuleDict()
        self._by_group: dict[tuple[int, int], nn.ParameterDict] = {}
        self._changed: list[_UpdatedGroup] = []
        self._runtime, self._layers = runtime, list[nn.Module]()
        for index, layer in enumerate(runtime.skeleton.parts.layers):
            twin = copy.copy(layer.module)
            twin._modules = dict(layer.module._modules)
            parts: tuple[tuple[SubLayer, str, Mode], ...] = (
                ("attention", layer.names[0], modes[index]),
                ("mlp", layer.names[1], modes[layers + index]),
            )
            for part, name, mode in parts:
                groups = layer.groups_of(part)
                if mode == "skip":
                    twin._modules[name] = _ZeroSubLayer(returns_tuple=part == "attention" or layer.mlp_returns_tuple)
                elif mode in BITS and groups and all(is_quantizable(group.modules, BITS[mode]) for group in groups):
                    twin._modules[name] = self._with_changes(
                        groups, BITS[mode], index, layer.groups.index(groups[0]), trained, rank
                    )
            self._layers.append(twin)
        if not self._changed:
            raise SelfspecError(
                "the profile's path has no quantised sub-layers, which adapters update; expected such sub-layers"
            )
        self._bridges = {end: bridge for (_, end), bridge in trained.bridges.items()}
        self.to(runtime.device)

    def _with_changes(
        self, groups: tuple[Group, ...], bits: Bits, layer: int, first: int, trained: Trained, rank: int
    ) -> nn.Module:
        """Return a copy of an attention or MLP module whose quantised linears have trainable updates."""
        parent: nn.Module = groups[0].parent
        twin = copy.copy(parent)
        twin._modules = dict(parent._modules)
        for number, group in enumerate(groups, first):
            began = trained.updates.get((layer, number))
            inputs = group.modules[0].in_features
            outputs = sum(module.out_features for module in group.modules)
            update = nn.ParameterDict(
                {
                    "down": SMALL * torch.randn(rank, inputs) if began is None else began.down.float().clone(),
                    "up": torch.zeros(outputs, rank) if began is None else began.up.float().clone(),
                }
            )
            self.updates[f"{layer} {number}"] = self._by_group[layer, number] = update
            self._changed.append(_UpdatedGroup(group, bits, update))
            for place, name in enumerate(group.names):
                twin._modules[name] = _UpdatedLinear(self._changed[-1], place)
        return twin

    def trained(self) -> dict[tuple[int, int], Update]:
        """Return the current updates, by layer and group number."""
        return {key: Update(update["down"].detach(), update["up"].detach()) for key, update in self._by_group.items()}

    def round(self) -> None:
        """Quantise all weights with their current updates: before passes, and after each training step."""
        for changed in self._changed:
            changed.round()

    @torch.no_grad()
    def model(self, ids: Tensor) -> tuple[dict[int, tuple[Tensor, Tensor]], Tensor]:
        """Return the model's keys and values for `ids` `[B, n]`, by layer, and its last layer's output `[B, n, D]`."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        keys = _StepCache()
        x = self._run_layers(
            [layer.module for layer in self._runtime.skeleton.parts.layers],
            self._runtime.skeleton.embed(ids),
            keys,
            positions <= positions.unsqueeze(1),
        )
        return {layer: pairs[0] for layer, pairs in keys.cached.items()}, x

    def forward(self, ids: Tensor, of_model: Mapping[int, tuple[Tensor, Tensor]], depth: int) -> list[Tensor]:
        """Return the draft path's last hidden states `[B, n, D]` at each of `depth` draft steps.

        At step k, the token at t attends to the model's keys (`of_model`) of tokens before t - k, then to the draft
        path's keys. The draft's earlier tokens are taken from the text, as a wrong token ends the accepted draft.
        """
        n = ids.shape[1]
        positions = torch.arange(n, device=ids.device)
        keys, visible, out = _StepCache(of_model), list[Tensor](), []
        embedded = self._runtime.skeleton.embed(ids)
        for k in range(depth):
            behind = [positions == positions.unsqueeze(1) - k + i for i in range(k + 1)]
            visible = [positions < positions.unsqueeze(1) - k, *behind]
            out.append(self._run_layers(self._layers, embedded, keys, torch.cat(visible, 1), self._bridges))
        return out

    def _run_layers(
        self,
        layers: list[nn.Module],
        x: Tensor,
        keys: _StepCache,
        visible: Tensor,
        bridges: Mapping[int, Bridge] | None = None,
    ) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        parts = self._runtime.skeleton.parts
        masks = {
            attention_spec: _mask(visible, attention_spec.window, x.dtype) for attention_spec in parts.attention_specs
        }
        for index, (layer, layer_parts) in enumerate(zip(layers, parts.layers, strict=True), 1):
            assert layer_parts.rotary is not None
            output: Any = layer(
                x,
                attention_mask=masks[parts.attention_specs[layer_parts.attention_spec]],
                position_ids=positions,
                use_cache=True,
                position_embeddings=layer_parts.rotary(x, positions),
                **{_cache_name(layer): keys},
            )
            x = output[0] if isinstance(output, tuple) else output
            if bridges and (bridge := bridges.get(index)) is not None:
                x = x + _crossed(bridge, x)
        return x


def _mask(visible: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the additive mask `[1, 1, n, S]`; S is a multiple of n, as the keys of n tokens repeat for each step."""
    n, keys = visible.shape
    if window is not None:
        positions = torch.arange(n, device=visible.device)
        visible = visible & (positions.repeat(keys // n) > positions.unsqueeze(1) - window)
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)
    return mask[None, None]


def _cache_name(layer: nn.Module) -> str:
    """Return a decoder layer's argument name for the KV cache."""
    return "layer_past" if "layer_past" in inspect.signature(layer.forward).parameters else "past_key_values"


def _crossed(bridge: Bridge, x: Tensor) -> Tensor:
    read = x if bridge.into is None else F.linear(x, quantize(bridge.into, 8).weight(x.dtype))
    return F.linear(read, quantize(bridge.onto, 8).weight(x.dtype), bridge.bias.to(x.dtype))


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
        """Return the loss of a batch of B windows of n tokens: a scalar with gradients for the adapter.

        It is the divergence of `LOSSES` between the model's and the path's next-token distributions, in nats (`tv`:
        without unit), averaged over all positions and summed over `depth` draft steps; step k has weight 0.8^k.
        """
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
        """Return, for each of `places` draft positions, the share of drafts that match the text up to and including it.

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
