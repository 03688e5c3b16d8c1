"""Float32 weights stored in 16 bits, where that is exact: half the bytes to read, the same arithmetic. CPU only.

The weights of a float32 model are often all bfloat16 or all float16 numbers, as those of a checkpoint in half precision
that was loaded in float32. Products convert the weights in registers and multiply in float32, with the bits that the
float32 weights give with the same kernel. Activations are never rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from selfspec.models.families import is_lean, parts_of
from selfspec.models.families.base import Parts
from selfspec.models.linears import Call, Group, is_exact, is_plain
from selfspec.models.native import ROWS, NativeLinear, NativeProduct, nativise_
from selfspec.models.native_library import Kind
from selfspec.models.stored_linear import StoredEmbedding, StoredLinear, save_tied_once

SAVED_AS = {torch.bfloat16: "BF16", torch.float16: "F16"}  # names in safetensors files
HALVES = tuple(SAVED_AS)
_KINDS = {torch.bfloat16: Kind.STORED_BFLOAT16, torch.float16: Kind.FLOAT16}
_ELEMENTS = 2**20  # weights to check or convert at once


@dataclass(frozen=True, slots=True, eq=False)
class HalfWeight:
    """A float32 weight `[out, in]` whose values are stored exactly, in bfloat16 or float16."""

    values: Tensor
    fixed: ClassVar[str] = (
        "weights held in 16 bits stay in float32 models on the CPU; load with layout 'rows' for others"
    )

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        out, into = self.values.shape
        return out, into

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.values.nbytes

    def rows(self, outputs: Tensor | slice) -> HalfWeight:
        """Return the rows `outputs` of the weight; for a slice, a view."""
        return HalfWeight(self.values[outputs])

    def weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight, exact in float32."""
        return self.values.to(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> HalfWeight:
        return self


class HalfProduct(NativeProduct):
    """The native product of float32 rows with a `HalfWeight`: the bits of `NativeProduct` with the float32 weight.

    If the kernel for many rows needs a float32 weight, `_ELEMENTS` weights are converted at a time.
    """

    def __init__(self, blocks: HalfWeight, bias: Tensor | None = None) -> None:
        self.blocks = HalfWeight(blocks.values.contiguous())
        self.out, self.into = blocks.shape
        self._describe(_KINDS[blocks.values.dtype], 0, self.blocks.values, None, bias)

    def _of_many(self, x: Tensor) -> Tensor:
        rows = x.float()
        if (many := self._many_in_float32(rows)) is not None:
            return many.to(x.dtype)
        at_once = max(_ELEMENTS // self.into // ROWS, 1) * ROWS  # whole tiles of outputs
        parts = [slice(start, start + at_once) for start in range(0, self.out, at_once)]
        product = torch.cat([NativeProduct(self.blocks.rows(part).weight())(rows) for part in parts], -1)
        return (product if self.bias is None else product.add_(self.bias)).to(x.dtype)

    def with_bias(self, bias: Tensor) -> HalfProduct:
        """Return a product with the same weight and a bias `[out]`."""
        return HalfProduct(self.blocks, bias)

    def __reduce__(self) -> tuple[Any, ...]:
        return HalfProduct, (self.blocks, self.bias)


class HalfLinear(StoredLinear):
    """Replacement of a float32 `nn.Linear` by a `HalfWeight`; gradients pass through it to its inputs."""

    fused: HalfProduct

    def __init__(self, fused: HalfProduct, start: int, linear: nn.Linear) -> None:
        super().__init__(fused, start, linear)
        self._own = HalfProduct(fused.blocks.rows(slice(start, start + self.out_features)), self.bias)

    def with_outputs(self, outputs: Tensor) -> Call:
        """Return the product with only the rows `outputs` of the weight, still in 16 bits."""
        return HalfProduct(self._own.blocks.rows(outputs), self._bias_at(outputs))

    def _rows(self, x: Tensor) -> Tensor:
        return self._own(x.float())  # in float32 even under autocast


def half_of(weights: Sequence[Tensor]) -> torch.dtype | None:
    """Return the 16-bit dtype that holds all values of float32 weights exactly; None if there is none.

    Infinities and NaN can be exact in bfloat16 only. Also None for weights of another dtype, or not on the CPU.
    """
    if any(weight.dtype != torch.float32 or weight.device.type != "cpu" for weight in weights):
        return None
    fits = {torch.bfloat16: _fits_bfloat16, torch.float16: _fits_float16}
    return next((dtype for dtype in HALVES if all(map(fits[dtype], _chunks(weights)))), None)


def _chunks(weights: Iterable[Tensor]) -> Iterable[Tensor]:
    for weight in weights:
        yield from torch.split(weight.detach(), max(1, _ELEMENTS // weight.shape[1]))


def _fits_bfloat16(weight: Tensor) -> bool:
    return not bool((weight.contiguous().view(torch.int32) & 0xFFFF).any())


def _fits_float16(weight: Tensor) -> bool:
    weight = weight.contiguous()
    there_and_back = weight.half().float()
    same = torch.equal(there_and_back.view(torch.int32), weight.view(torch.int32))
    return same and bool(there_and_back.isfinite().all())


def halved(weights: Sequence[Tensor], dtype: torch.dtype) -> HalfWeight:
    """Return the joined rows of weights in `dtype`: of that dtype, or float32 weights exact in it (`half_of`)."""
    values = torch.empty(sum(map(len, weights)), weights[0].shape[1], dtype=dtype)
    start = 0
    for chunk in _chunks(weights):
        part = values[start : start + len(chunk)]
        if dtype == torch.bfloat16 and chunk.dtype == torch.float32:
            part.view(torch.int16).copy_(chunk.contiguous().view(torch.int32) >> 16)  # rounding would change a nan
        else:
            part.copy_(chunk)
        start += len(chunk)
    return HalfWeight(values)


@torch.no_grad()
def nativise_exactly_(group: Group) -> None:
    """Replace a group's linears by `HalfLinear`s where that is exact, and otherwise by `nativise_`."""
    exact = all(map(is_exact, group.modules))
    _nativise_in_(group, half_of([module.weight for module in group.modules]) if exact else None)


def _nativise_in_(group: Group, dtype: torch.dtype | None) -> None:
    """Replace a group's linears by `HalfLinear`s in `dtype`, in which they are exact; None: by `nativise_`."""
    modules = group.modules
    if dtype is None:
        nativise_(group)
    elif any((module.bias is None) != (modules[0].bias is None) for module in modules):
        for name in group.names:
            _nativise_in_(Group(group.parent, (name,)), dtype)
    else:
        bias = None if modules[0].bias is None else torch.cat([module.bias.detach() for module in modules]).float()
        fused, start = HalfProduct(halved([module.weight for module in modules], dtype), bias), 0
        for name, module in zip(group.names, modules, strict=True):
            setattr(group.parent, name, HalfLinear(fused, start, module))
            start += module.out_features


def _is_exact_embedding(embedding: Any) -> bool:
    """Return whether a plain embedding returns rows of its weight, or its `embed_scale` times these."""
    # `embed_scale` is of a class that only multiplies what `nn.Embedding` returns.
    scale = isinstance(getattr(embedding, "embed_scale", None), Tensor)
    scaled = scale and type(embedding).__name__.endswith("ScaledWordEmbedding")
    return (type(embedding) is nn.Embedding or scaled) and is_plain(embedding) and embedding.max_norm is None


@torch.no_grad()
def nativise_model_(model: Any, parts: Parts, *, held: torch.dtype | None = None) -> None:
    """Replace all plain linears of a float32 model by native ones, and its embedding, which may be tied to the head.

    Weights are stored in 16 bits where that is exact; a head tied to an embedding that has to stay float32 is too.
    `held`: the 16-bit dtype of all weights, as `hold_` requires them (None: the weights are float32).
    """
    embedding, head = parts.embedding, parts.head
    exact = _is_exact_embedding(embedding)
    tied = getattr(embedding, "weight", None) is head.module.weight
    dtype = (held or half_of([embedding.weight])) if exact else None
    for group in parts.groups():
        if all(map(is_exact, group.modules)):
            _nativise_in_(group, held or half_of([module.weight for module in group.modules]))
    if is_exact(head.module):
        _nativise_in_(head, dtype if tied else held or half_of([head.module.weight]))
    if dtype is not None:
        shared = head.module.blocks if tied and isinstance(head.module, HalfLinear) else None
        scale = getattr(embedding, "embed_scale", None)
        model.set_input_embeddings(StoredEmbedding(shared or halved([embedding.weight], dtype), scale))
    save_tied_once(model)
    for parameter in model.parameters() if held_dtypes(model) else ():
        if parameter.ndim == 1:  # a norm that would keep the whole checkpoint mapped
            parameter.data = parameter.data.clone()


@torch.no_grad()
def hold_(model: Any) -> bool:
    """Make a model loaded in 16 bits the float32 model that holds these weights, in layout `native`.

    It is the model that loading in float32 and `nativise_model_` give, but no weight except those of experts is ever
    stored in float32, so that loading takes half the memory. Returns False, and changes nothing, for a model that this
    is not possible for: one outside `FAMILIES` or not on the CPU, with weights in several dtypes, or with buffers that
    loading rounded, other than the factor of an embedding, of which Gemma 3 keeps the exact value too.
    """
    if not is_lean(model):
        return False
    parts, parameters = parts_of(model), list(model.parameters())
    dtypes = {parameter.dtype for parameter in parameters}
    if len(dtypes) > 1 or not dtypes <= set(HALVES) or any(p.device.type != "cpu" for p in parameters):
        return False
    if not all(map(is_exact, parts.linears())) or not _is_exact_embedding(embedding := parts.embedding):
        return False
    rounded, factor = [b for b in model.buffers() if b.dtype in HALVES], getattr(embedding, "scalar_embed_scale", None)
    if rounded and (factor is None or any(b is not embedding.embed_scale for b in rounded)):
        return False
    if rounded:
        embedding.embed_scale = torch.tensor(factor, dtype=torch.float32)
    nativise_model_(model, parts, held=dtypes.pop())
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    model.config.dtype = torch.float32
    return True


def held_dtypes(model: Any) -> str | None:
    """Return the dtypes of 16 bits in which float32 weights are stored, such as "bfloat16"; None if none are.

    If some weights are stored in float32, such as those of experts, that is named too.
    """
    halves = {module.blocks.values.dtype for module in model.modules() if isinstance(module, HalfLinear)}
    if not halves:
        return None
    whole = any(isinstance(module, (nn.Linear, NativeLinear)) for module in model.modules()) or any(
        parameter.dtype is torch.float32 and parameter.ndim > 1 for parameter in model.parameters()
    )
    dtypes = [dtype for dtype in HALVES if dtype in halves] + [torch.float32] * whole
    return " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
