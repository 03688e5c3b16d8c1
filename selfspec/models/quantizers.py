"""Quantisers to int4 that know a linear's inputs: a weighted grid for each group, and GPTQ on that grid.

All quantisers return the same layout, which kernels read: values 0 to 15, and a scale and a zero point in bfloat16 for
each output and group of inputs. The scale and the zero point are rounded to bfloat16 before values are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.models.dispatch import device_of
from selfspec.models.families.base import Block, DenseMlp, GatedMlp
from selfspec.models.linears import Group, Into, Onto
from selfspec.models.low_precision import GROUPS, QuantizedWeight
from selfspec.types.methods import INT4_METHODS, Int4Method

_CHUNK = 2**16  # weights to search a grid for at once: few enough for the processor's caches
_FACTORS = tuple(0.6 + 0.025 * i for i in range(20))  # factors on a group's range; one is 1
_FLOOR = 1e-6  # least weight of an input, as a share of its group's mean
_DAMPING = 0.01  # least damping of GPTQ's matrix: what is added to its diagonal, as a share of the diagonal's mean
_COLUMNS = 64  # GPTQ's columns between two updates of all later columns
_SMALLEST = 1e-12  # least scale


@dataclass(slots=True)
class InputMoments:
    """Second moments of a linear's inputs x: `squares`, the mean of x^2 `[in]`, and `products`, that of x x^T.

    `products` `[in, in]` is None unless it was asked for. Both are float32, and sums until `mean` divides them.
    """

    squares: Tensor
    products: Tensor | None = None
    count: int = 0

    @classmethod
    def zeros(cls, into: int, device: torch.device, *, products: bool) -> InputMoments:
        """Return the moments of no inputs."""
        matrix = torch.zeros(into, into, dtype=torch.float32, device=device) if products else None
        return cls(torch.zeros(into, dtype=torch.float32, device=device), matrix)

    def add(self, x: Tensor) -> None:
        """Add the inputs `x` `[N, in]`."""
        x = x.float()
        if self.products is None:
            self.squares += x.square().sum(0)
        else:
            self.products.addmm_(x.t(), x)
        self.count += len(x)

    def mean(self) -> InputMoments:
        """Return the means over all inputs added so far."""
        count = max(self.count, 1)
        if self.products is None:
            return InputMoments(self.squares / count, None, count)
        products = self.products.div_(count)
        return InputMoments(products.diagonal().clone(), products, count)


def watched(block: Block, moments: Mapping[int, InputMoments]) -> Block:
    """Return a block that runs alike, and adds the inputs of its linears to the moments, by the index of the group.

    In every family, attention has two groups (queries, keys and values; output), and so has an MLP without experts.
    """

    def into(number: int, call: Into) -> Into:
        def watch(x: Tensor, out: Tensor) -> object:
            moments[number].add(x)
            return call(x, out)

        return watch if number in moments else call

    def onto(number: int, call: Onto) -> Onto:
        watch = into(number, lambda x, base: call(base, x))
        return lambda base, x: watch(x, base)

    attention = replace(
        block.attention, qkv=into(0, block.attention.qkv), add=onto(1, block.attention.add), native=None
    )
    mlp = block.mlp
    if isinstance(mlp, DenseMlp):
        mlp = replace(mlp, into=into(2, mlp.into), down=onto(3, mlp.down), native=None)
        mlp = replace(mlp, gated=None) if isinstance(mlp, GatedMlp) else mlp  # it would run in place of `into`
    return replace(block, attention=attention, mlp=mlp)


def zero_moments(groups: Mapping[int, Group], *, products: bool) -> dict[int, InputMoments]:
    """Return the moments of no inputs for each of `groups`, on its device."""
    return {
        number: InputMoments.zeros(group.sizes[1], device_of(group.modules[0]), products=products)
        for number, group in groups.items()
    }


def moments_bytes(groups: Mapping[int, Group], *, products: bool) -> int:
    """Return the bytes that the moments of all groups take."""
    sizes = [group.sizes[1] for group in groups.values()]
    return sum(4 * size * (size + 1 if products else 1) for size in sizes)


@torch.no_grad()
def quantize_int4(
    weight: Tensor, method: Int4Method, moments: InputMoments | None = None, *, group: int
) -> QuantizedWeight:
    """Quantise a weight `[out, in]` to int4 by a method, in groups of `group` inputs.

    `moments`: the moments of the inputs; `weighted` needs squares, `gptq` products. Raises `SelfspecError` for a weight
    with values that are not finite, and for an unknown method.
    """
    if method not in QUANTIZERS:
        raise SelfspecError(f"method '{method}' of quantising is not known; known: {', '.join(INT4_METHODS)}")
    if not bool(torch.isfinite(weight).all()):
        raise SelfspecError("a weight to quantise has values that are not finite; expected finite ones")
    moments = moments or InputMoments(torch.ones(weight.shape[1], dtype=torch.float32, device=weight.device))
    return QUANTIZERS[method](weight, moments, group)


def quantize_nearest(weight: Tensor, _moments: InputMoments, group: int) -> QuantizedWeight:
    """Quantise by rounding to nearest, on a grid from the smallest to the largest value of each group."""
    return _by_chunks(weight, group, lambda grouped: _nearest_grid(*_range(grouped)))


def quantize_weighted(weight: Tensor, moments: InputMoments, group: int) -> QuantizedWeight:
    """Quantise by the grid of the least squared error weighted by the inputs' squares (see `_weighted_grid`)."""
    weights = _weights(moments.squares, group)
    return _by_chunks(weight, group, lambda grouped: _weighted_grid(grouped, weights))


