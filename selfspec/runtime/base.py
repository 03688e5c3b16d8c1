"""The base of runtimes: the interface, and what both kinds share: a KV cache, its sessions, and compiled paths."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.models.families.base import SubLayer
from selfspec.models.quantized_sublayers import Int4Weights, Trained
from selfspec.models.quantizers import InputMoments
from selfspec.models.structure import ModelOutline
from selfspec.runtime.attention_inputs import PassInputs
from selfspec.runtime.cache import ALL_ROWS, Cache
from selfspec.runtime.compiled_path import CompiledPath, PathCache
from selfspec.runtime.device_rounds import DeviceRounds
from selfspec.runtime.paged import BlockTables, PagedCache
from selfspec.runtime.turn_lock import TurnLock
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.tree_batch import PlacedDraft, lay_out
from selfspec.types.draft_path import DraftPath, Mode

Logits = Literal["all", "last"] | None


class Wanted(NamedTuple):
    """The outputs that a pass is asked for: `logits`, `hidden` and `between` of `Runtime.forward`."""

    logits: Logits
    hidden: Sequence[int] = ()
    between: Sequence[int] = ()


class Runtime(ABC):
    """A `transformers` model with a KV cache, ready to run in full or along draft paths.

    `rows`: the number of sequences that the cache holds. `trees`: whether drafts may be token trees. `stateful`:
    whether any layer has a state that cannot be cropped, such as a recurrent layer's. `supports_trained`: whether draft
    paths may use trained weights. `native`: whether full passes of any length are native. `pool`: the block tables of a
    paged cache, or None. `max_copy_bytes`: the most memory of a static cache's int8 copies, which native quantised
    drafts read; where they take more, drafts read the full cache. `grows`: whether the cache may be allocated larger
    than asked for, so that it need not grow soon. `skeleton`: the model's sizes, identity and modules,
    as far as they are known.

    A subclass sets `model`, `layers`, `device`, `dtype`, `skeleton` and `_paths`, and then calls `_reset`.
    """

    model: Any
    skeleton: ModelOutline
    layers: int
    device: torch.device
    dtype: torch.dtype
    rows: int
    trees = True
    stateful = False
    supports_trained = True
    native = False
    pool: BlockTables | None
    max_copy_bytes = math.inf
    grows = True
    cache: Cache | PagedCache
    turn_lock: TurnLock
    _paths: PathCache
    _of_cache: ClassVar[tuple[str, ...]] = ("cache",)  # attributes replaced together with the cache

    @abstractmethod
    def _allocate(self, slots: int) -> None:
        """Replace the cache by an empty one of at least `slots` slots per row."""

    def _reset(self, rows: int, pool: BlockTables | None = None) -> None:
        """Allocate an empty cache, and reset all state that belongs to a session."""
        self.rows, self.pool = rows, pool
        self.turn_lock = TurnLock()
        if pool is not None and not self.native:
            raise SelfspecError("paged KV cache: this model has no native passes; expected blocks=None")
        self._allocate(0)

    def _begin(self) -> None:
        """Prepare for the passes of a session."""
        self.skeleton.refresh()

    def with_new_cache(self, *, rows: int = 1, blocks: int | None = None, pool: BlockTables | None = None) -> Self:
        """Return another runtime over the same model, with its own cache for `rows` sequences.

        Both runtimes share compiled paths, so that no weight is quantised twice. `blocks`: the number of blocks of a
        new paged cache. `pool`: the pool of another paged cache, whose block tables the new cache shares. Raises
        `SelfspecError` if the model has no native passes, which alone read paged caches, and `UnsupportedModelError`
        for several rows if the model decodes one sequence at a time.
        """
        other = copy.copy(self)
        other._reset(rows, pool if blocks is None else BlockTables(blocks))
        return other

    @contextmanager
    def session(self, slots: int, *, reuse: bool | Callable[[], bool] = False) -> Iterator[bool]:
        """Lock the runtime for one caller, which needs `slots` cache slots per row; yield whether it reuses slots.

        Another thread's generation is waited for. Raises `BusyError` as `TurnLock.acquire` does.

        The cache rows are cleared first. With `reuse`, the slots that the last session committed are kept instead; a
        function is called to say so, once the runtime is locked.
        """
        self.turn_lock.acquire()
        try:
            kept = reuse() if callable(reuse) else reuse
            for row in range(0 if kept else self.rows):
                self.cache.clear(row)
            self.reserve(slots)
            self._begin()
            yield kept
        finally:
            self.turn_lock.release()

    def reserve(self, slots: int) -> None:
        """Grow the cache to at least `slots` slots per row, keeping committed slots. Call within a session.

        Raises `SelfspecError` if memory runs out, or if a paged cache has fewer slots per row. Committed slots are kept
        after an error, too.
        """
        if slots <= self.cache.slots:
            return
        if self.pool is not None:
            raise SelfspecError(f"paged KV cache: {slots} slots requested; expected at most {self.cache.slots}")
        saved = (
            {name: vars(self)[name] for name in self._of_cache if name in vars(self)}
            if any(self.cache.length)
            else None
        )
        try:
            if not self._grown(slots):
                self.grows = False  # there is no memory for more than is asked for
                self._allocate(slots)
        except BaseException as error:
            if saved is None:
                self._allocate(0)  # the runtime stays usable after any error
            else:
                vars(self).update(saved)
            if isinstance(error, RuntimeError):  # torch raises it when memory runs out
                raise SelfspecError(f"KV cache of {slots} slots per sequence: cannot be allocated ({error})") from error
            raise
        if saved is not None:
            self._static_cache.copy_from(saved["cache"])

    def _grown(self, slots: int) -> bool:
        """Replace the cache by a larger one; return False if that failed and one of no more than `slots` may fit."""
        try:
            self._allocate(slots)
        except RuntimeError:
            if not self.grows:
                raise
            return False  # beyond the handler, whose error holds what was allocated
        return True

    @property
    def _static_cache(self) -> Cache:
        """The static cache, which eager passes read. Raises `SelfspecError` if the cache is paged."""
        if isinstance(self.cache, PagedCache):
            raise SelfspecError("paged KV cache: this pass is not native; expected a native pass or a static cache")
        return self.cache

    def forward(
        self,
        tokens: Tensor,
        positions: int | Tensor,
        *,
        path: CompiledPath | None = None,
        slots: int | Tensor | None = None,
        mask: Tensor | None = None,
        rows: slice = ALL_ROWS,
        logits: Logits = "all",
        hidden: Sequence[int] = (),
        between: Sequence[int] = (),
    ) -> ForwardOutput:
        """Run `tokens` `[B, n]` through the model, or along a draft `path` that `compile` returned.

        `positions` and `slots` are `[B, n]`, or an int: consecutive numbers from the int on, the same for every row.
        `slots` defaults to the positions. `mask` `[B, n, S]` is true where a token attends to one of the first S slots;
        by default a token attends to all slots up to its own slot. Keys and values are written before they are read.
        `rows` selects B cache rows. `logits`: whether to compute logits for all tokens, only for the last token of each
        row, or for none (None). `hidden`: layers whose input hidden states are returned (the number of layers: the last
        layer's output). `between`: layers whose hidden states between attention and MLP are returned. A skipped
        sub-layer adds nothing to the residual stream and writes no keys or values.
        """
        batch, n = tokens.shape
        inputs = PassInputs(batch, n, positions, positions if slots is None else slots, mask, rows)
        return self.run_pass(tokens, inputs, path, Wanted(logits, hidden, between))

    @abstractmethod
    def run_pass(self, tokens: Tensor, inputs: PassInputs, path: CompiledPath | None, wanted: Wanted) -> ForwardOutput:
        """Run a pass as `forward` does."""

    def forward_drafts(
        self,
        placed: Sequence[PlacedDraft],
        *,
        path: CompiledPath | None = None,
        hidden: Sequence[int] = (),
        logits: bool = True,
    ) -> list[ForwardOutput]:
        """Run one pass over drafts of several sequences, one cache row each.

        Returns an output `[1, 1 + m, ..]` for each draft of m tokens: the draft's root comes first, then its tokens. On
        a native path each output is bitwise equal to the output of a pass over this draft alone. `logits`: whether to
        compute logits. `path` and `hidden` are as in `forward`.
        """
        return self.run_drafts(placed, path, Wanted("all" if logits else None, hidden))

    def run_drafts(
        self, placed: Sequence[PlacedDraft], path: CompiledPath | None, wanted: Wanted
    ) -> list[ForwardOutput]:
        """Run drafts as `forward_drafts` does: in one pass, or one after the other if drafts may not be trees.

        A model that takes no tree masks takes no batches of padded drafts either.
        """
        if len(placed) > 1 and not self.trees:
            return [output for entry in placed for output in self.run_drafts([entry], path, wanted)]
        tokens, positions, slots, mask, rows, batch_rows = lay_out(
            placed, spare=self._static_cache.spare, device=self.device
        )
        step = self.forward(
            tokens, positions, path=path, slots=slots, mask=mask, rows=rows, logits=wanted.logits, hidden=wanted.hidden
        )
        if len(placed) == 1:
            return [step]
        return [step.part(row, 1 + len(placement.draft)) for row, placement in zip(batch_rows, placed, strict=True)]

    def compile(self, path: DraftPath) -> CompiledPath:
        """Compile a draft path for `forward`; the same path is compiled only once while it is in use.

        A head over a draft vocabulary copies the vocabulary's rows of the head's weight. Raises `SelfspecError` for
        layers, tokens and trained weights that the model does not have, and for a draft vocabulary if the head's weight
        cannot be read (quantised, adapted, offloaded).
        """
        return self._paths.get(path)

    def warm_up(self, path: CompiledPath, row: int, start: int, *, hidden: Sequence[int] = ()) -> None:
        """Capture what the rounds of a sequence will run, if passes are captured and this has not been done.

        These are draft steps along `path`, and verification passes over a few tokens that return the hidden states of
        the layers `hidden`. Call within a session, before any round is timed: the sequence in cache row `row` has
        `start` committed slots, and the slots after them are overwritten.
        """
        return

    @property
    def device_rounds(self) -> DeviceRounds | None:
        """Captured rounds of the present cache; None if rounds run on the host."""
        return None

    def extra_bytes(self, path: DraftPath) -> int:
        """Return the bytes of memory that a draft path needs in addition to the model."""
        return self._paths.bytes(path)

    def part_bytes(self, part: str, index: int, mode: Mode) -> int | None:
        """Return the bytes that a sub-layer or the head needs in addition in `mode`, or None if it cannot be quantised.

        `part`: "attention" or "mlp" of layer `index`, or "head". Modes without quantised weights need 0 bytes.
        """
        return self._paths.part_bytes(part, index, mode)

    def register_trained(self, name: str, trained: Trained) -> None:
        """Register trained weights under the name that draft paths use; a name already registered is kept.

        Raises `UnsupportedModelError` if the runtime does not support trained paths.
        """
        self._paths.register_trained(name, trained)

    def unregister_trained(self, name: str) -> None:
        """Unregister the trained weights of a name; compiled paths keep the weights they use."""
        self._paths.unregister_trained(name)

    def register_int4(self, name: str, weights: Int4Weights) -> None:
        """Register int4 weights under the name that draft paths use, in place of weights registered before."""
        self._paths.register_int4(name, weights)

    def using_int4(self, name: str) -> AbstractContextManager[None]:
        """Let paths that name no int4 weights use those registered under `name`, while the context lasts."""
        return self._paths.using_int4(name)

    def branch(
        self,
        index: int,
        part: SubLayer,
        x: Tensor,
        positions: int | Tensor,
        *,
        slots: int | Tensor | None = None,
        mask: Tensor | None = None,
        rows: slice = ALL_ROWS,
    ) -> Tensor:
        """Return the output of a sub-layer of layer `index` for hidden states `x` `[B, n, D]`, without adding `x`.

        The other arguments are as in `forward`.
        """
        batch, n, _ = x.shape
        return self.run_branch(
            index, part, x, PassInputs(batch, n, positions, positions if slots is None else slots, mask, rows)
        )

    @abstractmethod
    def run_branch(self, index: int, part: SubLayer, x: Tensor, inputs: PassInputs) -> Tensor:
        """Run a sub-layer as `branch` does."""

    @abstractmethod
    def input_moments(
        self, texts: Sequence[Sequence[int]], layers: Sequence[int], *, products: bool
    ) -> Iterator[tuple[int, dict[int, InputMoments]]]:
        """Yield each of `layers`, in order, with the moments of its linears' inputs while the full model reads `texts`.

        `texts`: token ids, none of them empty or longer than the context. `layers` are ascending. The moments are sums,
        by the index of a group among the layer's `int4_groups`, with products if `products`. The runtime's own cache is
        not used.
        """
