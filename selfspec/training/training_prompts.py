"""The first tokens of training texts: given prompts, or a start after which the model makes up a user's message.

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

USERS_TURN = 96  # most tokens of a user's message that the model makes up
_MARK = "selfspec-user-turn"


@dataclass(frozen=True, slots=True)
class Beginning:
    """The token ids that a text starts with.

    `turn`: if the model first has to make up a user's message, the tokens that end the message and start the answer.
    """

    tokens: tuple[int, ...]
    turn: tuple[int, ...] = ()


def synthetic_beginning(tokenizer: Any, ends: frozenset[int], start: int | None) -> Beginning:
    """Return the first tokens of all texts if the model makes up its own prompts.

    `ends`: the model's end tokens. `start`: its start token, if it has one. Raises `SelfspecError` if there is
    neither a chat template whose user's turn ends with an end token, nor a start or end token.
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
        raise SelfspecError(
            "the model has neither a usable chat template nor a start token; give prompts with --prompts"
        )
    return Beginning((first,))


class UserTurns(LogitsProcessor):  # type: ignore[misc]
    """Logits processor for made-up prompts.

    It samples the user's message at temperature 1, forces the tokens `turn`, and samples the answer at `temperature`,
    where 0 is greedy.
    """

    def __init__(self, beginning: Beginning, temperature: float) -> None:
        self.beginning, self.temperature = beginning, temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the processed scores `[1, V]` of the token after `input_ids` `[1, n]`."""
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
        """Return whether `generated`, the tokens after the beginning, have reached the answer."""
        turn = self.beginning.turn
        return not turn or (turn[0] in generated and len(generated) - list(generated).index(turn[0]) >= len(turn))


def _only(scores: Tensor, token: int) -> Tensor:
    forced = torch.full_like(scores, -torch.inf)
    forced[0, token] = 0.0
    return forced


def beginnings(prompts: Sequence[Sequence[int]] | None, own: Beginning | None, *, seed: int) -> Iterator[Beginning]:
    """Yield beginnings endlessly: `prompts` (token ids), shuffled by `seed` in every cycle, or `own`."""
    draw = random.Random(seed)
    while True:
        if prompts is None:
            assert own is not None
            yield own
            continue
        for number in draw.sample(range(len(prompts)), len(prompts)):
            yield Beginning(tuple(prompts[number]))
