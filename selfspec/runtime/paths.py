"""Draft paths compiled against one model. Knows nothing of caches and passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from selfspec.basics.errors import SelfspecError
from selfspec.facts.draft_path import DraftPath
from selfspec.model.families.base import Attention, Mlp
from selfspec.model.linears import Call
from selfspec.model.skeleton import Skeleton


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CompiledPath:
    """A draft path of one model: for each layer its number, its device, and its attention and MLP; None: bypassed."""

    blocks: tuple[tuple[int, torch.device, Attention | None, Mlp | None], ...]
    head: Call


class Paths:
    """The compiled paths of one model, each made once and kept as long as somebody holds it."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton
        self._paths: WeakValueDictionary[DraftPath, CompiledPath] = WeakValueDictionary()
        self._heads: WeakValueDictionary[tuple[int, ...], Any] = WeakValueDictionary()

    def get(self, path: DraftPath) -> CompiledPath:
        """A path, compiled. Raises `SelfspecError` as `Runtime.compile` does."""
        found = self._paths.get(path)
        if found is None:
            blocks, layers = self._skeleton.blocks, len(self._skeleton.blocks)
            skipped = path.skip.bits(layers)
            runs = tuple(
                (i, block.device, *block.running(attention=not skipped[i], mlp=not skipped[layers + i]))
                for i, block in enumerate(blocks)
            )
            head = self._skeleton.head if path.vocabulary is None else self._head_over(path.vocabulary)
            found = self._paths[path] = CompiledPath(runs, head)
        return found

    @torch.no_grad()
    def _head_over(self, tokens: tuple[int, ...]) -> Call:
        """A head that computes the logits of these tokens only; the others' are -inf."""
        vocabulary = self._skeleton.identity.vocabulary or 0
        if max(tokens) >= vocabulary:
            raise SelfspecError(f"a draft vocabulary is of one or more different tokens from 0 to {vocabulary - 1}")
        head = self._heads.get(tokens) or self._skeleton.head_over(tokens)
        if head is None:
            raise SelfspecError("a draft vocabulary needs the head's own weight; draft with the whole head")
        self._heads[tokens] = head
        return head
