"""From tokens to text as they come: incomplete UTF-8 and possible beginnings of stop strings are held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # what a tokenizer decodes the first bytes of an unfinished character to
_CONTEXT = 6  # prompt tokens decoded along, so that the text continues the prompt (leading spaces)


class TextStream:
    """Decodes one generation's tokens, one at a time, and stops at the first stop string.

    The text ends before the stop string. `take` returns what may be shown and forgets it; `text` is all so far.
    `texts` and `ends` say which token gave which part of it.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens = list(prompt[-_CONTEXT:])
        self._first = len(self._tokens)  # the first new token
        # A window of decoded tokens slides along, so that each token costs the same however long the text.
        self._from, self._decoded = 0, len(self._tokens)
        self._pushed = len(self._tokens)  # tokens looked at
        while self._decoded and self._decode(0, self._decoded).endswith(_INCOMPLETE):
            self._decoded -= 1  # the prompt ends within a character: its first bytes are still to be shown
        self._held = ""
        self._ready: list[str] = []
        self._taken = 0
        self._ends: list[int] = []  # of each new token that was looked at
        self._length = 0  # of what they gave
        self._whole: int | None = None  # the length of all, once no more tokens come
        self.stopped = False

    @property
    def text(self) -> str:
        """All text that may be shown so far."""
        return "".join(self._ready)

    def take(self) -> str:
        """The text that has become ready since the last call."""
        self._look()
        piece = "".join(self._ready[self._taken :])
        self._taken = len(self._ready)
        return piece

    def push(self, token: int) -> bool:
        """Add a token; true when it completed a stop string."""
        self._tokens.append(token)
        if self._stop:  # otherwise decoding can wait until the text is wanted
            self._look()
        return self.stopped

    def _look(self) -> None:
        """Decode what was pushed, token by token."""
        while self._whole is None and self._pushed < len(self._tokens):
            if piece := self._next():
                self._add(piece)

    def _next(self) -> str:
        """Look at one token more: the text that it completes."""
        self._pushed += 1
        before = self._decode(self._from, self._decoded)
        after = self._decode(self._from, self._pushed)
        if len(after) > len(before) and not after.endswith(_INCOMPLETE):
            self._from, self._decoded = self._decoded, self._pushed
            self._length += len(after) - len(before)
            self._ends.append(self._length)
            return after[len(before) :]
        settled = self._length + len(after.rstrip(_INCOMPLETE)) - len(before)  # what comes before the unfinished
        self._ends.append(max(settled, self._ends[-1] if self._ends else 0))
        return ""

    def finish(self) -> None:
        """No more tokens come: decode what was not looked at, and release what was held back."""
        if self._whole is not None:
            return
        before = self._decode(self._from, self._decoded)
        after = self._decode(self._from, len(self._tokens))
        self._whole = self._length + max(0, len(after) - len(before))
        if not self.stopped:
            self._add(after[len(before) :])
        if not self.stopped:
            self._ready.append(self._held)
        self._held = ""

    @property
    def ends(self) -> Sequence[int]:
        """Where what each new token gave ends, in all that was decoded, of which `text` is the beginning.

        Of tokens that share a character, the last has it.
        """
        if self._whole is None:
            self._look()
            return self._ends
        while self._pushed < len(self._tokens):
            self._next()
        if self._ends and self._ends[-1] < self._whole:  # a character that was never completed
            last = len(self._ends) - 1
            while last and not self._decode(self._first + last, self._first + last + 1):
                last -= 1  # a special token, which gave nothing
            self._ends[last:] = [self._whole] * (len(self._ends) - last)
        return self._ends

    def texts(self, n: int, text: str) -> list[str]:
        """What each of the first `n` new tokens gave of `text`, which they made: joined, it is that."""
        ends = [min(end, len(text)) for end in self.ends[:n]]
        ends[-1:] = [len(text)] * bool(ends)
        return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def text_of(self, i: int, token: int) -> str:
        """What `token` would have given as the i-th new token."""
        context = self._tokens[max(0, self._first + i - _CONTEXT) : self._first + i]
        before = self._decoded_text(context).rstrip(_INCOMPLETE)
        return self._decoded_text([*context, token])[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return self._decoded_text(self._tokens[start:end])

    def _decoded_text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _add(self, piece: str) -> None:
        self._held += piece
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._ready.append(self._held[: min(found)])
            self._held = ""
            return
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        self._ready.append(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop)), 0, -1) if stop.startswith(text[-n:])), 0)
