"""Draft paths compiled for one model, with the additional weights that they need."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from selfspec.basics.errors import SelfspecError
from selfspec.models.families.base import Attention, Mlp, SubLayer
from selfspec.models.linears import Call
from selfspec.models.low_precision import Bits
from selfspec.models.native import batch_invariant
from selfspec.models.quantized_sublayers import Int4Weights, Run, Trained
from selfspec.models.skeleton import Skeleton
from selfspec.runtime.native_bindings import NativePass, native_pass
from selfspec.types.draft_path import DraftPath, Mode

BITS: dict[Mode, Bits] = {"int8": 8, "int4": 4}
_LONG = 2**28  # bytes of weights; quantising more than this takes long enough to warn the user
_log = logging.getLogger("selfspec")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PathModule:
    """A sub-layer, bridge or head made for draft paths, its size in bytes, and whether its weights are quantised."""

    module: Any
    bytes: int
    quantized: bool


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True, kw_only=True)
class CompiledPath:
    """A draft path compiled for one model.

    `head` maps normed hidden states to the head's output. `unquantized` names the sub-layers and heads that could not
    be quantised and run in full precision ("attention 3", "mlp 3", "head"). `resources` are the modules made for the
    path, kept alive by it. `native` runs all layers and the last norm as one native call (None: native code does not
    support them).
    """

    head: Call
    unquantized: tuple[str, ...] = ()
    resources: tuple[PathModule, ...] = field(default=(), repr=False)
    native: NativePass | None = None

    @property
    def bytes(self) -> int:
        """The memory that the path needs in addition to the model, in bytes."""
        return sum(module.bytes for module in self.resources)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True, kw_only=True)
class LeanPath(CompiledPath):
    """A draft path of a `LeanRuntime`.

    `blocks` holds each layer's number, device, attention and MLP; None stands for a skipped sub-layer.
    `batch_invariant_head` is a head whose logits of a token have the same bits in a batch of any size, or None.
    `int8_cache`: whether native passes read the KV cache's int8 copies, as all quantised drafts do.
    """

    blocks: tuple[tuple[int, torch.device, Attention | None, Mlp | None], ...]
    batch_invariant_head: Call | None = None
    int8_cache: bool = False

    @property
    def int8_layers(self) -> Sequence[int] | None:
        """The layers whose attention reads int8 copies; None if the path reads the cache itself."""
        return self.native.attention_layers if self.int8_cache and self.native is not None else None


class Quantizer(Protocol):
    """A factory of quantised sub-layers and heads: `QuantizedSublayers` or `ModuleQuantizer`."""

    def bytes(self, index: int, part: SubLayer, bits: Bits, int4: Int4Weights | None = None) -> int | None:
        """Return the bytes of a layer's quantised attention or MLP; None if it cannot be quantised to `bits`."""

    def head_bytes(self, bits: Bits) -> int | None:
        """Return the bytes that the quantised head takes; None if it cannot be quantised to `bits`."""

    def sublayer(
        self, index: int, part: SubLayer, bits: Bits, trained: Trained | None = None, int4: Int4Weights | None = None
    ) -> tuple[Any, int] | None:
        """Return a layer's quantised attention or MLP, and its bytes; None if it cannot be quantised to `bits`."""

    def head(self, bits: Bits, tokens: Sequence[int] | None) -> tuple[Any, int] | None:
        """Return the quantised head over `tokens` (None: all), and its bytes; None if it cannot be quantised."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """The quantised sub-layers of a path, and the names of those that could not be quantised ("attention 3")."""

    sublayers: Mapping[tuple[int, SubLayer], PathModule]
    unquantized: tuple[str, ...]


class PathCache(ABC):
    """A cache of the compiled paths of one model and of their weights, which are dropped once no path uses them.

    `layers` is the number of layers, `vocabulary` the number of tokens, and `head_row` the bytes of a row of the head's
    weight.
    """

    def __init__(self, quantizer: Quantizer, *, layers: int, vocabulary: int, head_row: int) -> None:
        self._quantizer, self._layers, self._vocabulary, self._head_row = quantizer, layers, vocabulary, head_row
        self._paths: WeakValueDictionary[DraftPath, CompiledPath] = WeakValueDictionary()
        self._trained: dict[str, Trained] = {}
        self._int4: dict[str, Int4Weights] = {}
        self._default_int4: str | None = None  # the int4 weights of paths that name none
        self._made: WeakValueDictionary[Hashable, PathModule] = WeakValueDictionary()

    def get(self, path: DraftPath) -> CompiledPath:
        """Return the compiled form of a draft path. Raises `SelfspecError` as `Runtime.compile` does."""
        path = self._with_int4(path)
        compiled = self._paths.get(path)
        if compiled is None:
            compiled = self._paths[path] = self._compiled(path)
        return compiled

    def register_trained(self, name: str, trained: Trained) -> None:
        """Register trained weights under the name that draft paths use; a name already registered is kept."""
        self._trained.setdefault(name, trained)

    def unregister_trained(self, name: str) -> None:
        """Unregister the trained weights of a name; compiled paths keep the weights they use."""
        self._trained.pop(name, None)

    def register_int4(self, name: str, weights: Int4Weights) -> None:
        """Register int4 weights under the name that draft paths use, in place of weights registered before."""
        self._int4[name] = weights

    @contextmanager
    def using_int4(self, name: str) -> Iterator[None]:
        """Let paths that name no int4 weights use those registered under `name`, while the context lasts."""
        before, self._default_int4 = self._default_int4, name
        try:
            yield
        finally:
            self._default_int4 = before

    def _with_int4(self, path: DraftPath) -> DraftPath:
        """Return the path with the name of the int4 weights that it uses; None if it has no int4 sub-layer."""
        name = (path.int4_weights or self._default_int4) if len(path.int4) else None
        return path if name == path.int4_weights else replace(path, int4_weights=name)

    def _int4_of(self, path: DraftPath) -> Int4Weights | None:
        name = self._with_int4(path).int4_weights
        if name is not None and name not in self._int4:
            raise SelfspecError(f"draft path: its int4 weights {name} are not loaded")
        return None if name is None else self._int4[name]

    def part_bytes(self, part: str, index: int, mode: Mode) -> int | None:
        """Return the bytes that a sub-layer or the head needs in addition in `mode`, or None if it cannot be quantised.

        `part`: "attention" or "mlp" of layer `index`, or "head". Modes without quantised weights need 0 bytes.
        """
        return self._part_bytes(part, index, mode, self._int4.get(self._default_int4 or ""))

    def _part_bytes(self, part: str, index: int, mode: Mode, int4: Int4Weights | None) -> int | None:
        if mode not in BITS:
            return 0
        if part == "head":
            return self._quantizer.head_bytes(BITS[mode])
        return self._quantizer.bytes(index, "attention" if part == "attention" else "mlp", BITS[mode], int4)

    def bytes(self, path: DraftPath) -> int:
        """Return the bytes that a compiled path needs in addition to the model, without compiling it."""
        int4 = self._int4_of(path)
        total = sum(self._part_bytes(*part, int4) or 0 for part in self._parts(path))
        head = self.part_bytes("head", 0, path.head) if path.head in BITS else None
        if path.vocabulary is None:
            return total + (head or 0)
        return total + round(
            path.share(self._vocabulary or 1) * (self._vocabulary * self._head_row if head is None else head)
        )

    @abstractmethod
    def _compiled(self, path: DraftPath) -> CompiledPath:
        """Compile a path. Raises `SelfspecError` as `Runtime.compile` does."""

    @abstractmethod
    def _head_over(self, tokens: tuple[int, ...]) -> Any | None:
        """Return a head in full precision over `tokens` alone; None if its weight cannot be read."""

    @torch.no_grad()
    def _quantized(self, path: DraftPath, trained: Trained | None) -> Quantized:
        """Return the path's quantised sub-layers."""
        int4 = self._int4_of(path)
        low = [(part, i, mode) for part, i, mode in self._parts(path) if mode in BITS]
        fresh = sum(
            self._part_bytes(*sublayer, int4) or 0
            for sublayer in low
            if self._key(sublayer[1], sublayer[0], BITS[sublayer[2]], path, trained, int4) not in self._made
        )
        if fresh > _LONG:
            _log.warning("quantising %.1f GB of weights ...", fresh / 1e9)
        each = {
            (i, part): self._sublayer(i, part, BITS[mode], path, trained, int4)
            for part, i, mode in sorted(low, key=lambda sublayer: sublayer[1])
        }
        return Quantized(
            {place: made for place, made in each.items() if made is not None},
            tuple(f"{part} {i}" for (i, part), made in each.items() if made is None),
        )

    def _parts(self, path: DraftPath) -> list[tuple[SubLayer, int, Mode]]:
        """Return (sub-layer, layer number, mode) of every sub-layer: the attentions of all layers, then the MLPs."""
        layers = self._layers
        modes = path.modes(layers)
        attention: list[tuple[SubLayer, int, Mode]] = [("attention", i, modes[i]) for i in range(layers)]
        return attention + [("mlp", i, modes[layers + i]) for i in range(layers)]

    def _trained_of(self, path: DraftPath) -> Trained | None:
        if path.trained is not None and path.trained not in self._trained:
            raise SelfspecError(f"draft path: its trained weights {path.trained} are not loaded")
        return None if path.trained is None else self._trained[path.trained]

    @staticmethod
    def _key(
        index: int, part: SubLayer, bits: Bits, path: DraftPath, trained: Trained | None, int4: Int4Weights | None
    ) -> tuple[Hashable, ...]:
        """Return the name of a quantised sub-layer among those that paths share."""
        key: tuple[Hashable, ...] = (index, part, bits)
        if trained is not None and any(layer == index for layer, _ in trained.updates):
            key = (*key, path.trained)
        return (*key, "int4", path.int4_weights) if int4 is not None and bits == 4 else key

    def _sublayer(
        self,
        index: int,
        part: SubLayer,
        bits: Bits,
        path: DraftPath,
        trained: Trained | None,
        int4: Int4Weights | None,
    ) -> PathModule | None:
        key = self._key(index, part, bits, path, trained, int4)
        return self._cached(key, lambda: self._quantizer.sublayer(index, part, bits, trained, int4))

    def _head(self, tokens: tuple[int, ...] | None, mode: Mode) -> PathModule | None:
        """Return a head in `mode` over the draft vocabulary `tokens` (None: all tokens).

        Returns None if the path uses the model's own head. Raises `SelfspecError` for tokens that the model does not
        have, and for a draft vocabulary if the head's weight cannot be read.
        """
        if tokens is not None and max(tokens) >= self._vocabulary:
            raise SelfspecError(f"draft vocabulary: expected different tokens from 0 to {self._vocabulary - 1}")
        made = None
        if bits := BITS.get(mode):
            made = self._cached(("head", tokens, bits), lambda: self._quantizer.head(bits, tokens))
        if made is not None or tokens is None:
            return made

        def over_tokens() -> tuple[Any, int] | None:
            head = self._head_over(tokens)
            return None if head is None else (head, len(tokens) * self._head_row)

        made = self._cached(("head", tokens), over_tokens, lower=False)
        if made is None:
            raise SelfspecError("draft vocabulary: the head's own weight cannot be read; draft with the whole head")
        return made

    def _cached(
        self, key: Hashable, make: Callable[[], tuple[Any, int] | None], *, lower: bool = True
    ) -> PathModule | None:
        """Return the module that `make` makes for this key, from a cache while any path uses it.

        `make` returns the module and its bytes, or None if the module cannot be made: then None is returned. `lower`:
        whether the module's weights are quantised.
        """
        made = self._made.get(key)
        if made is None and (result := make()) is not None:
            made = self._made[key] = PathModule(*result, lower)
        return made


