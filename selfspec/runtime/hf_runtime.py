"""A runtime over the model's own forward, for causal `transformers` models whose layers have an attention and an MLP.

Keys and values are stored in the same cache as the lean runtime's, so that drafts are laid out, verified and committed
the same way. The model reads and writes this cache through the `transformers` cache interface. Sub-layers are skipped,
and linears quantised, by forwards that replace those of the modules in one thread for one pass (`module_hooks`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from selfspec.basics.errors import SelfspecError, UnsupportedModelError
from selfspec.models.dispatch import device_of
from selfspec.models.families.base import Block
from selfspec.models.families.common import windows_of
from selfspec.models.low_precision import Kernel
from selfspec.models.module_quantizer import quantizer_of, recording_inputs
from selfspec.models.path_modules import Trained
from selfspec.models.structure import Outline, find_structure, read_outline
from selfspec.runtime.base import CachedRuntime
from selfspec.runtime.cache import ALL_ROWS, Cache
from selfspec.runtime.compiled_path import CompiledPath
from selfspec.runtime.hf_cache_view import HFCacheView, ViewedPass
from selfspec.runtime.hf_paths import GenericPath, GenericPaths
from selfspec.runtime.module_hooks import capture_hidden, first_of, in_this_thread, replacing
from selfspec.runtime.paged import BlockTables
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.types.draft_path import FULL
from selfspec.types.skip import SkipSet

_GROWTH = 256
_PROBE = (1, 2, 3, 2, 1, 4)  # tokens that every vocabulary has
_CLOSE = {torch.float64: 1e-5, torch.float32: 1e-3}  # tolerance relative to the largest logit; half precision: 0.1


class GenericRuntime(CachedRuntime):
    """A model that is run by its own forward.

    `trees`: whether the model honours custom attention masks, as tested on construction. If not, drafts have no
    branches, and only one sequence is decoded at a time. `kernel`: as in `LeanRuntime`. Raises
    `UnsupportedModelError` for a model whose sub-layers cannot be found, or whose logits with this KV cache differ from
    its logits without a cache.
    """

    supports_trained = False
    skeleton: Outline
    _paths: GenericPaths

    def __init__(self, model: Any, *, rows: int = 1, kernel: Kernel | None = None) -> None:
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._structure = find_structure(self.model)
        if self.model.get_output_embeddings() is None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has no language-model head; expected a causal language model"
            )
        self.layers = len(self._structure.layers)
        self._forward_params = inspect.signature(self.model.forward).parameters
        self._output_lengths: dict[
            nn.Module, int | None
        ] = {}  # length of a sub-layer's output tuple; None: a single tensor
        kv_heads, head_dim = self._shapes()
        self.skeleton = read_outline(self.model, kv_heads, head_dim)
        self.device, self.dtype = self.skeleton.device, self.skeleton.sizes.dtype
        self._paths = GenericPaths(quantizer_of(self.model, self._inputs, kernel), self.skeleton, self._output_lengths)
        self._windows = windows_of(self.model.config, self.layers)
        self._full_path = self._paths.get(FULL)
        self._reset(2)
        self.trees = self._checked()
        if rows > 1 and not self.trees:
            raise UnsupportedModelError(f"{self._name} decodes one sequence at a time")
        self._reset(rows)

    def with_new_cache(self, *, rows: int = 1, blocks: int | None = None, pool: BlockTables | None = None) -> Self:
        """Return another runtime as `Runtime.with_new_cache` does.

        Raises `UnsupportedModelError` for several `rows` if the model decodes one sequence at a time.
        """
        if rows > 1 and not self.trees:
            raise UnsupportedModelError(f"{self._name} decodes one sequence at a time")
        return super().with_new_cache(rows=rows, blocks=blocks, pool=pool)

    @property
    def _name(self) -> str:
        return f"{type(self.model).__name__} (model_type {self.model.config.model_type!r})"

    # -- probing the model -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _shapes(self) -> tuple[int, int]:
        """Return the number and the size of the KV heads; also record the kind of each sub-layer's output.

        Both are read from a probe pass. Raises `UnsupportedModelError` unless all layers cache keys and values of one
        shape.
        """
        device = device_of(self.model.get_input_embeddings())
        probe_cache = DynamicCache()
        parts = (*self._structure.attention, *self._structure.mlp)
        hooks = [part.register_forward_hook(self._note) for part in parts]
        try:
            with recording_inputs(self.model) as self._inputs:
                self.model(torch.tensor([_PROBE], device=device), past_key_values=probe_cache, use_cache=True)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise UnsupportedModelError(f"{self._name} is not supported: it takes no KV cache ({error})") from None
        finally:
            for hook in hooks:
                hook.remove()
        tensors = [
            t for layer in probe_cache.layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))
        ]
        shapes = {None if t is None else tuple(t.shape) for t in tensors}
        shape = shapes.pop() if len(shapes) == 1 and len(probe_cache.layers) == self.layers else None
        if shape is None or len(shape) != 4 or shape[2] != len(_PROBE) or len(self._output_lengths) != len(parts):
            raise UnsupportedModelError(
                f"{self._name} is not supported: its layers do not all cache keys and values of one shape"
            )
        return shape[1], shape[3]

    def _note(self, module: nn.Module, _args: Any, out: Any) -> None:
        self._output_lengths[module] = len(out) if isinstance(out, tuple) else None

    @torch.inference_mode()
    def _checked(self) -> bool:
        """Return whether the model's logits are right with tree masks and with batches.

        Raises `UnsupportedModelError` if its logits with this KV cache are wrong even for a single sequence.
        """
        tokens = torch.tensor([_PROBE], device=self.device)
        n = tokens.shape[1]
        theirs = self.model(tokens, use_cache=False).logits

        def close(ours: Tensor | None, wanted: Tensor) -> bool:
            error = _CLOSE.get(self.dtype, 0.1) * float(theirs.abs().max())
            return ours is not None and float((ours - wanted).abs().max()) <= error

        with self.session(n + 2):
            ours = [self.forward(tokens[:, a:b], a, rows=slice(0, 1)).logits for a, b in ((0, 3), (3, 4), (4, n))]
            if not close(torch.cat([t for t in ours if t is not None], 1), theirs):
                raise UnsupportedModelError(f"{self._name} is not supported: its logits with a KV cache are wrong")
            if "position_ids" not in self._forward_params:
                return False
            try:
                # The last token but one again, next to a sibling, at slots other than positions, in two rows.
                positions = torch.tensor([[n - 2, n - 2]] * 2, device=self.device)
                mask = torch.ones(2, 2, n, dtype=torch.bool, device=self.device).tril(n - 2)
                mask[:, 1, n - 2] = False
                both = torch.tensor([[3, _PROBE[n - 2]]] * 2, device=self.device)
                self.forward(tokens.repeat(2, 1), 0, logits=None)
                step = self.forward(both, positions, slots=n - 2, mask=mask)
                assert step.logits is not None
                return close(step.logits[:, 1], theirs[:, n - 2].repeat(2, 1))
            except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
                return False

    # -- the cache's life --------------------------------------------------------------------------------------

    def _reset(self, rows: int, pool: BlockTables | None = None) -> None:
        if pool is not None:
            raise SelfspecError("paged KV cache: this model runs by its own forward; expected blocks=None")
        super()._reset(rows)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _allocate(self, slots: int) -> None:
        self.__dict__.pop("cache", None)
        sizes = self.skeleton.sizes
        self.cache = Cache(
            rows=self.rows,
            kv_heads=sizes.kv_heads,
            group=1,
            slots=-(-slots // _GROWTH) * _GROWTH,
            head_dim=sizes.head_dim,
            dtype=sizes.dtype,
            devices=[device_of(layer) for layer in self._structure.layers],
            track_positions=any(window is not None for window in self._windows),
        )

    def register_trained(self, name: str, trained: Trained) -> None:
        """Raise `UnsupportedModelError`, as trained paths are not supported."""
        _ = self.skeleton.parts

    def run_layer(self, index: int, block: Block, x: Tensor) -> Tensor:
        """Raise `UnsupportedModelError`, as a layer runs with its model only."""
        _ = self.skeleton.parts
        raise NotImplementedError

    # -- the one forward ---------------------------------------------------------------------------------------

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
        """Run `tokens` as `Runtime.forward` does; `between` returns each layer's input plus its attention's output."""
        batch, n = tokens.shape
        slots = positions if slots is None else slots
        if mask is None and isinstance(slots, Tensor):
            mask = torch.arange(int(slots.max()) + 1, device=slots.device) <= slots.unsqueeze(-1)
        cache = self._static_cache
        if cache.positions is not None:
            cache.set_positions(positions, slots, n, rows)
        kv_len = mask.shape[-1] if mask is not None else int(slots) + n
        model_kwargs: dict[str, Any] = {
            "past_key_values": HFCacheView(ViewedPass(cache, slots, n, kv_len, rows), self.layers)
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
        compiled = path if isinstance(path, GenericPath) else self._full_path
        with (
            replacing(compiled.forwards),
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
        """Return a sub-layer's output as `Runtime.branch` does.

        The pass skips all other sub-layers, and `x` replaces the input of layer `index`.
        """
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
            self.forward(tokens, positions, path=alone, slots=slots, mask=mask, rows=rows, logits=None)
        finally:
            for hook in hooks:
                hook.remove()
        return left[0] - x

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
        if getattr(self.model.config, "layer_types", None) is None:
            return near
        return {"full_attention": additive(mask), "sliding_attention": near}
