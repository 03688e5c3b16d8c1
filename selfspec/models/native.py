"""selfspec's own CPU kernels: the matrix products of `native.cpp`, for torch tensors and as modules.

A native product of up to `ROWS` rows with float32, bfloat16, int8 or int4 weights reads a weight once for several rows.
It is batch invariant: a row has the same bits in a batch of any size. Without a compiler, only torch's products are
used.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int64, c_void_p
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.models.linears import Call, Group, PartLinear, Wrapped, is_exact, is_plain, join_, joined_tensor
from selfspec.models.low_precision import PackedWeight, QuantizedWeight
from selfspec.models.native_library import KINDS, NORM_KINDS, Kind, library
from selfspec.models.norms import NormData

ROWS = 16  # largest number of rows for the batch-invariant kernel if there is a faster one for more rows
# Native products are timed one by one, and their times multiplied by this factor: a native pass has no overhead between
# products, while an eager pass takes a fifth more than its products on a model of 135M parameters, and more on smaller
# models.
IN_A_PASS = 0.7


class Weight(ctypes.Structure):
    """The struct `Weight` of `native.cpp`: a weight with its scales and bias."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("kind", "out", "in", "group", "bias_kind")),
        *((name, c_void_p) for name in ("values", "scale", "bias")),
    ]


class NormStruct(ctypes.Structure):
    """The struct `Norm` of `native.cpp`: the kind, size and weights of a norm."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("kind", "size")),
        *((name, c_double) for name in ("eps", "plus")),
        *((name, c_void_p) for name in ("weight", "bias")),
    ]

    @classmethod
    def of(cls, norm: NormData) -> NormStruct:
        """Return the struct of a norm, which has to outlive it."""
        size, pointers = 0 if norm.weight is None else norm.weight.numel(), _pointers(norm.weight, norm.bias)
        return cls(NORM_KINDS[norm.kind], size, norm.eps, norm.plus, *pointers)


class SubLayerStruct(ctypes.Structure):
    """The struct `SubLayer` of `native.cpp`: its weights and norms; `onto` is null if the sub-layer is skipped."""

    _fields_: ClassVar = [
        ("into", c_void_p),
        ("onto", c_void_p),
        ("before", NormStruct),
        ("after", NormStruct),
        ("factor", c_double),
    ]


class LayerStruct(ctypes.Structure):
    """The struct `Layer` of `native.cpp`: two sub-layers, and what is attention's or the MLP's alone."""

    _fields_: ClassVar = [
        ("attention", SubLayerStruct),
        ("mlp", SubLayerStruct),
        ("queries", NormStruct),
        ("keys", NormStruct),
        ("cap", c_double),
        *((name, c_int64) for name in ("spec", "apart", "activation", "gated", "parallel")),
    ]


class PassStruct(ctypes.Structure):
    """The struct `Pass` of `native.cpp`: the layers, sizes and last norm of a pass."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("kind", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        ("scaling", c_double),
        ("layer", POINTER(LayerStruct)),
        ("norm", NormStruct),
    ]


class SpecStruct(ctypes.Structure):
    """The struct `Spec` of `native.cpp`: RoPE tables and the window of some layers' attention."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_int64) for name in ("rotary_dim", "interleaved", "window")),
    ]


class Segment(ctypes.Structure):
    """The struct `Segment` of `native.cpp`: the tokens of one sequence in a pass."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("n", "kv_len", "first", "rounded")),
        *((name, c_void_p) for name in ("blocks", "rounded_blocks", "masks")),
    ]


