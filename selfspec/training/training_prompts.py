"""The beginnings of training texts: given prompts, or a user's turn that the model makes up.

An instruct model that is prompted with its chat template up to the user's message writes one itself (Magpie, Xu et al.
2406.08464). A model without a template starts from its first token alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from selfspec.basics.errors import SelfspecError

USERS_TURN = 96  # tokens of a made-up user's turn, at most
_MARK = "selfspec-user-turn"


@dataclass(frozen=True, slots=True)
class Beginning:
    """Token ids that a text begins with; `turn`: the tokens that end the user's turn, if one is to be made up first."""

    tokens: tuple[int, ...]
    turn: tuple[int, ...] = ()


def synthetic_beginning(tokenizer: Any, ends: frozenset[int], start: int | None) -> Beginning:
    """Return the common beginning of all texts of a model that makes up its own prompts.

    `ends`: its end tokens; `start`: the token that texts begin with. Raises `SelfspecError` if there is neither a chat
    template whose user's turn ends with an end token, nor a token to begin with.
    """
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": _MARK}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        before, separator, after = text.partition(_MARK)
        if separator:
            opening, turn = (tuple(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before, after))
            if turn and turn[0] in ends:
                return Beginning(opening, turn)
    first = start if start is not None else next(iter(sorted(ends)), None)
    if first is None:
        raise SelfspecError("the model has no chat template and no token to begin with; give prompts with --data")
    return Beginning((first,))


class UserTurns(LogitsProcessor):  # type: ignore[misc]
    """Logits processor: the user's turn at temperature 1, then `turn`, then the answer greedily or at `temperature`."""

    def __init__(self, beginning: Beginning, temperature: float) -> None:
        self.beginning, self.temperature = beginning, temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the processed scores `[1, V]` after `[1, n]` tokens."""
        generated = input_ids[0, len(self.beginning.tokens) :].tolist()
        turn = self.beginning.turn
        if turn:
            end = generated.index(turn[0]) if turn[0] in generated else len(generated)
            if end == len(generated):
                return scores if end < USERS_TURN else _only(scores, turn[0])
            num_turn_tokens = len(generated) - end
            if num_turn_tokens < len(turn):
                return _only(scores, turn[num_turn_tokens])
        if self.temperature == 0:
            return _only(scores, int(scores.argmax()))
        return scores / self.temperature

    def answering(self, generated: Sequence[int]) -> bool:
        """Return whether the tokens after the beginning reach into the answer."""
        turn = self.beginning.turn
        return not turn or (turn[0] in generated and len(generated) - list(generated).index(turn[0]) >= len(turn))


def _only(scores: Tensor, token: int) -> Tensor:
    forced = torch.full_like(scores, -torch.inf)
    forced[0, token] = 0.0
    return forced


def beginnings(prompts: Sequence[Sequence[int]] | None, own: Beginning | None, *, seed: int) -> Iterator[Beginning]:
    """Yield beginnings without end: given prompts (token ids), shuffled by `seed` in every cycle, or `own`."""
    draw = random.Random(seed)
    while True:
        if prompts is None:
            assert own is not None
            yield own
            continue
        for number in draw.sample(range(len(prompts)), len(prompts)):
            yield Beginning(tuple(prompts[number]))
