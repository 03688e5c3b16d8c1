"""Norms as the runtime calls them: a cheap equivalent if its result is the same as the module's, else the module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.models.dispatch import device_of, weight_of
from selfspec.models.linears import Call, is_plain, on_rows
from selfspec.models.triton_kernels.switch import DTYPES, triton_enabled

Norm = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`norm(x, x_with_eps, out)` returns the normalised rows `[N, D]` of the residual stream `x` `[N, D]`.

`x_with_eps` `[N, D + 1]` is `x` with an additional column sqrt(D * eps), so that the Euclidean norm of each row is
sqrt(D * (mean(x^2) + eps)). The result may be written to `out` `[N, D]`, which is then returned.
"""


EXACT = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Formula:
    """A family's variant of RMSNorm, which multiplies the normalised row by weight + `plus`.

    `once`: in half precision, only the product is rounded, and not the normalised row too.
    """

    plus: float = 0.0
    once: bool = False


LLAMAS = Formula()

NormKind = Literal["none", "rms", "layer"]


@dataclass(frozen=True, slots=True, eq=False)
class NormData:
    """A norm as data, for native code: RMSNorm or LayerNorm times `weight` + `plus`, plus `bias`; or no norm at all."""

    kind: NormKind = "none"
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0
    plus: float = 0.0


NO_NORM = NormData()


class Norms:
    """Factory of norms from a model's modules, which keeps the norms it made up to date with their weights.

    `eps` is the eps in the column of `x_with_eps` (see `Norm`). `dtype` is the dtype of the residual stream; None: the
    dtype of the norms' weights.
    """

    def __init__(self, eps: float, dtype: torch.dtype | None = None, formula: Formula = LLAMAS) -> None:
        self._eps, self._dtype, self._formula = eps, dtype, formula
        self._made: WeakSet[ScaledNorm] = WeakSet()

    def read(self, module: Any, device: torch.device) -> Norm:
        """Return a norm of the residual stream on `device`, where it keeps its weight (small), even if offloaded."""
        if not type(module).__name__.endswith("RMSNorm"):
            call = self.rows(module)
            return lambda x, x_with_eps, out: call(x)
        plain = is_plain(module, offloaded=True) and _eps_of(module) == self._eps and device_of(module) == device
        if not plain or (weight := weight_of(module)) is None or self._dtype not in (None, weight.dtype):
            return _called(module)
        if triton_enabled(device) and weight.dtype in DTYPES and self._formula == LLAMAS:
            return _triton_norm(weight.detach().to(device), self._eps)
        if weight.dtype not in EXACT:
            use_rounded_norm = weight.device.type == device.type == "cpu" and self._formula == LLAMAS
            return RoundedNorm(weight.detach()) if use_rounded_norm else _called(module)
        norm = ScaledNorm(weight.detach().to(device), self._formula.plus)
        self._made.add(norm)
        return norm

    def data(self, module: Any) -> NormData | None:
        """Return a norm as data; None for a norm with hooks, of an unknown formula, or not in the stream's dtype."""
        weight, bias, name = getattr(module, "weight", None), getattr(module, "bias", None), type(module).__name__
        if type(module) is not nn.LayerNorm and not name.endswith(("RMSNorm", "LayerNorm")):
            return None
        tensors = [t for t in (weight, bias) if t is not None]
        if weight is None or not is_plain(module) or any(t.is_meta or t.dtype != self._dtype for t in tensors):
            return None
        kind: NormKind = "rms" if name.endswith("RMSNorm") else "layer"
        plus = self._formula.plus if kind == "rms" else 0.0
        return NormData(kind, weight.detach(), None if bias is None else bias.detach(), _eps_of(module), plus)

    def rows(self, module: Any) -> Call:
        """Return an RMSNorm or LayerNorm for rows `[.., width]` such as queries, keys, or a sub-layer's output."""
        weight = getattr(module, "weight", None)
        if weight is None or weight.is_meta or not is_plain(module):
            return on_rows(module)
        shape, eps, plus = weight.shape, _eps_of(module), self._formula.plus
        if type(module) is nn.LayerNorm:
            return partial(F.layer_norm, normalized_shape=shape, weight=weight, bias=module.bias, eps=eps)
        name = type(module).__name__
        if weight.dtype not in EXACT or self._dtype not in (None, weight.dtype):
            return on_rows(module)
        if name.endswith("RMSNorm"):
            return lambda x: F.rms_norm(x, shape, weight + plus if plus else weight, eps)
        if name.endswith("LayerNorm") and getattr(module, "bias", None) is None:
            return partial(F.layer_norm, normalized_shape=shape, weight=weight, bias=None, eps=eps)
        return on_rows(module)

    def in_float32(self, module: Any) -> Call:
        """Return a differentiable norm for rows `[.., width]`, computed in float32, for training."""
        gain, eps, bias = self.gain(module).float(), _eps_of(module), getattr(module, "bias", None)
        if not type(module).__name__.endswith("LayerNorm"):
            return lambda x: F.rms_norm(x.float(), gain.shape, gain, eps)
        bias = None if bias is None else bias.detach().float()
        return lambda x: F.layer_norm(x.float(), gain.shape, gain, bias, eps)

    def gain(self, module: Any) -> Tensor:
        """Return a norm's factor `[width]`: its weight plus the formula's `plus`."""
        weight = weight_of(module)
        assert weight is not None
        return weight.detach() + self._formula.plus

    def refresh(self) -> None:
        """Update all norms made by this factory after in-place changes to the modules' weights."""
        for norm in self._made:
            norm.refresh()


