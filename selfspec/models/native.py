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
from selfspec.models.low_precision import QuantizedWeight, groups_of
from selfspec.models.native_library import library

ROWS = 16  # largest number of rows for the batch-invariant kernel if there is a faster one for more rows
# Native products are timed one by one, and their times multiplied by this factor: a native pass has no overhead between
# products, while an eager pass takes a fifth more than its products on a model of 135M parameters, and more on smaller
# models.
IN_A_PASS = 0.7
KINDS = {torch.float32: 0, torch.bfloat16: 1}
_INT8, _INT4 = 2, 3
_TILE, _BLOCK = 16, 32  # outputs of a tile of quantised weights; inputs of a row that share a scale


class Weight(ctypes.Structure):
    """The struct `Weight` of `native.cpp`: a weight with its scales and bias."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("kind", "out", "in", "group", "bias_kind")),
        *((name, c_void_p) for name in ("values", "scale", "bias")),
    ]


class LayerStruct(ctypes.Structure):
    """The struct `Layer` of `native.cpp`: pointers to norms and weights, null where a sub-layer is skipped."""

    _fields_: ClassVar = [
        (name, c_void_p) for name in ("before_attention", "qkv", "o", "before_mlp", "gate_up", "down")
    ]


class PassStruct(ctypes.Structure):
    """The struct `Pass` of `native.cpp`: the layers, sizes and last norm of a pass."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("kind", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        ("eps", c_double),
        ("scaling", c_double),
        ("layer", POINTER(LayerStruct)),
        ("norm", c_void_p),
    ]


class Segment(ctypes.Structure):
    """The struct `Segment` of `native.cpp`: the tokens of one sequence in a pass."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("n", "kv_len", "first")),
        *((name, c_void_p) for name in ("blocks", "mask")),
    ]


class SlotsStruct(ctypes.Structure):
    """The struct `Place` of `native.cpp`: positions, cache slots, RoPE tables and KV cache pointers of a pass."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("n", "kv_len", "stride", "each_layer", "segments")),
        *((name, c_void_p) for name in ("segment", "positions", "slots", "cos", "sin", "keys", "values")),
        ("num_captured", c_int64),
        ("captured_layers", c_void_p),
        ("captured", c_void_p),
    ]


