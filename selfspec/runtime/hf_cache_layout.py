"""The layout of a `transformers` model's cache: for each layer its keys and values, indexer keys and recurrent state.

An indexer chooses the tokens that sparse attention reads (DeepSeek Sparse Attention), and has keys of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache as TheirCache,
)
from transformers.cache_utils import (
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from selfspec.runtime.cache import KVShape
from selfspec.runtime.hf_cache_view import HFCacheView, ViewedPass, is_unused

_ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)
_HYBRID = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)


class UnknownCacheError(Exception):
    """A model keeps between passes what no layer of its cache holds."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The layers of a model's cache.

    `shapes` and `devices` are those of the keys and values in the runtime's cache, one entry for each layer that has
    some, then one for each indexer. `indices` and `indexer_indices`: the entry of each layer; None if it has none.
    `fresh`: the state of each layer before the first token, see `HFCacheView`; None for a layer without state.
    """

    shapes: tuple[KVShape, ...]
    devices: tuple[torch.device, ...]
    indices: tuple[int | None, ...]
    indexer_indices: tuple[int | None, ...]
    fresh: tuple[Any, ...]

    @property
    def stateful(self) -> bool:
        """Whether any layer has a state, which cannot be cropped to fewer tokens."""
        return any(state is not None for state in self.fresh)

    @property
    def indexed(self) -> bool:
        """Whether any layer has an indexer."""
        return any(index is not None for index in self.indexer_indices)

    def mean_shape(self, layers: int) -> tuple[int, int]:
        """Return the number of KV heads, and the mean size of keys and values per head of a model of `layers` layers.

        Their product is right in the mean, so that it tells the size of a cache slot.
        """
        heads = max((shape.heads for shape in self.shapes), default=1)
        numbers = sum(shape.heads * (shape.key_dim + shape.value_dim) for shape in self.shapes)
        return heads, -(-numbers // (2 * layers * heads))

    def view(self, viewed_pass: ViewedPass, states: Sequence[Any] | None = None) -> HFCacheView:
        """Return the cache that a pass gives to the model; the pass changes `states` (None: no layer has one)."""
        states = self.fresh if states is None else states
        return HFCacheView(viewed_pass, self.indices, self.indexer_indices, states)


def new_cache(config: Any) -> DynamicCache:
    """Return an empty `transformers` cache for a model with this configuration of its decoder."""
    try:
        return DynamicCache(config=config)
    except (
        AttributeError,
        TypeError,
        ValueError,
        KeyError,
    ):  # it does not say which layers it has: they are made lazily
        return DynamicCache()


def read_layout(config: Any, filled: TheirCache, tokens: int, *, opaque: bool = False) -> CacheLayout:
    """Return the layout of the cache of a model; `filled` is its cache (`new_cache`) after a pass of `tokens` tokens.

    With `opaque` each layer that is not empty is a state, whatever it holds. Raises `UnknownCacheError` for a cache
    that the model has not filled, or with keys and values that are not `[1, heads, tokens, size]`.
    """
    if not filled.layers:
        raise UnknownCacheError("it takes no KV cache")
    empty = new_cache(config).layers or [DynamicLayer() for _ in filled.layers]
    shapes: list[KVShape] = []
    devices: list[torch.device] = []
    indices: list[int | None] = []
    fresh: list[Any] = []
    for layer, before in zip(filled.layers, empty, strict=True):
        keys = getattr(layer, "keys", None)
        slots = keys is not None and not opaque and type(layer) in (*_ATTENTION, *_HYBRID)
        indices.append(len(shapes) if slots else None)
        if slots:
            shapes.append(_shape(layer, tokens))
            devices.append(layer.keys.device)
        fresh.append(_state(layer, before, slots=slots))
    if all(index is None for index in indices) and all(state is None for state in fresh):
        raise UnknownCacheError("it takes no KV cache")
    indexers: list[int | None] = []
    for layer in filled.layers:
        keys = None if opaque else getattr(layer, "indexer_keys", None)
        indexers.append(None if keys is None else len(shapes))
        if keys is not None:
            if type(layer) is not DynamicIndexedLayer or layer.indexer_position_ids is not None or keys.dim() != 3:
                raise UnknownCacheError("its indexer keeps more than keys")
            shapes.append(KVShape(1, keys.shape[-1], 0))
            devices.append(keys.device)
    return CacheLayout(tuple(shapes), tuple(devices), tuple(indices), tuple(indexers), tuple(fresh))


def _shape(layer: Any, tokens: int) -> KVShape:
    keys, values = layer.keys, layer.values
    cropped = getattr(layer, "sliding_window", None)  # such a layer keeps fewer tokens
    for t in (keys, values):
        if not isinstance(t, Tensor) or t.dim() != 4 or len(t) != 1 or (cropped is None and t.shape[2] != tokens):
            raise UnknownCacheError("its keys and values are not tensors [1, heads, tokens, size]")
    if keys.shape[1] != values.shape[1]:
        raise UnknownCacheError("its keys and values have different numbers of heads")
    return KVShape(keys.shape[1], keys.shape[3], values.shape[3])


def _state(layer: Any, before: Any, *, slots: bool) -> Any:
    """Return the state of a layer before the first token; None if the layer keeps nothing beside keys and values."""
    if is_unused(layer) or (slots and not isinstance(layer, _HYBRID)):
        return None
    if slots:
        return LinearAttentionLayer(number_of_states=before.number_of_states)
    used = isinstance(layer, LinearAttentionCacheLayerMixin) or getattr(layer, "is_initialized", False)
    return before if used else None


def copied(states: Sequence[Any]) -> list[Any]:
    """Return copies of layers' states, for a pass that may be thrown away."""
    return [None if state is None else _copied(state) for state in states]


def _copied(state: Any) -> Any:
    other = copy.copy(state)
    other.__dict__.update({name: _cloned(value) for name, value in vars(state).items()})
    return other


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _cloned(item) for name, item in value.items()}
    return [_cloned(item) for item in value] if isinstance(value, list) else value