def _eps_of(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


class ScaledNorm:
    """An RMSNorm in float32 or float64, in fewer and cheaper operations.

    x * weight / sqrt(mean(x^2) + eps) = x * (weight * sqrt(D)) / |(x, sqrt(D * eps))|. The modules of `transformers`
    compute in float32 for any input; this class keeps float64 exact. `plus` is added to the weight.
    """

    def __init__(self, weight: Tensor, plus: float = 0.0) -> None:
        self._source, self._plus = weight, plus
        with torch.inference_mode(False):
            self._scaled = torch.empty_like(weight)
            self.weight = torch.empty_like(weight) if plus else weight
        self.refresh()

    @torch.inference_mode(False)  # later calls outside inference mode write to these tensors again
    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute the copies of the weight after an in-place change to it."""
        if self._plus:
            torch.add(self._source, self._plus, out=self.weight)
        torch.mul(self.weight, len(self.weight) ** 0.5, out=self._scaled)

    def __call__(self, x: Tensor, x_with_eps: Tensor, out: Tensor) -> Tensor:
        """Return the normalised rows of `x`."""
        return torch.mul(x, self._scaled, out=out).div_(torch.linalg.vector_norm(x_with_eps, dim=-1, keepdim=True))


class RoundedNorm:
    """An RMSNorm in half precision: computed in float32, and rounded at the same points as in `transformers`.

    The values are rounded before and after the product with the weight. For the CPU only: on an accelerator the module
    itself is called.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight, self._share = weight, len(weight) ** -0.5

    def __call__(self, x: Tensor, x_with_eps: Tensor, out: Tensor) -> Tensor:
        """Return the normalised rows of `x`."""
        norm = torch.linalg.vector_norm(x_with_eps, dim=-1, keepdim=True, dtype=torch.float32).mul_(self._share)
        return torch.div(x, norm, out=out).mul_(self.weight)


def _triton_norm(weight: Tensor, eps: float) -> Norm:
    """Return an RMSNorm as one kernel, rounded at the same points as in `transformers`."""
    from selfspec.models.triton_kernels.elementwise import rms_norm

    return lambda x, x_with_eps, out: rms_norm(x, weight, eps, out)


def _called(module: nn.Module) -> Norm:
    """Return a norm that calls the module itself, for modules with hooks or an unknown formula."""
    call = on_rows(module)
    return lambda x, x_with_eps, out: call(x)
