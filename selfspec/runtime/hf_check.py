"""Short passes that show whether a model's logits with the runtime's cache are those without a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.runtime.base import Runtime

_PROBE = (1, 2, 3, 2, 1, 4, 3)  # eighths of the vocabulary
# What models raise for a cache or a mask that they do not take.
MODEL_ERRORS = (TypeError, ValueError, AttributeError, RuntimeError, LookupError, AssertionError)
_CLOSE = {torch.float64: 1e-5, torch.float32: 1e-3}  # tolerance relative to the largest logit; half precision: 0.1


class WrongLogitsError(Exception):
    """A model's logits with the runtime's cache are not those without a cache."""


def probe_tokens(vocabulary: int) -> tuple[int, ...]:
    """Return the tokens of the passes: from the middle of a `vocabulary`, where a tokenizer has ordinary ones.

    Its first tokens are often special. Their activations can be so large that logits in half precision mean nothing:
    SmolLM2's in bfloat16 differ there by 22 from those in float32, of which the largest is 32, and here by 0.9.
    """
    return tuple(vocabulary * eighths // 8 for eighths in _PROBE)


def tolerance(logits: Tensor, dtype: torch.dtype) -> float:
    """Return by how much logits computed in `dtype` may differ from `logits`."""
    return _CLOSE.get(dtype, 0.1) * float(logits.abs().max())


def check_chains(runtime: Runtime, probe: tuple[int, ...], theirs: Tensor, allowed: float) -> float:
    """Return the largest difference from `theirs` of the logits of several passes over `probe`.

    Raises `WrongLogitsError` if it is more than `allowed`. All tokens are accepted, but for two that stand between the
    second pass and the last. Call within a session, whose first row the passes use.
    """
    tokens, row = torch.tensor([probe], device=runtime.device), slice(0, 1)
    parts: list[Tensor] = []
    try:
        for start, end in ((0, 3), (3, 4), (4, len(probe))):
            if start == 4:
                runtime.forward(tokens[:, 1:3], start, rows=row)
            logits = runtime.forward(tokens[:, start:end], start, rows=row).logits
            assert logits is not None
            parts.append(logits)
            runtime.cache.commit(0, range(end - start - 1))
    except MODEL_ERRORS as problem:
        raise WrongLogitsError(f"it runs without a KV cache, but not with one ({problem})") from None
    error = _difference(torch.cat(parts, 1), theirs)
    if not error <= allowed:  # nan is wrong, too
        raise WrongLogitsError("its logits with a KV cache are wrong")
    return error


def takes_masks(runtime: Runtime, probe: tuple[int, ...], theirs: Tensor, allowed: float) -> bool:
    """Return whether the model's logits are right with masks per token, at slots other than positions, in two rows.

    Call within a session with two rows.
    """
    n = len(probe)
    try:
        # The last token but one again, next to a sibling.
        positions = torch.tensor([[n - 2, n - 2]] * 2, device=runtime.device)
        mask = torch.ones(2, 2, n, dtype=torch.bool, device=runtime.device).tril(n - 2)
        mask[:, 1, n - 2] = False
        both = torch.tensor([[probe[2], probe[n - 2]]] * 2, device=runtime.device)
        runtime.forward(torch.tensor([probe] * 2, device=runtime.device), 0, logits=None)
        step = runtime.forward(both, positions, slots=n - 2, mask=mask)
        assert step.logits is not None
        return _difference(step.logits[:, 1], theirs[:, n - 2].repeat(2, 1)) <= allowed
    except MODEL_ERRORS:
        return False


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())
