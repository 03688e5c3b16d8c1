"""The runtime: one forward and one cache over a loaded `transformers` model's own leaf modules.

It copies no modelling code, patches no class and changes no parameter. It owns the residual loop, the cache and
the attention call; the loop `decode` drives it. Knows nothing of prompts, tokenizers and profiles.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from selfspec.basics.errors import BusyError, SelfspecError
from selfspec.models.low_precision import Kernel
from selfspec.models.skeleton import read_skeleton
from selfspec.runtime.attention_inputs import PassInputs
from selfspec.runtime.cache import ALL_ROWS, Cache
from selfspec.runtime.cache_factory import cache_of
from selfspec.runtime.compiled_path import CompiledPath, Paths
from selfspec.runtime.cuda_graphs import Graphs, Recorder, Refused, has_hooks, recorder_for
from selfspec.runtime.eager_runner import EagerRunner
from selfspec.runtime.masks import Masks
from selfspec.runtime.native_bindings import ROWS
from selfspec.runtime.native_runner import NativeRunner
from selfspec.runtime.paged import BlockTables, PagedCache
from selfspec.runtime.rotary import rotary_tables
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.tree_batch import Placed, lay_out
from selfspec.types.draft_path import FULL, DraftPath

_OF_CACHE = ("cache", "_native", "_by_steps", "_graphs")  # what is made with it
_GROWTH = 256  # the cache grows in steps, so that prompts of similar length share one allocation


class Runtime:
    """One model, ready to be run in full or along draft paths.

    Raises `UnsupportedModelError` for a model it does not serve. `rows` is the number of sequences the cache holds.
    `kernel`: what multiplies weights in few bits; None: what is fastest on this machine (`kernel_for`). With `blocks`
    the cache is a pool of so many, which native passes alone can read: `SelfspecError` where there are none.
    `recorder`: what records narrow passes that are not native; None: CUDA graphs, if the model is on one CUDA device.
    """

    trees = True
    learns = True  # whether draft paths may name what was trained
    cache: Cache | PagedCache

    def __init__(
        self,
        model: Any,
        *,
        rows: int = 1,
        blocks: int | None = None,
        kernel: Kernel | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.model = model
        self.skeleton = read_skeleton(model, kernel=kernel)
        self._recorder, self._refused = recorder or recorder_for(model, self.skeleton), Refused()
        self.layers = len(self.skeleton.blocks)
        self.device = self.skeleton.device
        self.dtype = self.skeleton.sizes.dtype
        self._masks = Masks(self.skeleton.sizes, self.device)
        # The shortest window of any layer: what it hides depends on where the tokens of slots stand.
        self._min_window = min((s.window for s in self.skeleton.attention_specs if s.window is not None), default=None)
        # Where the order of rounding is ours to choose, queries and keys are scaled as they are turned, half each.
        exact = self.dtype in (torch.float32, torch.float64)
        self._rotary_scale = self.skeleton.scaling**0.5 if exact else 1.0
        self._scaling = 1.0 if exact else self.skeleton.scaling
        self._direct = exact and self.device.type == "cpu"
        self._paths = Paths(self.skeleton, self._scaling)
        self.learn, self.forget, self.held = self._paths.learn, self._paths.forget, self._paths.held
        self._full = self.compile(FULL)
        self.native = self._full.native is not None and self._min_window is None  # full passes are, whatever the length
        self._keys_transposed = self._direct or self._full.native is not None
        self._begin(rows, None if blocks is None else BlockTables(blocks))
        self.native = self.native and self._native is not None

    def with_new_cache(self, *, rows: int = 1, blocks: int | None = None, pool: BlockTables | None = None) -> Runtime:
        """Another over the same model, with a cache of its own for `rows` sequences.

        What is compiled is shared: no weight is brought into few bits twice. `blocks` as for a new one; `pool`: that of
        another paged cache, whose tables this one's rows have too.
        """
        other = copy.copy(self)
        other._begin(rows, pool if blocks is None else BlockTables(blocks))
        return other

    def _begin(self, rows: int, pool: BlockTables | None) -> None:
        """With nothing in the cache, and nothing under way."""
        self.rows, self.pool = rows, pool
        self._lock = threading.Lock()
        self._has_hooks = False  # whether someone looks on at what modules do, which a recording does not tell
        if pool is None or self.native:
            self._allocate(0)
        if pool is not None and not (self.native and self._native is not None):
            raise SelfspecError("native passes alone read a cache in blocks, and this model has none; leave blocks out")

    # -- the cache's life ------------------------------------------------------------------------------------

    @contextmanager
    def session(self, slots: int, *, reuse: bool = False) -> Iterator[None]:
        """Hold the runtime for one stream that needs `slots` slots a row. Raises `BusyError` while it is held.

        What sessions before have left in the cache is forgotten, unless this one is to `reuse` it.
        """
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "this model is still generating; exhaust or close() the first stream, or load a second model"
            )
        try:
            for row in range(0 if reuse else self.rows):
                self.cache.clear(row)
            self.reserve(slots)
            self.skeleton.refresh()
            self._has_hooks = self._recorder is not None and has_hooks(self.skeleton.parts.called())
            yield
        finally:
            self._lock.release()

    def reserve(self, slots: int) -> None:
        """Make the cache hold `slots` slots a row at least; what is committed stays. Call within a session.

        Raises `SelfspecError` when there is not the memory for it; what is committed stays then, too.
        """
        if slots <= self.cache.slots:
            return
        if self.pool is not None:
            raise SelfspecError(f"{slots} positions are wanted; a row of this pool has at most {self.cache.slots}")
        kept = {name: vars(self)[name] for name in _OF_CACHE if name in vars(self)} if any(self.cache.length) else None
        try:
            self._allocate(slots)
        except BaseException as error:
            if kept is None:
                self._allocate(0)  # whatever happened, the runtime stays usable
            else:
                vars(self).update(kept)
            if isinstance(error, RuntimeError):  # which is what running out of memory is
                raise SelfspecError(f"no cache for {slots} positions could be had: {error}") from error
            raise
        if kept is not None:
            self._rectangle.take(kept["cache"])

    @property
    def _eager_runner(self) -> EagerRunner:
        """Passes operation by operation. `SelfspecError` where the cache is a pool of blocks."""
        _ = self._rectangle
        assert self._eager is not None
        return self._eager

    @property
    def _rectangle(self) -> Cache:
        """The cache as passes operation by operation read it. `SelfspecError` where it is a pool of blocks."""
        if isinstance(self.cache, PagedCache):
            raise SelfspecError("this pass is not a native one, and no other reads a cache in blocks")
        return self.cache

    @torch.inference_mode(False)  # commits write to these tensors outside a forward
    @torch.no_grad()
    def _allocate(self, slots: int) -> None:
        for name in _OF_CACHE:  # free the old one before the new one is made
            vars(self).pop(name, None)
        slots = -(-slots // _GROWTH) * _GROWTH
        how = {"turned": self._keys_transposed, "placed": self._min_window is not None}
        self.cache = cache_of(self.skeleton, rows=self.rows, slots=slots, pool=self.pool, **how)
        positions = min(self.cache.slots, self.skeleton.context)
        attention_specs = rotary_tables(self.skeleton, positions, self._rotary_scale)
        turns = attention_specs[0][1]
        natively = self._keys_transposed and turns.partner is None
        self._native = NativeRunner(self.skeleton, self.cache, turns.cos, turns.sin) if natively else None
        self._eager = self._graphs = None
        if isinstance(self.cache, Cache):
            self._eager = EagerRunner(
                self.skeleton, self.cache, attention_specs, self._masks, scaling=self._scaling, direct=self._direct
            )
            if self._recorder is not None:
                self._graphs = Graphs(self._eager, self._recorder, self._refused, positions)

    # -- the one forward -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: int | Tensor,
        *,
        path: CompiledPath | None = None,
        slots: int | Tensor | None = None,
        mask: Tensor | None = None,
        rows: slice = ALL_ROWS,
        logits: Literal["all", "last"] | None = "all",
        hidden: Sequence[int] = (),
        between: Sequence[int] = (),
    ) -> ForwardOutput:
        """Run `tokens` `[B, n]` through the model, or through a draft `path` of it that `compile` made.

        `positions` and `slots` are `[B, n]`, or an int: a contiguous run from there, the same for every row. Without
        `slots`, they are the positions. `mask` `[B, n, S]` (true: seen) says which of the first S slots each token
        sees; the default is causal, slots up to its own. Keys and values are written before they are read. `rows`
        picks cache rows, B of them. `logits` picks the rows that pay for the head; `hidden` the layers whose streams
        are returned, `between` those whose streams between attention and MLP are. A bypassed sub-layer adds nothing,
        and writes no keys.
        """
        if rows.indices(self.rows) == (0, self.rows, 1):
            rows = ALL_ROWS
        batch, n = tokens.shape
        compiled = self._full if path is None else path
        slots = positions if slots is None else slots
        native = self._native if batch == 1 and compiled.native is not None and not between else None
        if self._min_window is not None and self._hides(positions, slots, n, rows):
            native = None
        if native is not None and ((n <= ROWS and logits is not None) or self.pool is not None):
            additive, row = None if mask is None else self._masks.additive(mask), rows.indices(self.rows)[0]
            return native.forward(compiled, tokens, positions, slots, additive, row, logits=logits, hidden=hidden)
        of = PassInputs(batch, n, positions, slots, mask, rows)
        if self._graphs is not None and not between and not self._has_hooks:
            step = self._graphs.forward(compiled, tokens, of, logits=logits, hidden=hidden)
            if step is not None:
                return step
        return self._eager_runner.forward(compiled, tokens, of, logits=logits, hidden=hidden, between=between)

    @torch.inference_mode()
    def over(
        self,
        placed: Sequence[Placed],
        *,
        path: CompiledPath | None = None,
        hidden: Sequence[int] = (),
        logits: bool = True,
    ) -> list[ForwardOutput]:
        """One pass over drafts of several sequences, a cache row for each: a step `[1, 1 + m, ..]` of each draft.

        Where the path is native, each token gives exactly what it gives alone. Other arguments as in `forward`.
        """
        compiled = self._full if path is None else path
        if self._native is not None and compiled.native is not None and self._min_window is None:
            return self._native.over(compiled, placed, hidden=hidden, logits=logits)
        wanted: Literal["all"] | None = "all" if logits else None
        tokens, positions, slots, mask, rows, at = lay_out(placed, spare=self._rectangle.spare, device=self.device)
        step = self.forward(
            tokens, positions, path=path, slots=slots, mask=mask, rows=rows, logits=wanted, hidden=hidden
        )
        if len(placed) == 1:
            return [step]
        return [step.part(row, 1 + len(one.draft)) for row, one in zip(at, placed, strict=True)]

    def compile(self, path: DraftPath) -> CompiledPath:
        """A draft path as `forward` takes it, made once; a head over some tokens holds a copy of their weights.

        Raises `SelfspecError` for layers and tokens that the model does not have, and where the head's weight is not at
        hand (quantised, adapted, offloaded) though only some tokens are to be drafted.
        """
        return self._paths.get(path)

    def extra_bytes(self, path: DraftPath) -> int:
        """Memory that a draft path takes beside the model."""
        return self._paths.bytes(path)

    @torch.inference_mode()
    def branch(
        self,
        index: int,
        part: Literal["attention", "mlp"],
        x: Tensor,
        positions: int | Tensor,
        *,
        slots: int | Tensor | None = None,
        mask: Tensor | None = None,
        rows: slice = ALL_ROWS,
    ) -> Tensor:
        """What one sub-layer of layer `index` adds to the stream `x` `[B, n, D]`; arguments as in `forward`."""
        batch, n, _ = x.shape
        slots = positions if slots is None else slots
        if self._min_window is not None and part == "attention":
            self._hides(positions, slots, n, rows)
        return self._eager_runner.branch(index, part, x, PassInputs(batch, n, positions, slots, mask, rows))

    def _hides(self, positions: int | Tensor, slots: int | Tensor, n: int, rows: slice) -> bool:
        """Say where a pass's tokens stand, in a model with windows; whether any may be hidden from one of them."""
        assert self._min_window is not None
        self._rectangle.place(positions, slots, n, rows)
        return not isinstance(slots, int) or slots + n > self._min_window
