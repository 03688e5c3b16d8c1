"""What every trained head is: it reads streams that left some of the model's layers, and gives logits of its words.

Pair i of a text is its token i + 1 and the model's streams at token i. A head reads the pairs of committed tokens, then
its own: a token that it proposed, and what it made of the pair before. Each gives the logits of the token after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.module_files import PartFile
from selfspec.models.kernels import kernel_for
from selfspec.models.linears import Call
from selfspec.models.low_precision import FusedQuantizedLinear
from selfspec.runtime.forward import Runtime

ENDLESS = 2**30
WORDS = "vocabulary"  # the tensor of the tokens that a part drafts


class Products:
    """Makes products of rows `[N, in]` with weights, in 8 bits or in full, and counts the memory that they take."""

    def __init__(self, target: Runtime, *, low: bool) -> None:
        self._target, self._low = target, low
        self.bytes = 0

    @torch.no_grad()
    def of(self, weight: Tensor, bias: Tensor | None = None) -> Call:
        """With a weight `[out, in]`."""
        if not self._low:
            self.bytes += weight.numel() * weight.element_size()
            return lambda x: F.linear(x, weight, bias)
        whole = FusedQuantizedLinear(weight, bias, 8, self._target.skeleton.lowered.kernel or kernel_for(weight, 8))
        self.bytes += whole.bytes
        product, dtype = whole.product, weight.dtype
        return lambda x: product(x).to(dtype)


class Head(ABC):
    """A head at work for a model; `low`: its weights in 8 bits. `places`: the most tokens that it drafts in a row.

    `layers`: which streams it reads, as `Step.hidden` numbers them. `words`: the tokens that it knows, `known` the same
    as numbers. `bytes`: memory that it takes. A part may hold a head over the words of its own, one for all places
    (`head.weight`, `head.bias`) or one for each (`head.0.weight`, ..). Raises `SelfspecError` for a part of another
    kind or model, and where it needs the model's head, which is not at hand (quantised, adapted).
    """

    kind: ClassVar[str]
    places = ENDLESS

    def __init__(self, target: Runtime, part: PartFile, *, low: bool = True) -> None:
        part.check(self.kind, target.skeleton.identity)
        self.target = target
        self.layers = tuple(part.settings.get("layers", (target.layers,)))
        dtype, device = target.dtype, target.device
        take = {
            name: t.to(device) if name.endswith("inv_freq") else t.to(device, dtype)
            for name, t in part.tensors.items()
            if t.is_floating_point()
        }
        self._all = target.skeleton.identity.vocabulary or 0
        words = part.tensors.get(WORDS)
        self.words = (torch.arange(self._all) if words is None else words.long()).to(device)
        self.known = range(self._all) if words is None else words.tolist()
        self._make = Products(target, low=low)
        own = sorted((name for name in take if name.startswith("head.") and name.endswith("weight")), key=_number)
        heads = [(take.pop(name), take.pop(name.replace("weight", "bias"), None)) for name in own]
        self._heads = [self._make.of(*head) for head in heads or [(head_rows(target, self.words), None)]]
        self._then = None if heads else target.skeleton.parts.logits  # what the model's own head's products become
        try:
            self._begin(part.settings, take)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise SelfspecError(f"the part does not hold what a head of kind {self.kind} is made of: {error}") from None

    @abstractmethod
    def _begin(self, settings: Any, tensors: dict[str, Tensor]) -> None:
        """Take the part's tensors, of the model's dtype and on its device."""

    @property
    def bytes(self) -> int:
        """Memory held beside the model."""
        return self._make.bytes

    def reserve(self, slots: int) -> None:  # noqa: B027 (most hold nothing)
        """Hold so many pairs of each row."""

    def read(self, row: int, start: int, tokens: Tensor, streams: Tensor) -> tuple[Tensor, Any]:
        """Logits of the `words` after the last of the pairs `start` on, and what it goes on from.

        `tokens` `[n]`, and `streams` `[n, D * number of layers]`, side by side in the order of `layers`. Pairs that
        were read before from `start` on are forgotten.
        """
        out, state = self._read(row, start, tokens, self._embedded(tokens), streams)
        return self._logits(0, out), state

    def go_on(self, row: int, start: int, place: int, token: int, state: Any) -> tuple[Tensor, Any]:
        """The same after a token that it proposed as the `place`-th (from 1) after the pairs up to `start`."""
        tokens = torch.tensor([token], device=self.target.device)
        out, state = self._go_on(row, start, place, tokens, self._embedded(tokens), state)
        return self._logits(min(place, len(self._heads) - 1), out), state

    def _logits(self, number: int, out: Tensor) -> Tensor:
        logits = self._heads[number](out)[0]
        return logits if self._then is None else self._then(logits)

    @abstractmethod
    def _read(self, row: int, start: int, tokens: Tensor, embedded: Tensor, streams: Tensor) -> tuple[Tensor, Any]:
        """What the head over the vocabulary reads `[1, D]`, and what goes on."""

    @abstractmethod
    def _go_on(
        self, row: int, start: int, place: int, tokens: Tensor, embedded: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        """The same after its own token `[1]`."""

    def _embedded(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.target.skeleton.embed(tokens.unsqueeze(0))[0]
        return embedded.detach()  # an embedding that is called as a module

    def over_all(self, logits: Tensor) -> Tensor:
        """Logits of the words as `[V]` over all tokens: minus infinity for those that the part does not know."""
        every = logits.new_full((self._all,), -torch.inf)
        every[self.words] = logits
        return every


def _number(name: str) -> int:
    number = name.split(".")[1]
    return int(number) if number.isdigit() else 0


def head_rows(target: Runtime, words: Tensor) -> Tensor:
    """Rows of the model's head, `[len(words), D]`. Raises `SelfspecError` where it is not at hand as plain weights."""
    head = target.model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or not weight.is_floating_point() or getattr(head, "bias", None) is not None:
        raise SelfspecError("the model's head is not at hand as plain weights; a trained head needs it")
    rows: Tensor = weight.detach()[words.to(weight.device)]
    return rows


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dimension; `x` itself without a weight."""
    return x if weight is None else F.rms_norm(x, (x.shape[-1],), weight, eps)


def part_of(
    kind: str, settings: dict[str, Any], tensors: dict[str, Tensor], words: Sequence[int] | None, target: Runtime
) -> PartFile:
    """A head as a file holds it, matrices in 16 bits; `tensors` by the names that it reads; `words`: None for all."""
    of_16 = {name: torch.float16 if t.dtype == torch.float16 else torch.bfloat16 for name, t in tensors.items()}
    kinds = {name: torch.float32 if t.dim() < 2 else of_16[name] for name, t in tensors.items()}
    held = {name: tensor.detach().to("cpu", kinds[name]) for name, tensor in tensors.items()}
    if words is not None:
        held[WORDS] = torch.tensor(list(words), dtype=torch.int32)
    return PartFile(kind, settings, held, target.skeleton.identity)