class SlotsStruct(ctypes.Structure):
    """The struct `Place` of `native.cpp`: positions, cache slots, attention specs and KV cache pointers of a pass."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("n", "kv_len", "stride", "each_layer", "segments")),
        *((name, c_void_p) for name in ("segment", "positions", "slots", "spec", "keys", "values")),
        *((name, c_void_p) for name in ("rounded_keys", "rounded_values", "key_scales", "value_scales")),
        *((name, c_int64) for name in ("rounded", "each_rounded", "rounded_blocks")),
        ("num_captured", c_int64),
        ("captured_layers", c_void_p),
        ("captured", c_void_p),
    ]


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    return [None if t is None else t.data_ptr() for t in tensors]


def torch_has_bfloat16() -> bool:
    """Return whether torch has fast bfloat16 products; if not, they were measured 4 times slower than float32."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class NativeProduct:
    """The product of rows `[N, in]` with a weight `[out, in]`: float32 or bfloat16, stored by rows, or quantised.

    The weight may be the joined weight of linears that read the same input, as their fused `Product`. Sums are float32.
    Up to `ROWS` rows use the kernel `batch_invariant`. So do more rows where no kernel is faster, unless the processor
    has AMX tiles: with quantised weights if it has AVX-512 VNNI, and with a bfloat16 weight if it multiplies pairs of
    bfloat16 numbers (AVX-512 BF16), for which rows are rounded to bfloat16, as those of a bfloat16 model are in torch.
    For more rows, a float32 weight has a second native kernel if the processor has AMX tiles or AVX-512; otherwise
    torch multiplies, for which a quantised weight is dequantised to bfloat16 and kept. If torch has no fast bfloat16
    products, quantised and bfloat16 weights use `batch_invariant` for any number of rows. Raises `SelfspecError` if the
    compiled library is not available.
    """

    def __init__(self, weight: Tensor | QuantizedWeight | PackedWeight, bias: Tensor | None = None) -> None:
        weight = PackedWeight.of(weight) if isinstance(weight, QuantizedWeight) else weight
        self._weight = weight
        self._wide: Tensor | None = None  # the transposed weight, for many rows
        if isinstance(weight, PackedWeight):
            self.out, self.into = weight.out, weight.into
            self._describe(weight.kind, weight.group, weight.values, weight.scale, bias)
        else:
            self.out, self.into = weight.shape
            self._describe(KINDS[weight.dtype], 0, weight.contiguous(), None, bias)

    def _describe(self, kind: int, group: int, values: Tensor, scale: Tensor | None, bias: Tensor | None) -> None:
        """Set up the struct `Weight` for `native.cpp`; arguments are as its fields."""
        native = library()
        self._multiply, self._multiply_many = native.selfspec_multiply, native.selfspec_multiply_many
        # Whether `batch_invariant` is the fastest product with any number of rows.
        self._by_vectors = kind in (Kind.BFLOAT16, Kind.INT8, Kind.INT4) and bool(native.selfspec_many_by_vectors(kind))
        self.values = values
        self.bias = bias if bias is None or bias.dtype in KINDS else bias.float()
        self._tensors = (self.values, scale, self.bias)
        pointers = _pointers(*self._tensors)
        bias_kind = 0 if self.bias is None else KINDS[self.bias.dtype]
        self.described = Weight(kind, self.out, self.into, group, bias_kind, *pointers)
        self.address = ctypes.addressof(self.described)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product `[N, out]`, in the dtype of `x` `[N, in]`."""
        return self._of_many(x) if len(x) > ROWS else self.batch_invariant(x)

    def batch_invariant(self, x: Tensor) -> Tensor:
        """Return the product with any number of rows; each row has the same bits as if multiplied alone."""
        out = torch.empty(len(x), self.out, dtype=torch.float32, device="cpu")
        self._run(x, out, add=False)
        return out.to(x.dtype)

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write the product with `x` `[N, in]` to `out` `[N, out]`."""
        if len(x) > ROWS or out.dtype != torch.float32:
            out.copy_(self(x))
        else:
            self._run(x, out, add=False)

    def add(self, base: Tensor, x: Tensor) -> None:
        """Add the product with `x` `[N, in]` to `base` `[N, out]`."""
        if len(x) > ROWS or base.dtype != torch.float32:
            base.add_(self(x))
        else:
            self._run(x, base, add=True)

    def _run(self, x: Tensor, out: Tensor, *, add: bool) -> None:
        if x.dtype != torch.float32 or x.stride(1) != 1:
            x = x.float().contiguous()
        self._multiply(
            self.address, x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0), len(x), add, torch.get_num_threads()
        )

    def _of_many(self, x: Tensor) -> Tensor:
        if self.values.dtype == x.dtype == torch.float32 and (many := self._many_in_float32(x)) is not None:
            return many
        if self._by_vectors or (self.values.dtype != torch.float32 and not torch_has_bfloat16()):
            return self.batch_invariant(x)
        if self._wide is None:
            weight = self._weight
            self._wide = (weight if isinstance(weight, Tensor) else weight.unpacked().weight(torch.bfloat16)).t()
        out = x.to(self._wide.dtype) @ self._wide
        return (out if self.bias is None else out + self.bias).to(x.dtype)

    def _many_in_float32(self, x: Tensor) -> Tensor | None:
        """Return the product of many float32 rows with a float32 model's weight; None if no native kernel is faster."""
        if x.stride(1) != 1:
            return None
        out = torch.empty(len(x), self.out, dtype=torch.float32, device="cpu")
        args = x.data_ptr(), x.stride(0), out.data_ptr(), self.out, len(x)
        if not self._multiply_many(self.address, *args, torch.get_num_threads()):
            return None
        return out if self.bias is None else out.add_(self.bias)

    @property
    def product(self) -> NativeProduct:
        """This object, which is itself the function from rows to their product."""
        return self

    def with_bias(self, bias: Tensor) -> NativeProduct:
        """Return a product with the same weight and a bias `[out]`."""
        return NativeProduct(self._weight, bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeProduct:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return NativeProduct, (self._weight, self.bias)


class NativeLinear(PartLinear):
    """Replacement of an `nn.Linear` with the same parameters, which the runtime multiplies by native products.

    `forward` computes as in `nn.Linear`. The runtime calls `forward` too once the weight has been moved or cast.
    """

    fused: NativeProduct
    readable: ClassVar[bool] = True

    def __init__(self, fused: NativeProduct, start: int, linear: nn.Linear) -> None:
        super().__init__(fused, start, linear)
        self.weight, self.bias = linear.weight, linear.bias

    @property
    def current(self) -> bool:
        """Whether this module's weight and bias still share memory with the tensors of `fused`."""
        return self._is_part(self.weight, self.fused.values) and self._is_part(self.bias, self.fused.bias)

    def _is_part(self, mine: Tensor | None, fused_tensor: Tensor | None) -> bool:
        if mine is None or fused_tensor is None:
            return mine is fused_tensor
        address = fused_tensor.data_ptr() + self.start * fused_tensor.stride(0) * fused_tensor.element_size()
        return mine.dtype == fused_tensor.dtype and mine.data_ptr() == address

    def with_outputs(self, outputs: Tensor) -> Call | None:
        """Return the product with a copy of the rows `outputs` of the weight; None if the weight was moved or cast."""
        if not self.current or not is_plain(self):
            return None
        bias = None if self.bias is None else self.bias.detach().index_select(0, outputs)
        return NativeProduct(self.weight.detach().index_select(0, outputs), bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product `[.., out]` with `x` `[.., in]`."""
        return F.linear(x, self.weight, self.bias)


def batch_invariant(call: Call) -> Call | None:
    """Return a batch-invariant version of a product (a row has the same bits in any batch); None if not native."""
    if isinstance(call, NativeProduct):
        return call.batch_invariant
    if isinstance(call, Wrapped) and (inner := batch_invariant(call.call)) is not None:
        return replace(call, call=inner)
    return None


@torch.no_grad()
def nativise_(group: Group) -> None:
    """Join a group's linears by rows, and replace them by `NativeLinear`s that share one fused product.

    If only some of the linears have a bias, each gets a product for itself.
    """
    for module in group.modules if all(map(is_exact, group.modules)) else ():
        module.weight.data = module.weight.data.contiguous()
    join_(group)
    modules = group.modules
    weight = joined_tensor([module.weight.detach() for module in modules])
    if weight is None or any((module.bias is None) != (modules[0].bias is None) for module in modules):
        for name in group.names if len(modules) > 1 else ():
            nativise_(Group(group.parent, (name,)))
        return
    bias = None if modules[0].bias is None else joined_tensor([module.bias.detach() for module in modules])
    fused, start = NativeProduct(weight, bias), 0
    for name, module in zip(group.names, modules, strict=True):
        setattr(group.parent, name, NativeLinear(fused, start, module))
        start += module.out_features
