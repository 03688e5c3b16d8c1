"""Streaming detokeniser, which holds back incomplete characters and starts of stop strings, and token frequencies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

_INCOMPLETE = "\ufffd"  # tokenizers decode the first bytes of an incomplete character to this
_CONTEXT = 6  # prompt tokens decoded with the text, so that the text gets the right leading space


class TextStream:
    """Detokeniser of one generation, which takes one token at a time and stops at the first stop string.

    The text ends before the stop string. `take` returns the new text that can no longer change, and `text` the whole
    text that can no longer change. `texts` and `ends` attribute parts of the text to tokens. `prompt`: the prompt's
    token ids. `stop`: the stop strings.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens = list(prompt[-_CONTEXT:])
        self._first = len(self._tokens)  # index of the first new token
        # Only a sliding window is decoded, so that a token's cost does not grow with the text.
        self._from, self._decoded = 0, len(self._tokens)
        self._pushed = len(self._tokens)  # tokens processed
        self._prompt_text = settled = self._decode(0, self._first)
        while self._decoded and settled.endswith(_INCOMPLETE):
            self._decoded -= 1  # the prompt ends within a character, whose text is still to come
            settled = self._decode(0, self._decoded)
        self._delayed = ""
        self._ready: list[str] = []
        self._taken = 0
        self._ends: list[int] = []  # end of the text of each processed new token
        self._length = 0  # length of the text of the processed tokens
        self._full_length: int | None = None  # length of the whole text, set by `finish`
        self.stopped = False

    @property
    def text(self) -> str:
        """The text so far that can no longer change."""
        return "".join(self._ready)

    def take(self) -> str:
        """Return the text that has become ready since the last call."""
        self._decode_pushed()
        piece = "".join(self._ready[self._taken :])
        self._taken = len(self._ready)
        return piece

    def push(self, token: int) -> bool:
        """Add a token; return whether it completed a stop string."""
        self._tokens.append(token)
        if self._stop:  # without stop strings, decoding can wait until `take`
            self._decode_pushed()
        return self.stopped

    def _decode_pushed(self) -> None:
        """Decode the pushed tokens one by one."""
        while self._full_length is None and self._pushed < len(self._tokens):
            if piece := self._next():
                self._add(piece)

    def _next(self) -> str:
        """Process one more token; return the text that it completes."""
        self._pushed += 1
        before, after = self._around(self._pushed)
        if len(after) > len(before) and not after.endswith(_INCOMPLETE):
            self._from, self._decoded = self._decoded, self._pushed
            self._length += len(after) - len(before)
            self._ends.append(self._length)
            return after[len(before) :]
        settled = self._length + len(after.rstrip(_INCOMPLETE)) - len(before)  # without the incomplete character
        self._ends.append(max(settled, self._ends[-1] if self._ends else 0))
        return ""

    def _around(self, end: int) -> tuple[str, str]:
        """Return the window's text that is settled, and its text with the tokens up to `end`.

        Where the new tokens leave the prompt's text as it is, a last character that looks incomplete was a real U+FFFD,
        or is not completed by these tokens: then it is no part of the new text.
        """
        after = self._decode(self._from, end)
        if self._decoded <= self._first and after.startswith(self._prompt_text):
            return self._prompt_text, after
        return self._decode(self._from, self._decoded), after

    def finish(self) -> None:
        """Decode the remaining tokens and release the delayed text; no more tokens may follow."""
        if self._full_length is not None:
            return
        before, after = self._around(len(self._tokens))
        self._full_length = self._length + max(0, len(after) - len(before))
        if not self.stopped:
            self._add(after[len(before) :])
        if not self.stopped:
            self._ready.append(self._delayed)
        self._delayed = ""

    @property
    def ends(self) -> Sequence[int]:
        """The end offset of each new token's text in the decoded text, of which `text` is a prefix.

        A character of several tokens belongs to the last of these tokens.
        """
        if self._full_length is None:
            self._decode_pushed()
            return self._ends
        while self._pushed < len(self._tokens):
            self._next()
        if self._ends and self._ends[-1] < self._full_length:  # the last character was never completed
            last = len(self._ends) - 1
            while last and not self._decode(self._first + last, self._first + last + 1):
                last -= 1  # special tokens have no text
            self._ends[last:] = [self._full_length] * (len(self._ends) - last)
        return self._ends

    def texts(self, n: int, text: str) -> list[str]:
        """Return the part that each of the first `n` new tokens has in their joint `text`."""
        ends = [min(end, len(text)) for end in self.ends[:n]]
        ends[-1:] = [len(text)] * bool(ends)
        return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def text_of(self, i: int, token: int) -> str:
        """Return the text that `token` would have added as the i-th new token."""
        context = self._tokens[max(0, self._first + i - _CONTEXT) : self._first + i]
        before, after = self._decoded_text(context), self._decoded_text([*context, token])
        if len(after) == len(before) or not after.startswith(before):
            before = before.rstrip(_INCOMPLETE)  # the token completes a character, or goes on with one
        return after[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return self._decoded_text(self._tokens[start:end])

    def _decoded_text(self, tokens: Sequence[int]) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _add(self, piece: str) -> None:
        self._delayed += piece
        positions = [position for position in (self._delayed.find(stop) for stop in self._stop) if position >= 0]
        if positions:
            self.stopped = True
            self._ready.append(self._delayed[: min(positions)])
            self._delayed = ""
            return
        keep = max((_overlap(self._delayed, stop) for stop in self._stop), default=0)
        self._ready.append(self._delayed[: len(self._delayed) - keep])
        self._delayed = self._delayed[len(self._delayed) - keep :]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop)), 0, -1) if stop.startswith(text[-n:])), 0)


MULTIPLE = 16  # quantised heads are fastest with a multiple of this many tokens


def frequent(texts: Iterable[Iterable[int]], most: int, vocabulary: int) -> list[int]:
    """Return the `most` most frequent token ids in `texts` (token ids), in ascending order of id.

    `vocabulary`: the number of token ids of the model. A number of 16 or more is rounded down to a multiple of 16.
    Among equally frequent tokens, such as unseen tokens, the lowest ids are chosen: a tokenizer's early merges were the
    most frequent in its training text.
    """
    count = min(most, vocabulary)
    count -= count % MULTIPLE if count >= MULTIPLE else 0
    counts = Counter(chain.from_iterable(texts))
    return sorted(sorted(range(vocabulary), key=lambda token: -counts[token])[:count])
