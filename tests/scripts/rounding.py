"""Whether better rounding to 4 bits would pay: how often drafts are right, by how their weights were rounded.

    python tests/scripts/rounding.py --model smollm2-135m

The whole model continues calibration prompts, sampled, for the inputs' second moments H of every linear, and held-out
prompts, greedily, on which the rounded models are held against it: the share of places where both think the same token
best, and the mean of 1 - TV at temperature 0.8. The head stays in full. Ways of rounding, to groups of 64 inputs:

nearest     what selfspec does: between the least and the largest of each group
scales      the range of each group shrunk where that lessens the error weighted by H's diagonal (a search as AWQ's)
gptq        one input after the other, later ones making up for the error (Frantar et al. 2210.17323)
both        gptq in the ranges of scales
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import built_in
import torch
from selfspec.search.continuations import DecodingSettings, continue_prompts
from torch import Tensor, nn

import selfspec
from selfspec.models.low_precision import quantize

SIZE, SHRINKS = 64, [1 - 0.04 * i for i in range(12)]


def ranges(grouped: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scale and zero `[out, groups]` of weights `[out, groups, size]`; with a `weight` of errors, of the best range."""
    low, high = grouped.amin(-1), grouped.amax(-1)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for shrink in SHRINKS[: None if weight is not None else 1]:
        middle, half = (low + high) / 2, (high - low) / 2 * shrink
        scale = (2 * half / 15).clamp(min=1e-12).bfloat16().float()
        zero = (middle - half + 8 * scale).bfloat16().float()
        error = (on_grid(grouped, scale.unsqueeze(-1), zero.unsqueeze(-1)) - grouped) ** 2
        tried = (error.sum(-1) if weight is None else (error * weight).sum(-1), scale, zero)
        if best is not None:
            better = tried[0] < best[0]
            tried = tuple(torch.where(better, a, b) for a, b in zip(tried, best, strict=True))  # type: ignore[assignment]
        best = tried
    assert best is not None
    return best[1], best[2]


def on_grid(values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The nearest of 16 values."""
    return ((values - zero) / scale + 8).round().clamp(0, 15).sub(8).mul(scale).add(zero)


def scales(weight: Tensor, moments: Tensor) -> Tensor:
    """Each group in its best range."""
    grouped = weight.view(len(weight), -1, SIZE)
    scale, zero = ranges(grouped, moments.diagonal().float().view(-1, SIZE))
    return on_grid(grouped, scale.unsqueeze(-1), zero.unsqueeze(-1)).view_as(weight)


def gptq(weight: Tensor, moments: Tensor, *, searched: bool, damp: float = 0.01) -> Tensor:
    """Errors of each input made up for by those after it."""
    h, weight, out = moments.clone(), weight.clone(), torch.empty_like(weight)
    h.diagonal().add_(damp * h.diagonal().mean())
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True).float()
    for first in range(0, len(h), SIZE):
        own = slice(first, first + SIZE)
        block = weight[:, own].clone()
        errors = torch.empty_like(block)
        given = moments.diagonal()[own].float() if searched else None
        scale, zero = (part[:, 0] for part in ranges(block.unsqueeze(1), given))
        for j in range(SIZE):
            out[:, first + j] = on_grid(block[:, j], scale, zero)
            errors[:, j] = (block[:, j] - out[:, first + j]) / inverse[first + j, first + j]
            block[:, j:] -= torch.outer(errors[:, j], inverse[first + j, first + j : first + SIZE])
        weight[:, first + SIZE :] -= errors @ inverse[own, first + SIZE :]
    return out


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    llm = selfspec.load(given.model, profile="none", layout="rows")
    model = llm.model.float()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and not n.endswith("lm_head")}
    moments: dict[str, Tensor] = {}

    def seen(name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def add(_: nn.Module, inputs: tuple[Tensor]) -> None:
            x = inputs[0].flatten(0, 1).double()
            moments[name] = moments.get(name, 0) + x.t() @ x

        return add

    hooks = [module.register_forward_pre_hook(seen(name)) for name, module in linears.items()]
    calibration = continue_prompts(llm, built_in.prompts(llm, "calibration", 24), DecodingSettings(96, 0.8))
    held = continue_prompts(llm, built_in.prompts(llm, "heldout", 12), DecodingSettings(64))
    moments.clear()
    for text in calibration:
        model(torch.tensor([text.tokens]))
    for hook in hooks:
        hook.remove()
    print(
        f"{sum(len(t.tokens) for t in calibration)} tokens of calibration, "
        f"{sum(t.num_new_tokens for t in held)} places held out"
    )

    def logits() -> Tensor:
        return torch.cat([model(torch.tensor([t.tokens])).logits[0, t.prompt_length - 1 : -1] for t in held])

    whole, own = logits(), {name: module.weight.detach().clone() for name, module in linears.items()}
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "8 bits, nearest": lambda w, h: quantize(w, 8).weight(w.dtype),
        "4 bits, nearest": lambda w, h: quantize(w, 4).weight(w.dtype),
        "4 bits, scales": scales,
        "4 bits, gptq": lambda w, h: gptq(w, h, searched=False),
        "4 bits, both": lambda w, h: gptq(w, h, searched=True),
    }
    for way, of in ways.items():
        for name, module in linears.items():
            module.weight.data = of(own[name], moments[name])
        found = logits()
        p, q = ((x / 0.8).softmax(-1) for x in (whole, found))
        same = (whole.argmax(-1) == found.argmax(-1)).float().mean()
        print(f"{way}: {same:.3f} greedy, {torch.minimum(p, q).sum(-1).mean():.3f} at temperature 0.8", flush=True)


if __name__ == "__main__":
    main()
