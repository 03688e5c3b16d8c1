"""A runtime over the model's own forward, for causal `transformers` models of any family.

Keys and values are stored in the same cache as the lean runtime's, so that drafts are laid out, verified and committed
the same way. Layers whose state has no slots to crop, such as recurrent layers, have it in a `StateCache`. The model
reads and writes this cache through the `transformers` cache interface. Sub-layers are skipped, and linears quantised,
by forwards that replace those of the modules in one thread for one pass (`module_hooks`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError, UnsupportedModelError
from selfspec.models.dispatch import device_of, in_this_thread
from selfspec.models.families import base_model
from selfspec.models.families.base import SubLayer
from selfspec.models.families.common import windows_of
from selfspec.models.low_precision import Kernel
from selfspec.models.module_quantizer import ModuleQuantizer, NamedLinears, recording_inputs
from selfspec.models.quantized_sublayers import Trained
from selfspec.models.quantizers import InputMoments, moments_bytes, zero_moments
from selfspec.models.skeleton import decoder_part
from selfspec.models.structure import Outline, find_structure, read_outline
from selfspec.runtime.attention_inputs import PassInputs
from selfspec.runtime.base import Runtime, Wanted
from selfspec.runtime.cache import Cache
from selfspec.runtime.compiled_path import CompiledPath
from selfspec.runtime.hf_cache_layout import CacheLayout, UnknownCacheError, new_cache, read_layout
from selfspec.runtime.hf_cache_view import ViewedPass
from selfspec.runtime.hf_check import MODEL_ERRORS, WrongLogitsError, check_chains, probe_tokens, takes_masks, tolerance
from selfspec.runtime.hf_paths import GenericPath, GenericPaths
from selfspec.runtime.module_hooks import callers_of, capture_hidden, first_of, replacing, stepping
from selfspec.runtime.paged import BlockTables
from selfspec.runtime.state_cache import StateCache, run_rows
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.types.draft_path import FULL, SkipSet

_GROWTH = 256
_INEXACT = 1e-4  # error of logits, as a share of the largest, above which recurrent modules may do better by steps
_MOMENTS = 2**30  # bytes of the inputs' moments of all layers that are watched at once
_HIDDEN_WINDOWS = ("window_size", "attention_window_size", "sliding_window_size", "keep_window_size")


class GenericRuntime(Runtime):
    """A model that is run by its own forward.

    `trees`: whether the model honours custom attention masks, as tested on construction. If not, drafts have no
    branches, and the sequences of a batch run one after the other. `kernel`: as in `LeanRuntime`. Raises
    `UnsupportedModelError` for a model whose sub-layers cannot be found, or whose logits with a cache differ from its
    logits without a cache.

    Attention layers keep keys and values of any shape in the runtime's KV cache. Layers with a state, such as recurrent
    layers, go on from the last verified token (`StateCache`).
    """

    supports_trained = False
    skeleton: Outline
    _paths: GenericPaths

    def __init__(self, model: Any, *, rows: int = 1, kernel: Kernel | None = None) -> None:
        self.model = base_model(model)
        self._structure = find_structure(self.model)
        if self.model.get_output_embeddings() is None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has no language-model head; expected a causal language model"
            )
        self.layers = len(self._structure.layers)
        self._forward_params = inspect.signature(self.model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in self._forward_params else "cache_params"
        # The length of each sub-layer's output tuple; None: a single tensor.
        self._output_lengths: dict[nn.Module, int | None] = {}
        self._windows = windows_of(decoder_part(self.model.config), self.layers)
        self._probe = probe_tokens(decoder_part(self.model.config).vocab_size)
        self.trees = True  # until tested
        self.trees = self._probed(kernel)
        self._reset(rows)

    @property
    def _name(self) -> str:
        return f"{type(self.model).__name__} (model_type {self.model.config.model_type!r})"

    # -- probing the model -------------------------------------------------------------------------------------

    def _probed(self, kernel: Kernel | None) -> bool:
        """Read the layout of the model's cache from a pass; return whether the model's logits are right with trees.

        If the logits are wrong, recurrent modules run one token after the other, and so go on from their state; also if
        the logits are much closer then. If they are wrong with keys and values in the runtime's cache, the model's own
        cache layers are kept instead, as states. Raises `UnsupportedModelError` if its logits with a cache are wrong in
        all these ways.
        """
        reason = ""
        for opaque, stepwise in ((False, False), (False, True), (True, False), (True, True)):
            if stepwise and not self._steps:
                continue
            try:
                trees, error = self._prepared(kernel, opaque=opaque, stepwise=stepwise)
            except (UnknownCacheError, WrongLogitsError) as problem:
                reason = str(problem)
                continue
            if stepwise or not self._steps or error < _INEXACT or self.dtype not in (torch.float32, torch.float64):
                return trees
            with suppress(WrongLogitsError):
                trees, error_by_steps = self._prepared(kernel, opaque=opaque, stepwise=True)
                if error_by_steps < error / 10:
                    return trees
            return self._prepared(kernel, opaque=opaque, stepwise=False)[0]
        raise UnsupportedModelError(f"{self._name} is not supported: {reason}")

    def _prepared(self, kernel: Kernel | None, *, opaque: bool, stepwise: bool) -> tuple[bool, float]:
        """Prepare the passes for one way of caching; return what `_checked` does.

        Raises `UnknownCacheError` as `read_layout` does, and `WrongLogitsError` as `_checked` does.
        """
        self._stepwise = stepwise
        self._layout = self._read_layout(opaque=opaque)
        self.stateful = self._layout.stateful
        kv_heads, head_dim = self._layout.mean_shape(self.layers)
        self._quantizer = ModuleQuantizer(self._structure, self.model.get_output_embeddings(), self._inputs, kernel)
        self.skeleton = read_outline(self.model, kv_heads, head_dim, self._quantizer)
        self.device, self.dtype = self.skeleton.device, self.skeleton.sizes.dtype
        sharing = getattr(decoder_part(self.model.config), "kv_sharing_modes", None) or [None] * self.layers
        never = [i for i, mode in enumerate(sharing) if mode == "store"]  # other layers read these keys and values
        self._paths = GenericPaths(self._quantizer, self.skeleton, self._output_lengths, unskippable=never)
        self._full_path = self._paths.get(FULL)
        self._reset(2)
        return self._checked()

    @torch.inference_mode()
    def _read_layout(self, *, opaque: bool) -> CacheLayout:
        """Return what the model caches, as a pass shows; also record the kind of each sub-layer's output.

        Raises `UnknownCacheError` as `read_layout` does, and `UnsupportedModelError` if the pass fails.
        """
        config, parts = decoder_part(self.model.config), (*self._structure.attention, *self._structure.mlp)
        cache, tokens = (
            new_cache(config),
            torch.tensor([self._probe], device=device_of(self.model.get_input_embeddings())),
        )
        hooks = [part.register_forward_hook(self._note) for part in parts]
        try:
            with (
                callers_of(cache, ("update_conv_state", "update_recurrent_state"), self._structure.layers) as mixers,
                recording_inputs(self.model) as self._inputs,
            ):
                self.model(tokens, use_cache=True, **{self._cache_name: cache})
            self._steps = stepping(mixers)
            return read_layout(config, cache, len(self._probe), opaque=opaque)
        except MODEL_ERRORS as error:
            raise UnsupportedModelError(f"{self._name} is not supported: it takes no KV cache ({error})") from None
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, module: nn.Module, _args: Any, out: Any) -> None:
        self._output_lengths[module] = len(out) if isinstance(out, tuple) else None

    @torch.inference_mode()
    def _checked(self) -> tuple[bool, float]:
        """Return whether the model's logits are right with tree masks and with batches, and their error without.

        The error is the largest, as a share of the largest logit. Raises `WrongLogitsError` if its logits with this
        cache are wrong even for a single sequence.
        """
        theirs = self.model(torch.tensor([self._probe], device=self.device), use_cache=False).logits
        # Recurrent kernels compute in float32 in a float64 model, too.
        allowed = tolerance(theirs, torch.float32 if self.stateful and self.dtype is torch.float64 else self.dtype)
        with self.session(len(self._probe) + 2):
            try:
                error = check_chains(self, self._probe, theirs, allowed)
            except WrongLogitsError:
                if self.model.training:  # dropout, which no two passes share
                    raise WrongLogitsError("it is in training mode; call its eval() first") from None
                raise
            trees = (
                "position_ids" in self._forward_params
                and self._masked_by_hand
                and takes_masks(self, self._probe, theirs, allowed)
            )
        return trees, error / float(theirs.abs().max())

    @property
    def _masked_by_hand(self) -> bool:
        """Whether masks alone say what a token sees: no state, no indexer, and no window but `sliding_window`."""
        config = decoder_part(self.model.config)
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        hidden_windows = [name for name in _HIDDEN_WINDOWS if getattr(config, name, None) is not None]
        return not (self._layout.stateful or self._layout.indexed or kinds or hidden_windows)

    # -- the cache's life --------------------------------------------------------------------------------------

    def _reset(self, rows: int, pool: BlockTables | None = None) -> None:
        if pool is not None:
            raise SelfspecError("paged KV cache: this model runs by its own forward; expected blocks=None")
        super()._reset(rows)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _allocate(self, slots: int) -> None:
        self.__dict__.pop("cache", None)
        sizes, layout = self.skeleton.sizes, self._layout
        arguments: dict[str, Any] = {
            "rows": self.rows,
            "kv_heads": sizes.kv_heads,
            "group": 1,
            "slots": -(-slots // _GROWTH) * _GROWTH,
            "head_dim": sizes.head_dim,
            "dtype": sizes.dtype,
            "devices": layout.devices,
            "shapes": layout.shapes,
            "track_positions": any(window is not None for window in self._windows),
        }
        self.cache = StateCache(layout.fresh, **arguments) if layout.stateful else Cache(**arguments)

    def register_trained(self, name: str, trained: Trained) -> None:
        """Raise `UnsupportedModelError`, as trained paths are not supported."""
        _ = self.skeleton.parts

    # -- the one forward ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run_pass(self, tokens: Tensor, inputs: PassInputs, path: CompiledPath | None, wanted: Wanted) -> ForwardOutput:
        """Run a pass as `Runtime.forward` does; `between` returns each layer's input plus its attention's output.

        Raises `UnsupportedModelError` for a mask if the model takes none.
        """
        _, _, positions, slots, mask, rows, _ = inputs
        compiled = path if isinstance(path, GenericPath) else self._full_path
        cache = self._static_cache
        if isinstance(slots, Tensor) and mask is None and not self.stateful:
            mask = torch.arange(int(slots.max()) + 1, device=slots.device) <= slots.unsqueeze(-1)
        if mask is not None and not (self.trees and not self.stateful):
            raise UnsupportedModelError(f"{self._name} takes no attention mask per token; expected a chain of tokens")
        if not isinstance(cache, StateCache):
            return self._run(tokens, inputs._replace(mask=mask), compiled, wanted)

        def run(ids: Tensor, slot: int, row: int, states: list[Any]) -> ForwardOutput:
            return self._run(ids, _chain(ids, slot, row), compiled, wanted, states)

        def advance(ids: Tensor, slot: int, row: int, states: list[Any]) -> ForwardOutput:
            return self._run(ids, _chain(ids, slot, row), self._full_path, Wanted(None), states)

        own = None if compiled is self._full_path else compiled
        return run_rows(cache, tokens, positions, slots, rows, path=own, run=run, advance=advance)

    def _run(
        self,
        tokens: Tensor,
        pass_inputs: PassInputs,
        compiled: GenericPath,
        wanted: Wanted,
        states: list[Any] | None = None,
    ) -> ForwardOutput:
        """Run the model once; a pass of a model with layers with a state changes `states`."""
        batch, n, positions, slots, mask, rows, *_ = pass_inputs
        logits, hidden, between = wanted
        cache = self._static_cache
        if cache.positions is not None:
            cache.set_positions(positions, slots, n, rows)
        kv_len = mask.shape[-1] if mask is not None else int(slots) + n
        model_kwargs: dict[str, Any] = {
            self._cache_name: self._layout.view(ViewedPass(cache, slots, n, kv_len, rows), states)
        }
        if mask is not None:
            model_kwargs["attention_mask"] = self._masks_of(mask, positions, n, kv_len, rows)
        if "position_ids" in self._forward_params:
            position_ids = (
                torch.arange(positions, positions + n, device=self.device) if isinstance(positions, int) else positions
            )
            model_kwargs["position_ids"] = position_ids.expand(batch, n)
        if logits != "all" and "logits_to_keep" in self._forward_params:
            model_kwargs["logits_to_keep"] = 1
        steps = self._steps if self._stepwise and positions != 0 else {}
        with (
            replacing({**steps, **compiled.forwards} if steps else compiled.forwards),
            capture_hidden(self._structure, hidden, between) as (streams, halves),
        ):
            out = self.model(tokens, use_cache=True, return_dict=True, **model_kwargs).logits
        if logits is None:
            return ForwardOutput(None, streams, halves)
        out = out if logits == "all" else out[:, -1:]
        if compiled.token_ids is not None:
            out = torch.full_like(out, -torch.inf).index_copy_(
                -1, compiled.token_ids, out.index_select(-1, compiled.token_ids)
            )
        return ForwardOutput(out, streams, halves)

    @torch.inference_mode()
    def run_branch(self, index: int, part: SubLayer, x: Tensor, inputs: PassInputs) -> Tensor:
        """Return a sub-layer's output as `Runtime.branch` does.

        The pass skips all other sub-layers, and `x` replaces the input of layer `index`. Raises
        `UnsupportedModelError` if the model has layers with a state, whose output depends on more than the cache.
        """
        if self.stateful:
            raise UnsupportedModelError(f"{self._name} has layers with a state, which cannot run alone")
        every = range(self.layers)
        others = SkipSet(
            tuple(i for i in every if (i, "attention") != (index, part)),
            tuple(i for i in every if (i, "mlp") != (index, part)),
        )
        alone = self._paths.skipping(others)
        left: list[Tensor] = []

        def put(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

        def took(_module: nn.Module, _args: Any, out: Any) -> None:
            left.append(first_of(out))

        layer, tokens = self._structure.layers[index], torch.zeros(x.shape[:2], dtype=torch.long, device=self.device)
        hooks = [
            layer.register_forward_pre_hook(in_this_thread(put), with_kwargs=True),
            layer.register_forward_hook(in_this_thread(took)),
        ]
        try:
            self.run_pass(tokens, inputs, alone, Wanted(None))
        finally:
            for hook in hooks:
                hook.remove()
        return left[0] - x

    def input_moments(
        self, texts: Sequence[Sequence[int]], layers: Sequence[int], *, products: bool
    ) -> Iterator[tuple[int, dict[int, InputMoments]]]:
        """Yield the moments of int4 groups' inputs as `Runtime.input_moments` does, of several layers from each pass.

        Layers whose moments take `_MOMENTS` bytes together, at least one, are watched while the model reads the texts.
        """
        todo = [(index, self._quantizer.int4_groups(index)) for index in layers]
        while todo:
            watched = dict[int, Mapping[int, NamedLinears]]()
            nbytes = 0
            while todo and (not watched or nbytes + moments_bytes(todo[0][1], products=products) <= _MOMENTS):
                index, groups = todo.pop(0)
                watched[index], nbytes = groups, nbytes + moments_bytes(groups, products=products)
            moments = {index: zero_moments(groups, products=products) for index, groups in watched.items()}
            self._watch(texts, watched, moments)
            yield from moments.items()

    def _watch(
        self,
        texts: Sequence[Sequence[int]],
        watched: Mapping[int, Mapping[int, NamedLinears]],
        moments: Mapping[int, Mapping[int, InputMoments]],
    ) -> None:
        """Run the texts through the model, and add the inputs of the `watched` groups of each layer to `moments`."""

        def adding(into: InputMoments) -> Callable[..., None]:
            def add(_module: nn.Module, args: tuple[Any, ...]) -> None:
                into.add(args[0].reshape(-1, args[0].shape[-1]))

            return in_this_thread(add)

        hooks = [
            group.replaced[0].register_forward_pre_hook(adding(moments[index][number]))
            for index, groups in watched.items()
            for number, group in groups.items()
        ]
        try:
            alone = self.with_new_cache()
            with alone.session(max(map(len, texts))):
                for ids in texts:
                    alone.cache.clear(0)
                    alone.forward(torch.tensor([list(ids)], device=self.device), 0, logits=None)
        finally:
            for hook in hooks:
                hook.remove()

    def _masks_of(self, mask: Tensor, positions: int | Tensor, n: int, kv_len: int, rows: slice) -> Any:
        """Return an additive mask `[B, 1, n, S]`, or a dict of masks by layer type if the model has layer types."""

        def additive(shown: Tensor) -> Tensor:
            zeros = torch.zeros(shown.shape, dtype=self.dtype, device=shown.device)
            return zeros.masked_fill_(~shown, torch.finfo(self.dtype).min).unsqueeze(1)

        windows = set(self._windows)
        window = max((w for w in windows if w is not None), default=None)
        if window is None:
            return additive(mask)
        near = additive(mask & self._static_cache.window_mask(window, positions, n, kv_len, rows))
        if getattr(decoder_part(self.model.config), "layer_types", None) is None:
            return near
        return {"full_attention": additive(mask), "sliding_attention": near}


def _chain(tokens: Tensor, slot: int, row: int) -> PassInputs:
    """Return the inputs of a pass over a chain of tokens `[1, n]` in one cache row."""
    return PassInputs(1, tokens.shape[1], slot, slot, None, slice(row, row + 1))
