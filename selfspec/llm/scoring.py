"""Log probabilities of a prompt's own tokens, by which evaluation harnesses score given answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfspec.llm.request import TokenLogprobs, top_logprobs
from selfspec.runtime.base import Runtime

LOGITS = 2**24  # most logits in memory at a time


def prompt_logprobs(runtime: Runtime, prompt: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Return each prompt token's log probability given the tokens before it, by one prefill of the prompt.

    The first token has none. `top`: how many of the most probable tokens at each position to return. Raises
    `SelfspecError` if no KV cache can be allocated for the prompt.
    """
    scored = [TokenLogprobs(prompt[0], None)]
    chunk = max(1, LOGITS // (runtime.skeleton.identity.vocabulary or LOGITS))
    with runtime.session(len(prompt)):
        for start in range(0, len(prompt) - 1, chunk):
            tokens = prompt[start : min(start + chunk, len(prompt) - 1)]
            step = runtime.forward(torch.tensor([tokens], device=runtime.device), start)
            assert step.logits is not None
            scored += top_logprobs(step.logits[0], prompt[start + 1 : start + 1 + len(tokens)], top)
    return scored
