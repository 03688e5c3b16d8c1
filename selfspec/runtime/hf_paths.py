"""Draft paths compiled for a model that runs through its own forward: forwards that replace those of its modules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError
from selfspec.models.module_quantizer import ModuleQuantizer
from selfspec.models.structure import Forwards, Outline
from selfspec.runtime.compiled_path import BITS, CompiledPath, PathCache
from selfspec.runtime.module_hooks import zero_forward
from selfspec.types.draft_path import DraftPath, SkipSet


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True, kw_only=True)
class GenericPath(CompiledPath):
    """A draft path of a `GenericRuntime`.

    `forwards` run in place of modules' own forwards: those of skipped, quantised and native modules. `token_ids` `[n]`
    are the tokens of its draft vocabulary (None: all).
    """

    forwards: Forwards = field(default_factory=dict)
    token_ids: Tensor | None = None


class GenericPaths(PathCache):
    """The compiled paths of a model that runs through its own forward.

    `outputs`: the length of each sub-layer's output tuple (None: a single tensor). `unskippable`: layers whose
    attention runs even where a path skips it.
    """

    _quantizer: ModuleQuantizer

    def __init__(
        self,
        quantizer: ModuleQuantizer,
        outline: Outline,
        outputs: Mapping[nn.Module, int | None],
        *,
        unskippable: Collection[int] = (),
    ) -> None:
        sizes, identity = outline.sizes, outline.identity
        super().__init__(
            quantizer,
            layers=len(quantizer.structure.layers),
            vocabulary=identity.vocabulary or 0,
            head_row=sizes.hidden * sizes.dtype.itemsize,
        )
        self._outputs, self._device, self._full = outputs, outline.device, quantizer.full()
        self._unskippable = frozenset(unskippable)

    def get(self, path: DraftPath) -> GenericPath:
        """Return the compiled form of a draft path, as `PathCache.get` does."""
        compiled = super().get(path)
        assert isinstance(compiled, GenericPath)
        return compiled

    def skipping(self, skip: SkipSet) -> GenericPath:
        """Return a path that skips sub-layers and runs all others in full."""
        return self._path({**self._full, **self._skipped(skip)})

    def _path(self, forwards: Forwards, **options: Any) -> GenericPath:
        head = self._quantizer.head_module
        return GenericPath(head=forwards.get(head, head), forwards=forwards, **options)

    @torch.no_grad()
    def _compiled(self, path: DraftPath) -> GenericPath:
        path.check(self._layers)
        if path.trained is not None:
            raise SelfspecError(f"draft path: its trained weights {path.trained} are not supported here")
        quantized = self._quantized(path, None)
        resources, unquantized = [*quantized.sublayers.values()], [*quantized.unquantized]
        head = self._head(path.vocabulary, path.head)
        if path.head in BITS and (head is None or not head.quantized):
            unquantized.append("head")
        resources += [] if head is None else [head]
        forwards = {**self._full}
        for resource in resources:
            forwards.update(resource.module)
        return self._path(
            {**forwards, **self._skipped(path.skip)},
            unquantized=tuple(unquantized),
            resources=tuple(resources),
            token_ids=None if path.vocabulary is None else torch.tensor(path.vocabulary, device=self._device),
        )

    def _skipped(self, skip: SkipSet) -> Forwards:
        structure = self._quantizer.structure
        attention = [i for i in skip.attention if i not in self._unskippable]
        parts = [*(structure.attention[i] for i in attention), *(structure.mlp[i] for i in skip.mlp)]
        return {part: zero_forward(part, self._outputs[part]) for part in parts if part in self._outputs}

    def _head_over(self, tokens: Sequence[int]) -> Forwards:
        """Return the forward of a head over `tokens`; empty if its weight cannot be read: it computes all logits."""
        return self._quantizer.head_over(tokens) or {}
