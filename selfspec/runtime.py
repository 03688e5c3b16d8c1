"""The runtime: one forward and one cache over a loaded `transformers` model's own leaf modules.

It copies no modelling code, patches no class and changes no parameter. It owns the residual loop, the cache and
the attention call; the loop `decode` drives it. Knows nothing of prompts, tokenizers and profiles.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.cache import Cache
from selfspec.errors import BusyError, SelfspecError
from selfspec.families import Block, read_skeleton
from selfspec.skip import NOTHING_SKIPPED, SkipSet

ALL_ROWS = slice(None)
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
    """Where a forward's tokens stand: rope `[.., n, 1, d]`, slots to write, slots seen, additive mask."""

    cos: Tensor
    sin: Tensor
    write: int | Tensor
    seen: int
    mask: Tensor | None  # [B * H_kv, 1, n, seen] or [n, seen]
    causal: bool


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
        self._seen = []
        slots = -(-slots // _GROWTH) * _GROWTH
        self.cache = Cache(
            rows=self.rows,
            kv_heads=s.kv_heads,
            slots=slots,
            head_dim=s.head_dim,
            dtype=self.dtype,
            devices=[block.device for block in s.blocks],
        )
        group = s.heads // s.kv_heads
        # One key head serves `group` query heads: fold rows and key heads together, and repeat without copying.
        self._seen = [
            tuple(t.flatten(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for t in pair)
            for pair in zip(self.cache.keys, self.cache.values, strict=True)
        ]
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
        place = self._place(tokens.shape[1], positions, positions if slots is None else slots, mask)
        x = self.skeleton.embed(tokens)
        streams: dict[int, Tensor] = {}
        halves: dict[int, Tensor] = {}
        for index, block, attend, expand in self._plan(skip):
            if index in hidden:
                streams[index] = x
            if x.device != block.device:
                x, place = x.to(block.device), _move(place, block.device)
            if attend:
                x = x + self._attention(block, index, block.input_norm(x), place, rows)
            if index in between:
                halves[index] = x
            if expand:
                x = x + self._mlp(block, x)
        if self.layers in hidden:
            streams[self.layers] = x
        if logits is None:
            return Step(None, streams, halves)
        x = x[:, -1:] if logits == "last" else x
        return Step(self.skeleton.head(self.skeleton.norm(x)), streams, halves)

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
        x = x.to(block.device)
        if part == "mlp":
            return self._mlp(block, x)
        place = _move(self._place(x.shape[1], positions, positions if slots is None else slots, mask), block.device)
        return self._attention(block, index, block.input_norm(x), place, rows)

    @staticmethod
    def _mlp(block: Block, x: Tensor) -> Tensor:
        h = block.post_norm(x)
        return block.down(block.act(block.gate(h)) * block.up(h))

    def _plan(self, skip: SkipSet) -> tuple[tuple[int, Block, bool, bool], ...]:
        plan = self._plans.get(skip)
        if plan is None:
            bits = skip.bits(self.layers)
            plan = tuple(
                (i, block, not bits[i], not bits[self.layers + i]) for i, block in enumerate(self.skeleton.blocks)
            )
            self._plans[skip] = plan
        return plan

    def _place(self, n: int, positions: int | Tensor, slots: int | Tensor, mask: Tensor | None) -> _Place:
        if isinstance(positions, int):
            cos, sin = self._cos.narrow(0, positions, n), self._sin.narrow(0, positions, n)
        else:
            cos, sin = self._cos[positions], self._sin[positions]  # [B, n, 1, d]
        if mask is not None:
            return _Place(cos, sin, slots, mask.shape[-1], self._additive(mask), causal=False)
        if isinstance(slots, int):
            end = slots + n
            if n == 1 or slots == 0:
                return _Place(cos, sin, slots, end, None, causal=n > 1)
            return _Place(cos, sin, slots, end, self._causal(n, end), causal=False)
        seen = int(slots.max()) + 1
        visible = torch.arange(seen, device=slots.device) <= slots.unsqueeze(-1)
        return _Place(cos, sin, slots, seen, self._additive(visible), causal=False)

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

    def _attention(self, block: Block, index: int, x: Tensor, place: _Place, rows: slice) -> Tensor:
        s = self.skeleton
        batch, n, _ = x.shape
        # Queries and keys are turned together: [B, n, H + H_kv, d].
        qk = torch.cat((block.q(x), block.k(x)), dim=-1).view(batch, n, s.heads + s.kv_heads, s.head_dim)
        qk = torch.addcmul(qk * place.cos, qk.roll(s.head_dim // 2, -1), place.sin)
        self._write(index, qk[:, :, s.heads :], block.v(x).view(batch, n, s.kv_heads, s.head_dim), place.write, rows)
        q = qk[:, :, : s.heads].view(batch, n, s.kv_heads, -1, s.head_dim).permute(0, 2, 3, 1, 4)
        keys, values = self._seen[index]
        if rows != ALL_ROWS:
            first, last, _ = rows.indices(self.rows)
            heads = slice(first * s.kv_heads, last * s.kv_heads)
            keys, values = keys[heads], values[heads]
        out = F.scaled_dot_product_attention(
            q.reshape(batch * s.kv_heads, -1, n, s.head_dim),
            keys.narrow(2, 0, place.seen),
            values.narrow(2, 0, place.seen),
            attn_mask=place.mask,
            is_causal=place.causal,
            scale=block.scaling,
        )  # [B * H_kv, G, n, d]
        if n > 1:
            out = out.view(batch, s.heads, n, s.head_dim).transpose(1, 2)
        return block.o(out.reshape(batch, n, s.heads * s.head_dim))

    def _write(self, index: int, k: Tensor, v: Tensor, slots: int | Tensor, rows: slice) -> None:
        keys, values = self.cache.keys[index], self.cache.values[index]
        if rows != ALL_ROWS:
            keys, values = keys[rows], values[rows]
        if isinstance(slots, int):
            n = k.shape[1]
            keys.narrow(2, slots, n).copy_(k.transpose(1, 2))
            values.narrow(2, slots, n).copy_(v.transpose(1, 2))
        else:
            row = torch.arange(len(slots), device=slots.device).unsqueeze(1)
            keys[row, :, slots] = k
            values[row, :, slots] = v


def _move(place: _Place, device: torch.device) -> _Place:
    write = place.write if isinstance(place.write, int) else place.write.to(device)
    mask = None if place.mask is None else place.mask.to(device)
    return _Place(place.cos.to(device), place.sin.to(device), write, place.seen, mask, place.causal)