def quantize_gptq(weight: Tensor, moments: InputMoments, group: int) -> QuantizedWeight:
    """Quantise by GPTQ (Frantar et al. 2210.17323) on the weighted grid, inputs of large moments first.

    Each input's column of weights is rounded in turn, and its error is made up for by the columns to come. The grid
    belongs to groups in the original order of inputs and is fixed before ("static groups"), so the layout is unchanged.
    The matrix of moments is damped by the number of inputs over the number of tokens (a larger damping makes up for
    less, down to rounding on the grid): products of few tokens do not hold for others.
    """
    if moments.products is None:
        raise SelfspecError("gptq: expected the products of inputs among the moments")
    grid = quantize_weighted(weight, moments, group)
    order = moments.squares.argsort(descending=True, stable=True)
    upper = _inverse_factor(moments.products[order][:, order], max(_DAMPING, len(order) / max(moments.count, 1)))
    assert grid.zero is not None
    scales, zeros = (t.float().t().contiguous() for t in (grid.scale, grid.zero))  # [groups, out]
    columns = weight.float().t()[order]  # [in, out], a copy
    values = torch.empty_like(columns, dtype=torch.int8)
    groups = (order // group).tolist()
    for first in range(0, len(columns), _COLUMNS):
        block = columns[first : first + _COLUMNS]
        own = upper[first : first + len(block), first : first + len(block)]
        errors = torch.empty_like(block)
        for i, column in enumerate(block):
            scale, zero = scales[groups[first + i]], zeros[groups[first + i]]
            rounded = column.sub(zero).div_(scale).add_(8).round_().clamp_(0, 15)
            values[first + i] = rounded
            torch.sub(column, rounded.sub_(8).mul_(scale).add_(zero), out=errors[i]).div_(own[i, i])
            block[i + 1 :].addr_(own[i, i + 1 :], errors[i], alpha=-1)
        columns[first + len(block) :].addmm_(
            upper[first : first + len(block), first + len(block) :].t(), errors, alpha=-1
        )
    ordered = torch.empty_like(values).index_copy_(0, order, values)
    return QuantizedWeight(4, ordered.t().contiguous(), grid.scale, grid.zero)


QUANTIZERS: Mapping[Int4Method, Callable[[Tensor, InputMoments, int], QuantizedWeight]] = {
    "nearest": quantize_nearest,
    "weighted": quantize_weighted,
    "gptq": quantize_gptq,
}


def group_for(into: int, preferred: int) -> int | None:
    """Return the group size for `into` inputs: `preferred`, else another of `GROUPS`; None if none divides them."""
    return next((size for size in (preferred, *GROUPS) if into % size == 0), None)


def _by_chunks(weight: Tensor, group: int, grid: Callable[[Tensor], tuple[Tensor, Tensor]]) -> QuantizedWeight:
    """Quantise a few outputs at a time; `grid` returns the scales and zeros `[out, groups]` of `[out, groups, g]`."""
    out, into = weight.shape
    values = torch.empty(out, into, dtype=torch.int8, device=weight.device)
    scale = torch.empty(out, into // group, dtype=torch.bfloat16, device=weight.device)
    zero, rows = torch.empty_like(scale), max(1, _CHUNK // into)
    for first in range(0, out, rows):
        chunk = slice(first, first + rows)
        grouped = weight[chunk].float().reshape(-1, into // group, group)
        scale[chunk], zero[chunk] = grid(grouped)
        values[chunk] = _round(grouped, scale[chunk], zero[chunk]).view(-1, into)
    return QuantizedWeight(4, values, scale, zero)


def _range(grouped: Tensor) -> tuple[Tensor, Tensor]:
    return grouped.amin(2), grouped.amax(2)


def _nearest_grid(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and zero points, in bfloat16, of a grid from `low` to `high`, as `quantize` does."""
    scale = ((high - low) / 15).clamp_(min=_SMALLEST).bfloat16()
    return scale, (low + 8 * scale.float()).bfloat16()


def _round(grouped: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return the values 0 to 15 nearest to weights `[out, groups, g]`, in the weights' dtype."""
    first = (zero.float() - 8 * scale.float()).unsqueeze(2)
    return (grouped - first).div_(scale.float().unsqueeze(2)).round_().clamp_(0, 15)


def _weights(squares: Tensor, group: int) -> Tensor:
    """Return the inputs' weights `[groups, g]`: none is 0, so that an input that was never seen keeps its weight."""
    weights = squares.float().view(-1, group)
    mean = weights.mean(1, keepdim=True)
    return torch.where(mean > 0, weights.clamp(min=_FLOOR * mean) / mean, torch.ones_like(weights))


def _weighted_grid(grouped: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and zero points that make the weighted squared error of weights `[out, groups, g]` small.

    For each factor, the group's range is shrunk around its middle and the weights are rounded to values q; the weighted
    least squares of scale and zero point for these q give a second grid. The best of all these grids is kept, and never
    one that is worse than the grid of rounding to nearest. `weights`: of the inputs, `[groups, g]`.
    """
    low, high = _range(grouped)
    middle, half = (low + high) / 2, (high - low) / 2
    centred = grouped - middle.unsqueeze(2)
    weighed = centred * weights
    total, first_moment = weights.sum(1), weighed.sum(2)
    squares = (weighed * centred).sum(2)
    best = [torch.full_like(low, torch.inf), torch.ones_like(low), torch.zeros_like(low)]  # error, scale, zero

    def keep(scale: Tensor, zero: Tensor, sums: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep the grid w = q * scale + zero of centred weights and values, in bfloat16, where its error is less."""
        scale = scale.clamp(min=_SMALLEST).bfloat16().float()
        # The stored zero point is that of the value 8, and q is counted from 7.5.
        zero = (zero + middle + scale / 2).bfloat16().float() - middle - scale / 2
        q, qq, qw = sums
        error = squares - 2 * scale * qw - 2 * zero * first_moment
        error += scale * (scale * qq + 2 * zero * q) + zero * zero * total
        less = error < best[0]
        for held, found in zip(best, (error, scale, zero), strict=True):
            torch.where(less, found, held, out=held)

    for factor in _FACTORS:
        scale = (half * (factor * 2 / 15)).clamp_(min=_SMALLEST)
        steps = centred / scale.unsqueeze(2)
        steps.add_(7.5).round_().clamp_(0, 15).sub_(7.5)
        times = steps * weights
        sums = times.sum(2), (times * steps).sum(2), steps.mul_(weighed).sum(2)
        keep(scale, torch.zeros_like(scale), sums)
        q, qq, qw = sums
        spread = total * qq - q * q
        solved = (total * qw - q * first_moment) / spread.clamp(min=_SMALLEST)
        solved = torch.where((spread > _SMALLEST) & (solved > 0), solved, scale)
        keep(solved, (first_moment - solved * q) / total, sums)
    found = best[1].bfloat16(), (best[2] + middle + best[1] / 2).bfloat16()
    nearest = _nearest_grid(low, high)
    ours, theirs = (_error(grouped, weights, *grid) for grid in (found, nearest))
    better = ours < theirs
    return torch.where(better, found[0], nearest[0]), torch.where(better, found[1], nearest[1])


def _error(grouped: Tensor, weights: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return the weighted squared error `[out, groups]` of weights `[out, groups, g]` rounded to a grid."""
    rounded = _round(grouped, scale, zero).sub_(8).mul_(scale.float().unsqueeze(2)).add_(zero.float().unsqueeze(2))
    return rounded.sub_(grouped).square_().mul_(weights).sum(2)


def _inverse_factor(products: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a matrix of moments, whose diagonal is damped first.

    `damping`: what is added to the diagonal, as a share of the diagonal's mean; it is raised until both factors exist.
    Inputs that are all zero get a diagonal of 1.
    """
    diagonal = products.diagonal()
    mean = float(diagonal.mean())
    if not mean > 0:
        return torch.eye(len(products), device=products.device)
    for raised in range(4):
        damped = products.clone()
        damped.diagonal().add_(10**raised * damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
    return torch.eye(len(products), device=products.device)