def torch_has_bfloat16() -> bool:
    """Return whether torch has fast bfloat16 products; if not, they were measured 4 times slower than float32."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Return the bytes of a quantised weight in the order that `native.cpp` reads them, and its scales and zero points.

    Tiles of 16 outputs: int8 values plus 128 as `[tiles, inputs / 4, 16, 4]`, with scales `[outputs]`; int4 values as
    `[tiles, inputs / 8, 16, 4]`, two to a byte, with scales and zero points `[tiles, groups, 2, 16]`. Outputs are
    padded to a multiple of 16, and inputs of int8 weights to a multiple of 32.
    """
    out, into = weight.values.shape
    more = -out % _TILE
    if weight.zero is None:
        values = F.pad(weight.values, (0, -into % _BLOCK, 0, more))
        tiles = values.view(-1, _TILE, values.shape[1] // 4, 4).transpose(1, 2)
        return (tiles.to(torch.uint8) ^ 128).contiguous(), F.pad(weight.scale.flatten(), (0, more))
    fours = F.pad(weight.values, (0, 0, 0, more)).to(torch.uint8).view(-1, _TILE, into // 8, 2, 4)
    both = torch.stack([F.pad(part, (0, 0, 0, more)) for part in (weight.scale, weight.zero)])
    grid = both.view(2, -1, _TILE, both.shape[2]).permute(1, 3, 0, 2)
    return (fours[..., 0, :] | fours[..., 1, :] << 4).transpose(1, 2).contiguous(), grid.contiguous()


def quantize_packed(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return `pack(quantize(weight, bits))`, computed by native code in a fraction of the time.

    `weight` `[out, in]` is float32 or bfloat16, on the CPU.
    """
    out, into = weight.shape
    tiles, weight = -(-out // _TILE), weight.contiguous()
    if bits == 8:
        group, values = 0, torch.empty(tiles, -(-into // _BLOCK) * _BLOCK // 4, _TILE, 4, dtype=torch.uint8)
        scale = torch.empty(tiles * _TILE, dtype=torch.bfloat16)
    else:
        group, values = groups_of(into) or into, torch.empty(tiles, into // 8, _TILE, 4, dtype=torch.uint8)
        scale = torch.empty(tiles, into // group, 2, _TILE, dtype=torch.bfloat16)
    kind, shift = (_INT8 if bits == 8 else _INT4), max(group, 1).bit_length() - 1
    address, parts = weight.data_ptr(), (values.data_ptr(), scale.data_ptr())
    library().selfspec_quantize(KINDS[weight.dtype], kind, address, out, into, shift, *parts, torch.get_num_threads())
    return values, scale


def unpack(values: Tensor, scale: Tensor, out: int, into: int) -> QuantizedWeight:
    """Return the weight `[out, into]` that `pack` made `values` and `scale` of."""
    tiles = values.transpose(1, 2)  # [tiles, 16, inputs / 4 or / 8, 4]
    if scale.dim() == 1:
        plain = (tiles ^ 128).reshape(len(scale), -1)[:out, :into].to(torch.int8)
        return QuantizedWeight(8, plain.contiguous(), scale[:out].view(-1, 1))
    plain = torch.stack([tiles & 15, tiles >> 4], 3).reshape(-1, into)[:out].to(torch.int8)
    both = scale.permute(2, 0, 3, 1).reshape(2, -1, scale.shape[1])[:, :out]
    return QuantizedWeight(4, plain.contiguous(), both[0].contiguous(), both[1].contiguous())


class NativeProduct:
    """The product of rows `[N, in]` with a weight `[out, in]`: float32 or bfloat16, stored by rows, or quantised.

    The weight may be the joined weight of linears that read the same input, as their fused `Product`. Sums are float32.
    Up to `ROWS` rows use the kernel `batch_invariant`. For more rows, a float32 weight has a second native kernel if
    the processor has AMX tiles or AVX-512; otherwise torch multiplies, for which a quantised weight is dequantised to
    bfloat16 and kept. If torch has no fast bfloat16 products, quantised and bfloat16 weights use `batch_invariant` for
    any number of rows. Raises `SelfspecError` if the compiled library is not available.
    """

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> None:
        self._weight = weight if isinstance(weight, Tensor) else None
        self._wide: Tensor | None = None  # the transposed weight, for many rows
        scale = None
        if isinstance(weight, QuantizedWeight):
            kind = _INT8 if weight.zero is None else _INT4
            group = 0 if weight.zero is None else (weight.values.shape[1] // weight.scale.shape[1]).bit_length() - 1
            self.out, self.into = weight.values.shape
            values, scale = pack(weight)
        else:
            values, kind, group = weight, KINDS[weight.dtype], 0
            self.out, self.into = weight.shape
        self._describe(kind, group, values.contiguous(), scale, bias)

    def _describe(self, kind: int, group: int, values: Tensor, scale: Tensor | None, bias: Tensor | None) -> None:
        """Set up the struct `Weight` for `native.cpp`; arguments are as its fields."""
        self._multiply, self._multiply_many = library().selfspec_multiply, library().selfspec_multiply_many
        self.values = values
        self.bias = bias if bias is None or bias.dtype in KINDS else bias.float()
        self._tensors = (self.values, scale, self.bias)
        pointers = [None if t is None else t.data_ptr() for t in self._tensors]
        bias_kind = 0 if self.bias is None else KINDS[self.bias.dtype]
        self.described = Weight(kind, self.out, self.into, group, bias_kind, *pointers)
        self.address = ctypes.addressof(self.described)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product `[N, out]`, in the dtype of `x` `[N, in]`."""
        return self._of_many(x) if len(x) > ROWS else self.batch_invariant(x)

    def batch_invariant(self, x: Tensor) -> Tensor:
        """Return the product with any number of rows; each row has the same bits as if multiplied alone."""
        out = torch.empty(len(x), self.out)
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
        if self.values.dtype != torch.float32 and not torch_has_bfloat16():
            return self.batch_invariant(x)
        if self._wide is None:
            weight = self._unpacked_weight()
            self._wide = (weight.weight(torch.bfloat16) if isinstance(weight, QuantizedWeight) else weight).t()
        out = x.to(self._wide.dtype) @ self._wide
        return (out if self.bias is None else out + self.bias).to(x.dtype)

    def _many_in_float32(self, x: Tensor) -> Tensor | None:
        """Return the product of many float32 rows with a float32 model's weight; None if no native kernel is faster."""
        if x.stride(1) != 1:
            return None
        out = torch.empty(len(x), self.out)
        args = x.data_ptr(), x.stride(0), out.data_ptr(), self.out, len(x)
        if not self._multiply_many(self.address, *args, torch.get_num_threads()):
            return None
        return out if self.bias is None else out.add_(self.bias)

    def _unpacked_weight(self) -> Tensor | QuantizedWeight:
        """Return the weight that this product was made from."""
        if self._weight is not None:
            return self._weight
        _, scale, _ = self._tensors
        assert scale is not None
        return unpack(self.values, scale, self.out, self.into)

    @property
    def product(self) -> NativeProduct:
        """This object, which is itself the function from rows to their product."""
        return self

    def with_bias(self, bias: Tensor) -> NativeProduct:
        """Return a product with the same weight and a bias `[out]`."""
        return NativeProduct(self._unpacked_weight(), bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeProduct:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return NativeProduct, (self._unpacked_weight(), self.bias)


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
