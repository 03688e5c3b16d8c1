"""Norms as the runtime calls them: in few and cheap calls where the arithmetic allows it, else the module itself.

Knows nothing of families and caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.models.dispatch import device_of, weight_of
from selfspec.models.linears import Call, is_plain, on_rows

Norm = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`norm(x, longer, out)`: the rows of the residual stream `x` `[N, D]`, normed `[N, D]`.

`longer` `[N, D + 1]` is `x` with one more column that holds sqrt(D * eps), so that the norm of a row of it is
sqrt(D * (mean(x^2) + eps)). The result may be written to `out` `[N, D]`, which is then returned.
"""


EXACT = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Formula:
    """What a family's RMSNorm multiplies with: its weight, `plus` so much.

    `once`: half precision is rounded after that product, and not before it.
    """

    plus: float = 0.0
    once: bool = False


LLAMAS = Formula()


class Norms:
    """Makes norms of the residual stream out of a model's modules, and keeps those it made up to date.

    `eps` is the one that `longer` is made for, `dtype` the stream's; without it, that of the norms' weights.
    """

    def __init__(self, eps: float, dtype: torch.dtype | None = None, formula: Formula = LLAMAS) -> None:
        self._eps, self._dtype, self._formula = eps, dtype, formula
        self._made: WeakSet[ScaledNorm] = WeakSet()

    def read(self, module: Any, device: torch.device) -> Norm:
        """A norm of a stream on `device`. A copy of its weight, which is small, is kept even where it is offloaded."""
        if not type(module).__name__.endswith("RMSNorm"):
            call = self.rows(module)
            return lambda x, longer, out: call(x)
        plain = is_plain(module, offloaded=True) and _eps_of(module) == self._eps and device_of(module) == device
        if not plain or (weight := weight_of(module)) is None or self._dtype not in (None, weight.dtype):
            return _called(module)
        if weight.dtype not in EXACT:
            rounded = weight.device.type == device.type == "cpu" and self._formula == LLAMAS
            return RoundedNorm(weight.detach()) if rounded else _called(module)
        norm = ScaledNorm(weight.detach().to(device), self._formula.plus)
        self._made.add(norm)
        return norm

    def rows(self, module: Any) -> Call:
        """A norm of anything `[.., width]`, RMSNorm or LayerNorm: queries, keys, what a sub-layer gives."""
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
        """A norm of anything in float32, which training can go through."""
        gain, eps, bias = self.gain(module).float(), _eps_of(module), getattr(module, "bias", None)
        if not type(module).__name__.endswith("LayerNorm"):
            return lambda x: F.rms_norm(x.float(), gain.shape, gain, eps)
        bias = None if bias is None else bias.detach().float()
        return lambda x: F.layer_norm(x.float(), gain.shape, gain, bias, eps)

    def gain(self, module: Any) -> Tensor:
        """What a norm multiplies with `[width]`."""
        weight = weight_of(module)
        assert weight is not None
        return weight.detach() + self._formula.plus

    def refresh(self) -> None:
        """Take over weights that have been changed in place."""
        for norm in self._made:
            norm.refresh()


def _eps_of(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


class ScaledNorm:
    """In float32 and float64: the same formula in fewer and cheaper calls.

    x * weight / sqrt(mean(x^2) + eps) = x * (weight * sqrt(D)) / |(x, sqrt(D * eps))|. transformers' own computes in
    float32 whatever comes in; this keeps float64 exact. `plus` is added to the weight.
    """

    def __init__(self, weight: Tensor, plus: float = 0.0) -> None:
        self._source, self._plus = weight, plus
        with torch.inference_mode(False):
            self._scaled = torch.empty_like(weight)
            self.weight = torch.empty_like(weight) if plus else weight
        self.refresh()

    @torch.inference_mode(False)  # it is written to again later, wherever this is called
    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the weight as it is now."""
        if self._plus:
            torch.add(self._source, self._plus, out=self.weight)
        torch.mul(self.weight, len(self.weight) ** 0.5, out=self._scaled)

    def __call__(self, x: Tensor, longer: Tensor, out: Tensor) -> Tensor:
        """The rows `x`, normed."""
        return torch.mul(x, self._scaled, out=out).div_(torch.linalg.vector_norm(longer, dim=-1, keepdim=True))


class RoundedNorm:
    """In half precision: computed in float32, and rounded where transformers' own norms are.

    That is before the product with the weight, and after it. An accelerator runs the module itself.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight, self._share = weight, len(weight) ** -0.5

    def __call__(self, x: Tensor, longer: Tensor, out: Tensor) -> Tensor:
        """The rows `x`, normed."""
        norm = torch.linalg.vector_norm(longer, dim=-1, keepdim=True, dtype=torch.float32).mul_(self._share)
        return torch.div(x, norm, out=out).mul_(self.weight)


def _called(module: nn.Module) -> Norm:
    """The module itself: its formula is not known, or hooks run."""
    call = on_rows(module)
    return lambda x, longer, out: call(x)
