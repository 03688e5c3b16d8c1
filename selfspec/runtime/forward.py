"""The lean runtime: its own forward pass over the leaf modules (linears, norms) of a `transformers` model.

The runtime copies no modelling code, patches no class and changes no parameter. It runs the residual loop, the KV cache
and the attention call itself; the decode loop calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.models.families.base import Block, SubLayer
from selfspec.models.low_precision import Kernel
from selfspec.models.native_library import KINDS, library
from selfspec.models.quantizers import InputMoments, watched, zero_moments
from selfspec.models.skeleton import Skeleton, read_skeleton
from selfspec.models.triton_kernels.switch import triton_enabled
from selfspec.runtime.attention_inputs import Masks, PassInputs, fused_backends, rotary_tables
from selfspec.runtime.base import Runtime, Wanted
from selfspec.runtime.cache import ALL_ROWS, Cache
from selfspec.runtime.compiled_path import CompiledPath, LeanPath, Paths
from selfspec.runtime.cuda_graphs import Graphs, Recorder, UncapturablePaths, has_hooks, recorder_for
from selfspec.runtime.device_rounds import DeviceRounds, device_rounds
from selfspec.runtime.eager_runner import EagerRunner
from selfspec.runtime.native_bindings import ROWS
from selfspec.runtime.native_runner import NativeRunner
from selfspec.runtime.paged import BlockTables, cache_of
from selfspec.speculation.drafts import Draft
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.tree_batch import PlacedDraft
from selfspec.types.draft_path import FULL
from selfspec.types.methods import WIDEST_DRAFT

COPIED = 512  # tokens of a prompt from which its int8 copies are made before the first round
WARM_ROWS = 9  # rows of a verification pass up to which passes are captured before a text's rounds
_GROWTH = 256  # slots: cache sizes are multiples, so that prompts of similar length share one allocation
_CAPTURED = 2**30  # bytes of a cache that captured passes read: all of the context if it needs no more, else this much


class LeanRuntime(Runtime):
    """A runtime that calls the leaf modules of a model of a supported family.

    `rows`: the number of sequences that the cache holds. `kernel`: the kernel that multiplies quantised weights (None:
    the fastest kernel on this machine, see `kernel_for`). `blocks`: the number of blocks of a paged KV cache (None: a
    static cache). Only native CPU passes read a paged cache. `recorder`: captures eager passes over few tokens (None:
    as CUDA graphs if the model is on one CUDA device, else no capture).

    Raises `UnsupportedModelError` for a model that is not supported, and `SelfspecError` for `blocks` if the model has
    no native passes.
    """

    skeleton: Skeleton
    _paths: Paths
    _of_cache = ("cache", "_native", "_eager", "_graphs", "_rounds")

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
        self._recorder, self._uncapturable = recorder or recorder_for(model, self.skeleton), UncapturablePaths()
        self.layers = len(self.skeleton.blocks)
        self.device = self.skeleton.device
        self.dtype = self.skeleton.sizes.dtype
        self._masks = Masks(self.skeleton.sizes, self.device)
        # The shortest sliding window of any layer: the slots it hides depend on the positions of their tokens.
        self._min_window = min((s.window for s in self.skeleton.attention_specs if s.window is not None), default=None)
        # In float32 and float64 the order of rounding is free: RoPE scales queries and keys by sqrt(scaling) each.
        exact = self.dtype in (torch.float32, torch.float64)
        self._rotary_scale = self.skeleton.scaling**0.5 if exact else 1.0
        self._scaling = 1.0 if exact else self.skeleton.scaling
        self._direct = exact and self.device.type == "cpu"
        self._triton = triton_enabled(self.device)  # as for the products and norms of the skeleton
        self._paths = Paths(self.skeleton, self._scaling)
        self._full = self._paths.get(FULL)
        self.native = self._full.native is not None
        self._keys_transposed = self._direct or self._full.native is not None
        self._reset(rows, None if blocks is None else BlockTables(blocks))
        # Where long vectors multiply prompts' rows too, an eager pass only adds time between products.
        self._native_prefill = self.native and bool(library().selfspec_many_by_vectors(KINDS[self.dtype]))

    def _reset(self, rows: int, pool: BlockTables | None = None) -> None:
        self._has_hooks = False  # whether any module has a hook, which a graph replay would not run
        super()._reset(rows, pool)
        if pool is not None and self._native is None:
            raise SelfspecError("paged KV cache: this model has no native passes; expected blocks=None")

    def _begin(self) -> None:
        super()._begin()
        self._has_hooks = self._recorder is not None and has_hooks(self.skeleton.parts.called())

    # -- the cache's life ------------------------------------------------------------------------------------

    def _rounded_up(self, slots: int) -> int:
        """Return the slots per row to allocate for a request of `slots` slots.

        A cache that grows drops all captured passes. If passes are captured, a cache that may grow is allocated for the
        whole context, or for `_CAPTURED` bytes if the context needs more; a larger request is doubled.
        """
        slots = -(-slots // _GROWTH) * _GROWTH
        if self._recorder is None or not slots or not self.grows:
            return slots
        longest = -(-(self.skeleton.context + WIDEST_DRAFT) // _GROWTH) * _GROWTH
        sizes = self.skeleton.sizes
        slot_bytes = 2 * self.layers * self.rows * sizes.kv_heads * sizes.head_dim * sizes.dtype.itemsize
        allowed = _CAPTURED // slot_bytes // _GROWTH * _GROWTH
        return max(slots, min(longest, allowed if slots <= allowed else 2 * slots))

    @property
    def _eager_runner(self) -> EagerRunner:
        """The runner of eager passes. Raises `SelfspecError` if the cache is paged."""
        _ = self._static_cache
        assert self._eager is not None
        return self._eager

    @torch.inference_mode(False)  # commits write to these tensors outside a forward
    @torch.no_grad()
    def _allocate(self, slots: int) -> None:
        for name in self._of_cache:  # drop the old cache before the new one is allocated
            vars(self).pop(name, None)
        slots = self._rounded_up(slots)
        options = {"keys_transposed": self._keys_transposed, "track_positions": self._min_window is not None}
        self.cache = cache_of(self.skeleton, rows=self.rows, slots=slots, pool=self.pool, **options)
        positions = min(self.cache.slots, self.skeleton.context)
        attention_specs = rotary_tables(self.skeleton, positions, self._rotary_scale)
        self._native = NativeRunner(self.skeleton, self.cache, attention_specs) if self._keys_transposed else None
        self._eager = self._graphs = self._rounds = None
        if isinstance(self.cache, Cache):
            self.cache.max_copy_bytes = self.max_copy_bytes
            self._eager = EagerRunner(
                self.skeleton,
                self.cache,
                attention_specs,
                self._masks,
                scaling=self._scaling,
                direct=self._direct,
                triton=self._triton,
            )
            if self._recorder is not None:
                self._graphs = Graphs(self._eager, self._recorder, self._uncapturable, positions)
                self._rounds = device_rounds(self._graphs, self._full)

    # -- the one forward -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run_pass(self, tokens: Tensor, inputs: PassInputs, path: CompiledPath | None, wanted: Wanted) -> ForwardOutput:
        """Run a pass as `Runtime.forward` does: natively, as a captured graph, or eagerly."""
        if inputs.rows.indices(self.rows) == (0, self.rows, 1):
            inputs = inputs._replace(rows=ALL_ROWS)
        batch, n, positions, slots, mask, rows, _ = inputs
        logits, hidden, between = wanted
        compiled = self._full if path is None else path
        assert isinstance(compiled, LeanPath)
        self.cache.written(rows, slots)
        self._record_positions(positions, slots, n, rows)
        native = self._native if batch == 1 and compiled.native is not None and not between else None
        prefill = self._native_prefill and compiled is self._full and mask is None and isinstance(slots, int)
        if native is not None and ((n <= ROWS and logits is not None) or prefill or self.pool is not None):
            masks, row = self._masks_by_spec(positions, slots, mask, n, rows), rows.indices(self.rows)[0]
            return native.forward(compiled, tokens, positions, slots, masks, row, logits=logits, hidden=hidden)
        if self._graphs is not None and not between and not self._has_hooks:
            step = self._graphs.forward(compiled, tokens, inputs, logits=logits, hidden=hidden)
            if step is not None:
                return step
        with fused_backends(self.device):
            return self._eager_runner.forward(compiled, tokens, inputs, logits=logits, hidden=hidden, between=between)

    @torch.inference_mode()
    def run_drafts(
        self, placed: Sequence[PlacedDraft], path: CompiledPath | None, wanted: Wanted
    ) -> list[ForwardOutput]:
        """Run drafts as `Runtime.forward_drafts` does, in one native pass where there is one."""
        compiled = self._full if path is None else path
        assert isinstance(compiled, LeanPath)
        if self._native is not None and compiled.native is not None:
            for row, _, start, _ in placed:
                self.cache.written(slice(row, row + 1), start)
            outputs = self._native.forward_drafts(
                compiled, placed, hidden=wanted.hidden, logits=wanted.logits is not None
            )
            if self._min_window is not None:
                for row, _, start, draft in placed:
                    positions = torch.tensor([[start, *(start + depth for depth in draft.depths)]])
                    self._record_positions(positions, start, 1 + len(draft), slice(row, row + 1))
            return outputs
        return super().run_drafts(placed, path, wanted)

    def warm_up(self, path: CompiledPath, row: int, start: int, *, hidden: Sequence[int] = ()) -> None:
        """Capture passes as `Runtime.warm_up` does, verification passes over up to `WARM_ROWS` tokens.

        Where rounds can run on the device, each is captured when it first occurs, and so are passes beside them. Of a
        prompt of `COPIED` tokens and more, the int8 copies of keys and values are made, which would else make the first
        draft several times as long.
        """
        assert isinstance(path, LeanPath)
        cache = self.cache
        reads_copies = self._native is not None and path.int8_layers is not None
        long = COPIED <= start < min(cache.slots, self.skeleton.context)
        if reads_copies and long and isinstance(cache, Cache) and cache.copies is not None:
            self.forward_drafts([PlacedDraft(row, 0, start)], path=path, logits=False)
            return
        end = start + WARM_ROWS
        graphs = self._graphs if self.rows == 1 and not self._has_hooks and self._rounds is None else None
        if graphs is None or end > min(self.cache.slots, self.skeleton.context) or not graphs.first_use(path, end):
            return
        for compiled, widths in ((self._full, range(1, WARM_ROWS + 1)), (path, (1,))):
            for n in widths:
                placed = PlacedDraft(row, 0, start, Draft.chain([0] * (n - 1)))
                self.forward_drafts([placed], path=compiled, hidden=hidden)

    @property
    def device_rounds(self) -> DeviceRounds | None:
        """The captured rounds of the present cache; None if rounds run on the host."""
        return None if self._has_hooks else self._rounds

    @torch.inference_mode()
    def run_branch(self, index: int, part: SubLayer, x: Tensor, inputs: PassInputs) -> Tensor:
        """Run a sub-layer as `Runtime.branch` does."""
        _, n, positions, slots, _, rows, _ = inputs
        self.cache.written(rows, slots)
        if part == "attention":
            self._record_positions(positions, slots, n, rows)
        with fused_backends(self.device):
            return self._eager_runner.branch(index, part, x, inputs)

    def input_moments(
        self, texts: Sequence[Sequence[int]], layers: Sequence[int], *, products: bool
    ) -> Iterator[tuple[int, dict[int, InputMoments]]]:
        """Yield the moments of int4 groups' inputs as `Runtime.input_moments` does.

        Layers run one after another over all texts, so that memory holds the moments of one layer only.
        """
        alone = self.with_new_cache()
        with alone.session(max(map(len, texts))):
            streams = [self.skeleton.embed(torch.tensor([list(ids)], device=self.device)) for ids in texts]
            for index in range(max(layers, default=-1) + 1):
                groups = self.skeleton.quantizer.int4_groups(index) if index in layers else {}
                moments = zero_moments(groups, products=products)
                block = watched(self.skeleton.blocks[index], moments)
                for number, stream in enumerate(streams):
                    streams[number] = alone.run_layer(index, block, stream)
                if index in layers:
                    yield index, moments

    @torch.inference_mode()
    def run_layer(self, index: int, block: Block, x: Tensor) -> Tensor:
        """Return the output of layer `index`, run as `block`, for the hidden states `x` `[1, n, D]` of a whole text.

        The text's keys and values overwrite those in row 0 of the cache. Call within a session.
        """
        self.cache.written(ALL_ROWS, 0)
        self._record_positions(0, 0, x.shape[1], ALL_ROWS)
        with fused_backends(self.device):
            return self._eager_runner.run_layer(index, block, x, PassInputs(1, x.shape[1], 0, 0, None, ALL_ROWS))

    def _record_positions(self, positions: int | Tensor, slots: int | Tensor, n: int, rows: slice) -> None:
        """Record the positions of a pass's tokens, which a sliding window needs."""
        if self._min_window is not None:
            self.cache.set_positions(positions, slots, n, rows)

    def _masks_by_spec(
        self, positions: int | Tensor, slots: int | Tensor, mask: Tensor | None, n: int, rows: slice
    ) -> list[Tensor] | None:
        """Return a pass's additive mask for each attention spec; None if slots' numbers say what tokens see."""
        if mask is None and self._min_window is not None and isinstance(slots, Tensor):
            mask = torch.arange(int(slots.max()) + 1) <= slots.unsqueeze(-1)
        if mask is None:
            return None
        windows = [spec.window for spec in self.skeleton.attention_specs]
        seen = {
            window: mask
            if window is None
            else mask & self.cache.window_mask(window, positions, n, mask.shape[-1], rows)
            for window in windows
        }
        additive = {window: self._masks.additive(visible) for window, visible in seen.items()}
        return [additive[window] for window in windows]
