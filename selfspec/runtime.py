"""The runtime: one forward and one cache over a loaded `transformers` model's own leaf modules.

It copies no modelling code, patches no class and changes no parameter. It owns the residual loop, the cache and
the attention call; the loop `decode` drives it. Knows nothing of prompts, tokenizers and profiles.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.cache import ALL_ROWS, Cache
from selfspec.errors import BusyError, SelfspecError
from selfspec.families import Block, read_skeleton
from selfspec.skip import NOTHING_SKIPPED, SkipSet

_GROWTH = 256  # the cache grows in steps, so that prompts of similar length share one allocation


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward gives: `logits` `[B, n or 1, V]` or None, and `hidden` by layer, `[B, n, D]`.

    `hidden[l]` is the residual stream that enters layer l; `hidden[L]` the one that leaves the last layer, before
    the final norm. `between[l]` is the stream of layer l between its attention and its MLP, `[B, n, D]`.
    """

    logits: Tensor | None
    hidden: dict[int, Tensor] = field(default_factory=dict)
    between: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a forward's `[B, n]` tokens stand: rope `[.., n, 1, d]`, what they see and write of the cache, and a mask.

    `keys` and `values` seen are `[B * H_kv, G, seen, d]` for each layer; `to` are each layer's slots of keys and values
    `[B, H_kv, n, d]` to write, or, where slots are scattered, those slots `[B, n]`.
    """

    batch: int
    n: int
    cos: Tensor
    sin: Tensor
    to: tuple[Sequence[Tensor], Sequence[Tensor]] | Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    mask: Tensor | None  # [B * H_kv, 1, n, seen] or [n, seen]
    causal: bool
    rows: slice


class Runtime:
    """One model, ready to be run with sub-layers bypassed.

    Raises `UnsupportedModelError` for a model it does not serve. `rows` is the number of sequences the cache holds.
    """

    trees = True
    cache: Cache

    def __init__(self, model: Any, *, rows: int = 1) -> None:
        self.model = model
        self.skeleton = read_skeleton(model)
        self.rows = rows
        self.layers = len(self.skeleton.blocks)
        self.device = self.skeleton.device
        self.dtype = self.skeleton.dtype
        self._plans: dict[SkipSet, tuple[tuple[int, Block, bool, bool], ...]] = {}
        self._lock = threading.Lock()
        self._allocate(0)

    # -- the cache's life ------------------------------------------------------------------------------------

    @contextmanager
    def session(self, slots: int) -> Iterator[None]:
        """Hold the runtime for one stream that needs `slots` slots a row. Raises `BusyError` while it is held."""
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "this model is still generating; exhaust or close() the first stream, or load a second model"
            )
        try:
            if slots > self.cache.slots:
                self._grow(slots)
            for row in range(self.rows):
                self.cache.clear(row)
            yield
        finally:
            self._lock.release()

    def _grow(self, slots: int) -> None:
        try:
            self._allocate(slots)
        except BaseException as error:
            self._allocate(0)  # whatever happened, the runtime stays usable
            if isinstance(error, RuntimeError):  # which is what running out of memory is
                raise SelfspecError(f"no cache for {slots} positions could be had: {error}") from error
            raise

    @torch.no_grad()  # not inference mode: commits write to these tensors outside a forward
    def _allocate(self, slots: int) -> None:
        s = self.skeleton
        self.__dict__.pop("cache", None)  # free the old one before the new one is made
        slots = -(-slots // _GROWTH) * _GROWTH
        self.cache = Cache(
            rows=self.rows,
            kv_heads=s.kv_heads,
            group=s.heads // s.kv_heads,
            slots=slots,
            head_dim=s.head_dim,
            dtype=self.dtype,
            devices=[block.device for block in s.blocks],
        )
        self._cos, self._sin = self._rope(min(slots, s.context))
        self._later = torch.full((64, 64), -torch.inf, dtype=self.dtype, device=self.device).triu(1)

    def _rope(self, positions: int) -> tuple[Tensor, Tensor]:
        """The model's own rope as tables `[positions, 1, d]`, the sine's first half negated for `_rotate`."""
        s = self.skeleton
        like = torch.zeros(1, dtype=self.dtype, device=self.device)
        cos, sin = s.rotary(like, torch.arange(max(positions, 1), device=self.device)[None])
        if cos.shape[-1] != s.head_dim:
            raise SelfspecError(
                f"rope covers {cos.shape[-1]} of {s.head_dim} dimensions; partial rope is not supported"
            )
        sin = torch.cat((-sin[..., : s.head_dim // 2], sin[..., s.head_dim // 2 :]), dim=-1)
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)

    # -- the one forward -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: int | Tensor,
        *,
        skip: SkipSet = NOTHING_SKIPPED,
        slots: int | Tensor | None = None,
        mask: Tensor | None = None,
        rows: slice = ALL_ROWS,
        logits: Literal["all", "last"] | None = "all",
        hidden: Sequence[int] = (),
        between: Sequence[int] = (),
    ) -> Step:
        """Run `tokens` `[B, n]` through the model without the sub-layers in `skip`.

        `positions` and `slots` are `[B, n]`, or an int: a contiguous run from there, the same for every row.
        Without `slots`, they are the positions. `mask` `[B, n, S]` (true: seen) says which of the first S slots
        each token sees; the default is causal, slots up to the token's own. Keys and values are written before
        they are read, so a token may see itself and its pass. `rows` picks cache rows, B of them. `logits` picks
        the rows that pay for the head; `hidden` the layers whose streams are returned, `between` those whose streams
        between attention and MLP are.

        A bypassed sub-layer adds nothing to the residual stream, computes nothing and writes no keys.
        """
        if rows.indices(self.rows) == (0, self.rows, 1):
            rows = ALL_ROWS
        batch, n = tokens.shape
        place = self._place(batch, n, positions, positions if slots is None else slots, mask, rows)
        x = self.skeleton.embed(tokens).flatten(0, 1)  # [B * n, D]
        streams: dict[int, Tensor] = {}
        halves: dict[int, Tensor] = {}
        for index, block, attend, expand in self._plan(skip):
            if index in hidden:
                streams[index] = x.view(batch, n, -1)
            if x.device != block.device:
                x, place = x.to(block.device), _move(place, block.device)
            if attend:
                x = self._attention(block, index, x, x, place)
            if index in between:
                halves[index] = x.view(batch, n, -1)
            if expand:
                x = self._mlp(block, x, x)
        if self.layers in hidden:
            streams[self.layers] = x.view(batch, n, -1)
        if logits is None:
            return Step(None, streams, halves)
        if logits == "last":
            x = x[n - 1 :: n]
        out = self.skeleton.head(self.skeleton.norm(x))
        return Step(out.view(batch, -1, out.shape[-1]), streams, halves)

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
        block = self.skeleton.blocks[index]
        batch, n, _ = x.shape
        x = x.to(block.device).flatten(0, 1)
        nothing = torch.zeros_like(x)
        if part == "mlp":
            return self._mlp(block, x, nothing).view(batch, n, -1)
        place = self._place(batch, n, positions, positions if slots is None else slots, mask, rows)
        return self._attention(block, index, x, nothing, _move(place, block.device)).view(batch, n, -1)

    @staticmethod
    def _mlp(block: Block, x: Tensor, onto: Tensor) -> Tensor:
        gate, up = block.gate_up(block.post_norm(x)).chunk(2, -1)
        return block.down(onto, block.act(gate) * up)

    def _plan(self, skip: SkipSet) -> tuple[tuple[int, Block, bool, bool], ...]:
        plan = self._plans.get(skip)
        if plan is None:
            bits = skip.bits(self.layers)
            plan = tuple(
                (i, block, not bits[i], not bits[self.layers + i]) for i, block in enumerate(self.skeleton.blocks)
            )
            self._plans[skip] = plan
        return plan

    def _place(
        self, batch: int, n: int, positions: int | Tensor, slots: int | Tensor, mask: Tensor | None, rows: slice
    ) -> _Place:
        if isinstance(positions, int):
            cos, sin = self._cos.narrow(0, positions, n), self._sin.narrow(0, positions, n)
        else:
            cos, sin = self._cos[positions], self._sin[positions]  # [B, n, 1, d]
        causal, additive = False, None
        if mask is not None:
            seen, additive = mask.shape[-1], self._additive(mask)
        elif isinstance(slots, Tensor):
            seen = int(slots.max()) + 1
            additive = self._additive(torch.arange(seen, device=slots.device) <= slots.unsqueeze(-1))
        else:
            seen, causal = slots + n, n > 1 and slots == 0
            additive = self._causal(n, seen) if n > 1 and slots else None
        keys, values = self.cache.seen(seen, rows)
        to = slots if isinstance(slots, Tensor) else self.cache.run(slots, n, rows)
        return _Place(batch, n, cos, sin, to, keys, values, additive, causal, rows)

    def _causal(self, n: int, end: int) -> Tensor:
        """Additive mask `[n, end]` of a chain: every slot before the run, and the run's own up to itself."""
        later = self._later
        if n > later.shape[0]:
            later = torch.full((n, n), -torch.inf, dtype=self.dtype, device=self.device).triu(1)
        return F.pad(later[:n, :n], (end - n, 0))

    def _additive(self, mask: Tensor) -> Tensor:
        zeros = torch.zeros(mask.shape, dtype=self.dtype, device=self.device)
        additive = zeros.masked_fill_(mask.logical_not(), -torch.inf)
        return additive.repeat_interleave(self.skeleton.kv_heads, dim=0).unsqueeze(1)  # [B * H_kv, 1, n, S]

    def _attention(self, block: Block, index: int, x: Tensor, onto: Tensor, place: _Place) -> Tensor:
        s = self.skeleton
        batch, n = place.batch, place.n
        qkv = block.qkv(block.input_norm(x)).view(batch, n, -1, s.head_dim)
        # Queries and keys are turned together: [B, n, H + H_kv, d].
        qk = qkv.narrow(2, 0, s.heads + s.kv_heads)
        qk = torch.addcmul(qk * place.cos, qk.roll(s.head_dim // 2, -1), place.sin)
        k, v = qk.narrow(2, s.heads, s.kv_heads), qkv.narrow(2, s.heads + s.kv_heads, s.kv_heads)
        if isinstance(place.to, Tensor):
            self.cache.scatter(index, k, v, place.to, place.rows)
        else:
            place.to[0][index].copy_(k.transpose(1, 2))
            place.to[1][index].copy_(v.transpose(1, 2))
        q = qk.narrow(2, 0, s.heads)
        if n > 1:
            q = q.view(batch, n, s.kv_heads, -1, s.head_dim).permute(0, 2, 3, 1, 4)
        out = F.scaled_dot_product_attention(
            q.reshape(batch * s.kv_heads, -1, n, s.head_dim),
            place.keys[index],
            place.values[index],
            attn_mask=place.mask,
            is_causal=place.causal,
            scale=block.scaling,
        )  # [B * H_kv, G, n, d]
        if n > 1:
            out = out.view(batch, s.heads, n, s.head_dim).transpose(1, 2)
        return block.o(onto, out.reshape(batch * n, s.heads * s.head_dim))


def _move(place: _Place, device: torch.device) -> _Place:
    """What lies beside the cache, on another device; every layer's keys are on its own already."""
    if place.cos.device == device:
        return place
    moved: dict[str, Any] = {"cos": place.cos.to(device), "sin": place.sin.to(device)}
    if isinstance(place.to, Tensor):
        moved["to"] = place.to.to(device)
    if place.mask is not None:
        moved["mask"] = place.mask.to(device)
    return replace(place, **moved)
