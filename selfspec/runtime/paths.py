"""Draft paths compiled against one model. Knows nothing of caches and passes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch

from selfspec.basics.errors import SelfspecError
from selfspec.facts.draft_path import DraftPath, Mode
from selfspec.model.families.base import Attention, Mlp, SubLayer
from selfspec.model.linears import Call
from selfspec.model.low_precision import Bits
from selfspec.model.skeleton import Skeleton

BITS: dict[Mode, Bits] = {"int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Made:
    """A sub-layer or a head that holds weights of its own, and the bytes of them."""

    runs: Any
    bytes: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CompiledPath:
    """A draft path of one model: for each layer its number, its device, and its attention and MLP; None: bypassed.

    `bytes`: memory held beside the model. `in_full`: what could not be had in few bits, and runs in full (attention or
    mlp with the layer's number, head).
    """

    blocks: tuple[tuple[int, torch.device, Attention | None, Mlp | None], ...]
    head: Call
    bytes: int = 0
    in_full: tuple[str, ...] = ()
    held: tuple[_Made, ...] = field(default=(), repr=False)


class Paths:
    """The compiled paths of one model, and what they hold of its weights, each made once and kept while it is used."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton
        self._paths: WeakValueDictionary[DraftPath, CompiledPath] = WeakValueDictionary()
        self._made: WeakValueDictionary[Hashable, _Made] = WeakValueDictionary()

    def get(self, path: DraftPath) -> CompiledPath:
        """A path, compiled. Raises `SelfspecError` as `Runtime.compile` does."""
        found = self._paths.get(path)
        if found is None:
            found = self._paths[path] = self._compiled(path)
        return found

    def held(self, part: str, index: int, mode: Mode) -> int | None:
        """Bytes that a layer's attention or MLP, or the head, takes in a mode; None where it cannot be had."""
        if mode not in BITS:
            return 0
        lowered = self._skeleton.lowered
        if part == "head":
            return lowered.head_bytes(BITS[mode])
        return lowered.bytes(index, "attention" if part == "attention" else "mlp", BITS[mode])

    def bytes(self, path: DraftPath) -> int:
        """Memory that a path takes beside the model once it is compiled."""
        layers = len(self._skeleton.blocks)
        modes = path.modes(layers)
        parts = [("attention" if i < layers else "mlp", i % layers, mode) for i, mode in enumerate(modes)]
        total = sum(self.held(*part) or 0 for part in parts)
        sizes, words = self._skeleton.sizes, self._skeleton.identity.vocabulary or 1
        head = self.held("head", 0, path.head) if path.head in BITS else None
        if path.vocabulary is None:
            return total + (head or 0)
        share = len(path.vocabulary) / words
        return total + round(share * (words * sizes.hidden * sizes.dtype.itemsize if head is None else head))

    @torch.no_grad()
    def _compiled(self, path: DraftPath) -> CompiledPath:
        blocks, layers = self._skeleton.blocks, len(self._skeleton.blocks)
        modes = path.modes(layers)
        held: list[_Made] = []
        in_full: list[str] = []

        def lowered(i: int, part: SubLayer, mode: Mode) -> Any:
            if mode not in BITS:
                return None
            made = self._sublayer(i, part, BITS[mode])
            if made is None:
                in_full.append(f"{part} {i}")
                return None
            held.append(made)
            return made.runs

        runs = []
        for i, block in enumerate(blocks):
            of_attention, of_mlp = modes[i], modes[layers + i]
            block = block.with_(lowered(i, "attention", of_attention), lowered(i, "mlp", of_mlp))
            runs.append((i, block.device, *block.running(attention=of_attention != "skip", mlp=of_mlp != "skip")))
        head = self._skeleton.head
        if path.vocabulary is not None or path.head != "full":
            made = self._head(path.vocabulary, path.head)
            if made is None and path.vocabulary is None:
                in_full.append("head")
            elif made is None:
                raise SelfspecError("a draft vocabulary needs the head's own weight; draft with the whole head")
            else:
                held.append(made)
                head = made.runs
        return CompiledPath(tuple(runs), head, sum(m.bytes for m in held), tuple(in_full), tuple(held))

    def _sublayer(self, index: int, part: SubLayer, bits: Bits) -> _Made | None:
        key = (index, part, bits)
        made = self._made.get(key)
        if made is None and (found := self._skeleton.lowered.sublayer(index, part, bits)) is not None:
            made = self._made[key] = _Made(*found)
        return made

    def _head(self, tokens: tuple[int, ...] | None, mode: Mode) -> _Made | None:
        """A head, over these tokens only where they are named: the others' logits are -inf."""
        vocabulary = self._skeleton.identity.vocabulary or 0
        if tokens is not None and max(tokens) >= vocabulary:
            raise SelfspecError(f"a draft vocabulary is of one or more different tokens from 0 to {vocabulary - 1}")
        key = ("head", tokens, mode)
        made = self._made.get(key)
        if made is None and mode in BITS:
            found = self._skeleton.lowered.head(BITS[mode], tokens)
            made = None if found is None else _Made(*found)
        if made is None and tokens is not None:
            head = self._skeleton.head_over(tokens)
            sizes = self._skeleton.sizes
            made = None if head is None else _Made(head, len(tokens) * sizes.hidden * sizes.dtype.itemsize)
        if made is not None:
            self._made[key] = made
        return made
