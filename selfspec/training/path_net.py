"""A trainable draft path through the model's own modules: some bypassed, some quantised with a low-rank update.

Only the updates are trained. Gradients pass straight through the rounding (Bengio et al. 1308.3432).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError
from selfspec.models.families.base import SubLayer
from selfspec.models.linears import Group
from selfspec.models.low_precision import Bits, quantize, roundable
from selfspec.models.path_modules import Bridge, Trained, Update
from selfspec.runtime.compiled_path import BITS
from selfspec.runtime.forward import Runtime
from selfspec.types.draft_path import DraftPath, Mode

SMALL = 0.02  # standard deviation of the initial `down`; `up` starts at 0


class _Keys:
    """A KV cache for attention: the model's keys and values `[B, H, n, d]`, then those of each own step."""

    def __init__(self, of_model: Mapping[int, tuple[Tensor, Tensor]] | None = None) -> None:
        self.held = {layer: [pair] for layer, pair in (of_model or {}).items()}

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append a pass's keys and values to a layer; return all of the layer's."""
        held = self.held.setdefault(layer, [])
        held.append((keys, values))
        k, v = zip(*held, strict=True)
        return torch.cat([each.to(keys.dtype) for each in k], 2), torch.cat([each.to(values.dtype) for each in v], 2)


class _Nothing(nn.Module):
    """The replacement of a bypassed sub-layer, which returns zeros."""

    def __init__(self, *, beside: bool) -> None:
        """Initialise; `beside`: whether the sub-layer returns a second output."""
        super().__init__()
        self._beside = beside

    def forward(self, x: Tensor | None = None, **given: Any) -> Any:
        nothing = torch.zeros_like(given["hidden_states"] if x is None else x)
        return (nothing, None) if self._beside else nothing


class _Changed:
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
        """Return one linear's output for x. Its gradient is as if nothing had been rounded."""
        up = self._update["up"][self._starts[number] : self._starts[number + 1]].to(x.dtype)
        through = F.linear(F.linear(x.detach(), self._update["down"].to(x.dtype)), up)
        return F.linear(x, self._now[number], self._biases[number]) + (through - through.detach())


class _ChangedLinear(nn.Module):
    def __init__(self, group: _Changed, number: int) -> None:
        super().__init__()
        self._of = (group, number)

    def forward(self, x: Tensor) -> Tensor:
        group, number = self._of
        return group.product(number, x)