class Paths(PathCache):
    """The compiled paths of a model that the lean runtime runs."""

    def __init__(self, skeleton: Skeleton, scaling: float) -> None:
        """Initialise an empty cache; native passes multiply queries by `scaling` after RoPE."""
        sizes = skeleton.sizes
        super().__init__(
            skeleton.quantizer,
            layers=len(skeleton.blocks),
            vocabulary=skeleton.identity.vocabulary or 0,
            head_row=sizes.hidden * sizes.dtype.itemsize,
        )
        self._skeleton, self._scaling = skeleton, scaling

    @torch.no_grad()
    def _compiled(self, path: DraftPath) -> LeanPath:
        blocks, layers = self._skeleton.blocks, self._layers
        modes = path.modes(layers)
        trained = self._trained_of(path)
        quantized = self._quantized(path, trained)
        resources, unquantized = [*quantized.sublayers.values()], [*quantized.unquantized]

        def module(i: int, part: SubLayer) -> Any:
            made = quantized.sublayers.get((i, part))
            return None if made is None else made.module

        runs = []
        for i, block in enumerate(blocks):
            attention_mode, mlp_mode = modes[i], modes[layers + i]
            block = block.with_(module(i, "attention"), module(i, "mlp"))
            runs.append((i, block.device, *block.running(attention=attention_mode != "skip", mlp=mlp_mode != "skip")))
        for first, end in path.runs(layers):
            if (bridge := self._bridge_module((first, end), path.trained, trained)) is not None:
                resources.append(bridge)
                runs[end - 1] = (end - 1, blocks[end - 1].device, None, bridge.module)
        head = self._head(path.vocabulary, path.head)
        if path.head in BITS and (head is None or not head.quantized):
            unquantized.append("head")
        if head is not None:
            resources.append(head)
        runs_head = self._skeleton.head if head is None else head.module
        norm = self._skeleton.norms.data(self._skeleton.parts.norm)
        native = native_pass(self._skeleton.sizes, self._scaling, runs, norm)
        return LeanPath(
            blocks=tuple(runs),
            head=runs_head,
            unquantized=tuple(unquantized),
            native=native,
            batch_invariant_head=None if native is None else batch_invariant(runs_head),
            resources=tuple(resources),
            int8_cache=path.low_precision,
        )

    def _bridge_module(self, run: Run, name: str | None, trained: Trained | None) -> PathModule | None:
        """Return the trained bridge over `run`, a run of skipped layers; None if no bridge was trained for the run."""
        if trained is None or (bridge := trained.bridges.get(run)) is None:
            return None
        return self._cached(("bridge", run, name), lambda: self._skeleton.quantizer.bridge_module(bridge))

    def _head_over(self, tokens: tuple[int, ...]) -> Call | None:
        return self._skeleton.head_over(tokens)
