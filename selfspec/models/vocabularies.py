"""Mapping between two tokenizers' tokens, for a draft model with another vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError

_UNFINISHED = "\ufffd"  # the decoding of an incomplete character


class TokenMap(Protocol):
    """The common tokens of two vocabularies, `[m]`: `ours[i]` and `theirs[i]` are the same token."""

    ours: Tensor
    theirs: Tensor

    def read(self, tokens: Sequence[int]) -> list[int] | None:
        """Return the other vocabulary's tokens for the text of our `tokens`; None if it ends within a character."""


class TokenizerMap:
    """The tokens that stand for the same bytes in two tokenizers.

    Texts are decoded without special tokens and tokenised by the other tokenizer; if the vocabularies are the same,
    tokens are returned as they are.
    Raises `SelfspecError` if the tokenizers have no token in common.
    """

    def __init__(self, ours: Any, theirs: Any, *, sizes: tuple[int, int]) -> None:
        """Compare two tokenizers; `sizes` are the models' vocabulary sizes, which may differ from the tokenizers'."""
        self._ours, self._theirs = ours, theirs
        mine, other = (_by_text(tokenizer, size) for tokenizer, size in zip((ours, theirs), sizes, strict=True))
        both = sorted((mine[text], other[text]) for text in mine.keys() & other.keys())
        if not both:
            raise SelfspecError("the draft model's tokenizer has no token in common with the model's")
        self.ours, self.theirs = (torch.tensor(ids) for ids in zip(*both, strict=True))
        self.same = ours.get_vocab() == theirs.get_vocab()

    def read(self, tokens: Sequence[int]) -> list[int] | None:
        """Return the other vocabulary's tokens for the text of our `tokens`, as in `TokenMap.read`."""
        if self.same:
            return list(tokens)
        text = self._ours.decode(list(tokens), skip_special_tokens=True)
        if text.endswith(_UNFINISHED):
            return None
        return list(self._theirs(text).input_ids)


def _by_text(tokenizer: Any, size: int) -> dict[tuple[bool, str], int]:
    """Return the token ids below `size` by (is special, text), with texts spelt alike for all kinds of tokenizers."""
    bytelevel = _bytes_of_letters() if _is_bytelevel(tokenizer) else None
    special = set(tokenizer.all_special_ids)
    token_ids = {}
    for token, number in tokenizer.get_vocab().items():
        if number < size:
            token_ids[number in special, token if number in special else _spelt(token, bytelevel)] = number
    return token_ids


def token_bytes_of(tokenizer: Any) -> Callable[[int], bytes]:
    """Return a function from a token id to its bytes, which may be part of a character; unknown ids have no bytes."""
    letters = _bytes_of_letters() if _is_bytelevel(tokenizer) else None
    special = set(tokenizer.all_special_ids)

    def spelt(token: int) -> bytes:
        piece = tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        return piece.encode() if token in special else _raw(piece, letters)

    return spelt


def _is_bytelevel(tokenizer: Any) -> bool:
    """Return whether tokens are byte-level as in GPT-2 (a letter for each byte): GPT-2's newline letter is a token."""
    return "\u010a" in tokenizer.get_vocab()


def _spelt(token: str, letters: dict[str, int] | None) -> str:
    """Return a token's bytes as a Latin-1 string."""
    return _raw(token, letters).decode("latin-1")


def _raw(token: str, letters: dict[str, int] | None) -> bytes:
    """Return a token's bytes, by GPT-2's letters for bytes if given, else by SentencePiece's spelling."""
    if letters is not None:
        known = all(letter in letters for letter in token)
        return bytes(letters[letter] for letter in token) if known else token.encode()
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def _bytes_of_letters() -> dict[str, int]:
    """Return the byte of each GPT-2 letter: printable bytes are their own letters, all others are 256 and up."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = (byte for byte in range(256) if byte not in shown)
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}
