"""From tokens to text as they come: incomplete UTF-8 and possible beginnings of stop strings are held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Prompt = str | Sequence[int]  # text or token ids

_INCOMPLETE = "\ufffd"  # what a tokenizer decodes the first bytes of an unfinished character to
_CONTEXT = 6  # prompt tokens decoded along, so that the text continues the prompt (leading spaces)


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded at all: not with half a surrogate pair, or bytes that were no text."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


class TextStream:
    """Decodes one generation's tokens, one at a time, and stops at the first stop string.

    The text ends before the stop string. `take` returns what may be shown and forgets it; `text` is all so far.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens = list(prompt[-_CONTEXT:])
        # A window of decoded tokens slides along, so that each token costs the same however long the text.
        self._from, self._decoded = 0, len(self._tokens)
        self._pushed = len(self._tokens)  # tokens looked at
        while self._decoded and self._decode(0, self._decoded).endswith(_INCOMPLETE):
            self._decoded -= 1  # the prompt ends within a character: its first bytes are still to be shown
        self._held = ""
        self._ready: list[str] = []
        self._taken = 0
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
        while self._pushed < len(self._tokens):
            self._pushed += 1
            before = self._decode(self._from, self._decoded)
            after = self._decode(self._from, self._pushed)
            if len(after) > len(before) and not after.endswith(_INCOMPLETE):
                self._from, self._decoded = self._decoded, self._pushed
                self._add(after[len(before) :])

    def finish(self) -> None:
        """No more tokens come: decode what was not looked at, and release what was held back."""
        before = self._decode(self._from, self._decoded)
        after = self._decode(self._from, len(self._tokens))
        self._decoded = self._pushed = len(self._tokens)
        if not self.stopped:
            self._add(after[len(before) :])
        if not self.stopped:
            self._ready.append(self._held)
        self._held = ""

    def _decode(self, start: int, end: int) -> str:
        text = self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=True)
        return str(text)

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
