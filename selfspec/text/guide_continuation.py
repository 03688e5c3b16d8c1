"""The text that a grammar forces, as proposed tokens: keys, enum values and punctuation cost no draft pass.

A grammar forces bytes, and a byte string has several tokenisations. The tokenizer's own is proposed: the model may
choose another, so proposed tokens are verified as all others are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from selfspec.text.grammar_state import GrammarState
from selfspec.text.json_layout import next_whitespace

_BYTES = 8  # bytes of text that are looked for, for each token
_STARTS = b'"{}[],:-0123456789tfn'  # all bytes that JSON has outside strings, but whitespace


class Continuation:
    """The proposer of one generation with a guide.

    `tokenizer`: the matcher's `LLTokenizer`. `prompt`: the number of prompt tokens. `end`: the token that ends the
    text; None if several can. `json`: whether the grammar is a JSON schema, which allows whitespace nearly anywhere:
    whitespace is proposed as the text so far has it.
    """

    def __init__(self, matcher: Any, tokenizer: Any, *, prompt: int, end: int | None, json: bool) -> None:
        self._state, self._tokenizer = GrammarState(matcher), tokenizer
        self._prompt, self._end = prompt, end
        starts = [tokenizer.tokenize_bytes(bytes([byte])) for byte in _STARTS] if json else []
        self._starts = starts if all(len(ids) == 1 for ids in starts) else []
        self._latest: tuple[list[int], int, list[int]] = ([], 0, [])  # new tokens, `most`, and what was proposed

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` likely tokens after prompt and new tokens `tokens`; none where the grammar is free."""
        new = list(tokens[self._prompt :])
        if self._latest[0] != new or self._latest[1] < most:
            self._latest = new, most, self._forced(new, most)
        return self._latest[2][: max(most, 0)]

    def _forced(self, new: Sequence[int], most: int) -> list[int]:
        """Return at most `most` likely tokens after the new tokens `new`."""
        matcher = self._state.matcher
        if most < 1 or matcher.is_error() or not self._state.follow(new):
            return []
        forced, consumed = b"", 0
        while len(forced) < _BYTES * most and not matcher.is_error():
            more = bytes(matcher.compute_ff_bytes()) or self._structure(new, forced)
            ids = self._tokenizer.tokenize_bytes(more)
            taken = matcher.try_consume_tokens(ids)
            consumed += taken
            if not more or taken < len(ids):
                break
            forced += more
        ended = matcher.is_stopped() and not matcher.is_error()
        if consumed:
            matcher.rollback(consumed)
        ids = self._tokenizer.tokenize_bytes(forced)
        return [*ids, self._end][:most] if ended and self._end is not None else ids[:most]

    def _structure(self, new: Sequence[int], forced: bytes) -> bytes:
        """Return the only structural character that may follow, behind likely whitespace; b"" if there is none."""
        matcher = self._state.matcher
        allowed = [ids for ids in self._starts if matcher.validate_tokens(ids)]
        if len(allowed) != 1:
            return b""
        start = self._tokenizer.decode_bytes(allowed[0])
        whitespace = next_whitespace(self._tokenizer.decode_bytes(new) + forced, start)
        return b"" if whitespace is None else whitespace + start
