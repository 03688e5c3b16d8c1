"""Earlier answers (SuffixDecoding, Oliaro et al. 2411.04975): a text goes on as one of them did.

They outlive the process. Pure Python; one suffix automaton for all of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import check_writable, kind, read_text
from selfspec.proposers.base import NO_GUESS, Chances, Guess
from selfspec.proposers.lookup import FIRST
from selfspec.proposers.suffix_automaton import NO_MATCH, SuffixAutomaton

_log = logging.getLogger("selfspec")
BEFORE = 16  # tokens of the prompt's end that are kept with its answer, so that its beginning can be guessed
_APART = -1  # in the place of a token, between two answers
_FORMAT = "selfspec answers 1"


class Answers:
    """Answers in a file, a JSON list of token ids in each line; `vocabulary`: of the model.

    A line that is torn is left out. What is learnt is appended at once. Raises `SelfspecError` for a file that holds
    none, or those of another vocabulary, and where no file can be.
    """

    name = "answers"

    def __init__(self, path: str | Path, vocabulary: int | None) -> None:
        self.path = Path(path)
        self._vocabulary = vocabulary or 0
        self.texts = SuffixAutomaton()
        check_answers(self.path)
        if kind(self.path) == "missing":
            return
        first, *lines = read_text(self.path).split("\n")
        if (of := _vocabulary(first)) != self._vocabulary:
            raise SelfspecError(
                f"{self.path}: its answers are of a vocabulary of {of}, the model's has {self._vocabulary}; "
                "expected those that this model gave"
            )
        for line in lines:
            if text := self._read(line):
                self._hold(text)

    def _read(self, line: str) -> list[int]:
        """The tokens of a line; none of one that is torn."""
        try:
            text = json.loads(line)
        except ValueError:
            return []
        whole = isinstance(text, list) and all(type(token) is int and 0 <= token < self._vocabulary for token in text)
        return text if whole else []

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        """Every answer."""
        text: list[int] = []
        for token in self.texts.tokens:
            if token != _APART:
                text.append(token)
            else:
                yield tuple(text)
                text = []

    def learn(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keep an answer, from the end of its prompt on; warn where the file does not take it."""
        if not answer:
            return
        text = [*prompt[-BEFORE:], *answer]
        header = {"format": _FORMAT, "vocabulary": self._vocabulary}
        try:
            with self.path.open("a") as file:
                if not file.tell():
                    file.write(json.dumps(header))
                file.write(f"\n{json.dumps(text, separators=(',', ':'))}")  # a torn line before stays alone
        except OSError as error:
            _log.warning("%s: answers are not kept (%s)", self.path, error.strerror)
        self._hold(text)

    def _hold(self, text: Sequence[int]) -> None:
        for token in (*text, _APART):
            self.texts.append(token)

    def reader(self) -> AnswersReader:
        """One for a text that has no token yet."""
        return AnswersReader(self.texts)


def check_answers(path: str | Path) -> None:
    """Raise `SelfspecError` for a file that holds no earlier answers, and where none can be made."""
    path = Path(path)
    if kind(path) == "missing":
        check_writable(path)
    elif not keeps_answers(path):
        raise SelfspecError(f"{path}: holds no answers that selfspec kept; name another file")


def keeps_answers(path: str | Path) -> bool:
    """Whether a file holds earlier answers."""
    path = Path(path)
    if not path.is_file():
        return False
    with path.open(errors="replace") as file:
        return _vocabulary(file.readline(200)) is not None


def _vocabulary(line: str) -> int | None:
    """What the first line of a file of answers says; None of another file's."""
    try:
        told = json.loads(line)
        return int(told["vocabulary"]) if told["format"] == _FORMAT else None
    except (ValueError, KeyError, TypeError):
        return None


class AnswersReader:
    """One text, and how often what followed its end in an earlier answer followed it, too."""

    def __init__(self, texts: SuffixAutomaton) -> None:
        self._texts = texts
        self._match = NO_MATCH
        self._chances = Chances(FIRST)

    def append(self, token: int) -> None:
        """See whether it was right, then read the token."""
        if self._match.length and (followed := self._texts.after(self._match, (), 1)):
            self._chances.see(self._match.length, followed == [token])
        self._match = self._texts.then(self._match, token)

    def guess(self, drafted: Sequence[int], most: int) -> Guess:
        """What followed the longest end of the text in the latest answer that it stands in, to that answer's end."""
        match = self._match
        for token in drafted:
            match = self._texts.then(match, token)
        if not match.length or most < 1:
            return NO_GUESS
        tokens = self._texts.after(match, (), most)
        if _APART in tokens:
            tokens = tokens[: tokens.index(_APART)]
        return Guess(tokens, [self._chances(match.length + i) for i in range(len(tokens))])
