"""RMSNorm as the runtime calls it: in few and cheap calls where the arithmetic allows it, else the module itself.

Knows nothing of families and caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from selfspec.model.dispatch import device_of, weight_of
from selfspec.model.linears import is_plain, on_rows

Norm = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`norm(x, longer, out)`: the rows of the residual stream `x` `[N, D]`, normed `[N, D]`.

`longer` `[N, D + 1]` is `x` with one more column that holds sqrt(D * eps), so that the norm of a row of it is
sqrt(D * (mean(x^2) + eps)). The result may be written to `out` `[N, D]`, which is then returned.
"""


class Norms:
    """Makes norms of the residual stream out of a model's modules, and keeps those it made up to date.

    `eps` is the one that `longer` is made for.
    """

    def __init__(self, eps: float) -> None:
        self._eps = eps
        self._made: WeakSet[ScaledNorm] = WeakSet()

    def read(self, module: Any, device: torch.device) -> Norm:
        """A norm of a stream on `device`. A copy of its weight, which is small, is kept even where it is offloaded."""
        plain = type(module).__name__.endswith("RMSNorm") and is_plain(module, offloaded=True)
        plain = plain and getattr(module, "variance_epsilon", None) == self._eps and device_of(module) == device
        if not plain or (weight := weight_of(module)) is None:
            return _called(module)
        if weight.dtype not in (torch.float32, torch.float64):
            return RoundedNorm(weight.detach()) if weight.device.type == device.type == "cpu" else _called(module)
        norm = ScaledNorm(weight.detach().to(device))
        self._made.add(norm)
        return norm

    def refresh(self) -> None:
        """Take over weights that have been changed in place."""
        for norm in self._made:
            norm.refresh()


class ScaledNorm:
    """In float32 and float64: the same formula in fewer and cheaper calls.

    x * weight / sqrt(mean(x^2) + eps) = x * (weight * sqrt(D)) / |(x, sqrt(D * eps))|. transformers' own computes in
    float32 whatever comes in; this keeps float64 exact.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        with torch.inference_mode(False):
            self._scaled = torch.empty_like(weight)
        self.refresh()

    @torch.inference_mode(False)  # it is written to again later, wherever this is called
    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the weight as it is now."""
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