class PathNet(nn.Module):
    """A draft path with updates of `rank` to all its quantised sub-layers.

    Starts from the updates trained already, if any. Raises `SelfspecError` if no sub-layer is quantised.
    """

    def __init__(self, runtime: Runtime, path: DraftPath, trained: Trained, *, rank: int) -> None:
        super().__init__()
        layers = runtime.layers
        modes = path.modes(layers)
        self.updates = nn.ModuleDict()
        self._by_group: dict[tuple[int, int], nn.ParameterDict] = {}
        self._changed: list[_Changed] = []
        self._runtime, self._layers = runtime, list[nn.Module]()
        for index, layer in enumerate(runtime.skeleton.lowered.parts.layers):
            twin = copy.copy(layer.module)
            twin._modules = dict(layer.module._modules)
            parts: tuple[tuple[SubLayer, str, Mode], ...] = (
                ("attention", layer.names[0], modes[index]),
                ("mlp", layer.names[1], modes[layers + index]),
            )
            for part, name, mode in parts:
                groups = layer.groups_of(part)
                if mode == "skip":
                    twin._modules[name] = _Nothing(beside=part == "attention" or layer.beside)
                elif mode in BITS and groups and all(roundable(group.modules, BITS[mode]) for group in groups):
                    twin._modules[name] = self._with_changes(
                        groups, BITS[mode], index, layer.groups.index(groups[0]), trained, rank
                    )
            self._layers.append(twin)
        if not self._changed:
            raise SelfspecError(
                "the profile's path runs nothing in few bits, which adapters change; expected one that does"
            )
        self._bridges = {end: bridge for (_, end), bridge in trained.bridges.items()}
        self.to(runtime.device)

    def _with_changes(
        self, groups: tuple[Group, ...], bits: Bits, layer: int, first: int, trained: Trained, rank: int
    ) -> nn.Module:
        """Return a copy of the attention or MLP module with its linears replaced."""
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
            self._changed.append(_Changed(group, bits, update))
            for place, name in enumerate(group.names):
                twin._modules[name] = _ChangedLinear(self._changed[-1], place)
        return twin

    def trained(self) -> dict[tuple[int, int], Update]:
        """Return the current updates, by layer and group number."""
        return {at: Update(update["down"].detach(), update["up"].detach()) for at, update in self._by_group.items()}

    def round(self) -> None:
        """Quantise all weights with their current updates: before passes, and after each training step."""
        for changed in self._changed:
            changed.round()

    @torch.no_grad()
    def model(self, ids: Tensor) -> tuple[dict[int, tuple[Tensor, Tensor]], Tensor]:
        """Return the model's own keys and values at `ids` `[B, n]`, by layer, and its last stream `[B, n, D]`."""
        at = torch.arange(ids.shape[1], device=ids.device)
        keys = _Keys()
        x = self._through(
            [layer.module for layer in self._runtime.skeleton.lowered.parts.layers],
            self._runtime.skeleton.embed(ids),
            keys,
            at <= at.unsqueeze(1),
        )
        return {layer: held[0] for layer, held in keys.held.items()}, x

    def forward(self, ids: Tensor, of_model: Mapping[int, tuple[Tensor, Tensor]], depth: int) -> list[Tensor]:
        """Return the draft's stream `[B, n, D]` at each of `depth` steps.

        At step k the token at t attends to the model's keys of tokens before t - k, then to the draft's own keys. The
        draft's earlier tokens are taken from the text: if one of them were wrong, the later ones would not count.
        """
        n = ids.shape[1]
        at = torch.arange(n, device=ids.device)
        keys, seen, out = _Keys(of_model), list[Tensor](), []
        embedded = self._runtime.skeleton.embed(ids)
        for k in range(depth):
            behind = [at == at.unsqueeze(1) - k + i for i in range(k + 1)]
            seen = [at < at.unsqueeze(1) - k, *behind]
            out.append(self._through(self._layers, embedded, keys, torch.cat(seen, 1), self._bridges))
        return out

    def _through(
        self,
        layers: list[nn.Module],
        x: Tensor,
        keys: _Keys,
        seen: Tensor,
        bridges: Mapping[int, Bridge] | None = None,
    ) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        parts = self._runtime.skeleton.parts
        masks = {
            attention_spec: _mask(seen, attention_spec.window, x.dtype) for attention_spec in parts.attention_specs
        }
        for index, (layer, of) in enumerate(zip(layers, parts.layers, strict=True), 1):
            assert of.rotary is not None
            given: Any = layer(
                x,
                attention_mask=masks[parts.attention_specs[of.attention_spec]],
                position_ids=at,
                use_cache=True,
                position_embeddings=of.rotary(x, at),
                **{_cache_name(layer): keys},
            )
            x = given[0] if isinstance(given, tuple) else given
            if bridges and (bridge := bridges.get(index)) is not None:
                x = x + _crossed(bridge, x)
        return x


def _mask(seen: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the additive mask `[1, 1, n, S]`; S is a multiple of n, as the keys of n tokens repeat for each step."""
    n, keys = seen.shape
    if window is not None:
        at = torch.arange(n, device=seen.device)
        seen = seen & (at.repeat(keys // n) > at.unsqueeze(1) - window)
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
    return mask[None, None]


def _cache_name(layer: nn.Module) -> str:
    """Return a decoder layer's argument name for the KV cache."""
    return "layer_past" if "layer_past" in inspect.signature(layer.forward).parameters else "past_key_values"


def _crossed(bridge: Bridge, x: Tensor) -> Tensor:
    read = x if bridge.into is None else F.linear(x, quantize(bridge.into, 8).weight(x.dtype))
    return F.linear(read, quantize(bridge.onto, 8).weight(x.dtype), bridge.bias.to(x.dtype))
