"""Two tokenizers' tokens held against each other, for a draft model of another vocabulary. Knows nothing of drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError

_UNFINISHED = "\ufffd"  # what the first bytes of a character decode to


class Words(Protocol):
    """A text in another vocabulary, and the tokens that both have: `ours[i]` is what `theirs[i]` is there `[m]`."""

    ours: Tensor
    theirs: Tensor

    def read(self, tokens: Sequence[int]) -> list[int] | None:
        """A text of ours in the other vocabulary; None where it ends within a character."""


class SharedWords:
    """The tokens that two tokenizers have in common: those that stand for the same bytes.

    Texts are read anew by the other tokenizer, special tokens left out, unless all tokens are the same ones. Raises
    `SelfspecError` where nothing is in common.
    """

    def __init__(self, ours: Any, theirs: Any, *, sizes: tuple[int, int]) -> None:
        """`sizes`: how many tokens each model has; tokenizers may know fewer, or more."""
        self._ours, self._theirs = ours, theirs
        mine, other = (_by_text(of, size) for of, size in zip((ours, theirs), sizes, strict=True))
        both = sorted((mine[text], other[text]) for text in mine.keys() & other.keys())
        if not both:
            raise SelfspecError("the draft model's tokenizer has no token in common with the model's")
        self.ours, self.theirs = (torch.tensor(ids) for ids in zip(*both, strict=True))
        self.same = ours.get_vocab() == theirs.get_vocab()

    def read(self, tokens: Sequence[int]) -> list[int] | None:
        """As `Words.read`."""
        if self.same:
            return list(tokens)
        text = self._ours.decode(list(tokens), skip_special_tokens=True)
        if text.endswith(_UNFINISHED):
            return None
        return list(self._theirs(text).input_ids)


def _by_text(tokenizer: Any, size: int) -> dict[tuple[bool, str], int]:
    """The tokens by what they stand for, in one spelling for all kinds of tokenizers; special ones apart."""
    bytelevel = _bytes_of_letters() if _is_bytelevel(tokenizer) else None
    special = set(tokenizer.all_special_ids)
    found = {}
    for token, number in tokenizer.get_vocab().items():
        if number < size:
            found[number in special, token if number in special else _spelt(token, bytelevel)] = number
    return found


def spelling(tokenizer: Any) -> Callable[[int], bytes]:
    """What says for which bytes a token stands: a character's may be spread over several tokens; none: no bytes."""
    letters = _bytes_of_letters() if _is_bytelevel(tokenizer) else None
    special = set(tokenizer.all_special_ids)

    def spelt(token: int) -> bytes:
        found = tokenizer.convert_ids_to_tokens(token)
        if found is None:
            return b""
        return found.encode() if token in special else _raw(found, letters)

    return spelt


def _is_bytelevel(tokenizer: Any) -> bool:
    """Whether each letter of a token is a byte, as GPT-2 has it: a new line is never spelt as one."""
    return "\u010a" in tokenizer.get_vocab()


def _spelt(token: str, letters: dict[str, int] | None) -> str:
    """What a token stands for, bytes as Latin-1."""
    return _raw(token, letters).decode("latin-1")


def _raw(token: str, letters: dict[str, int] | None) -> bytes:
    """The bytes that a token stands for: by letters for bytes, or as SentencePiece spells."""
    if letters is not None:
        known = all(letter in letters for letter in token)
        return bytes(letters[letter] for letter in token) if known else token.encode()
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def _bytes_of_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: those that can be shown stand for themselves, the others come after 255, in order."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = (byte for byte in range(256) if byte not in shown)
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}
